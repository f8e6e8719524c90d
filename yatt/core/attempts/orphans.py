"""Selects the orphans of ended workers, which have to be killed. Pure.

A reward function may start processes in new sessions, which do not get signals to the worker's process group.
When their parent ends, they become children of the controller: *orphans*.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """A child process that the controller has not started.

    Attributes:
        worker: the worker that it descends from, by its environment; empty if unknown.
    """

    pid: int
    session: int
    worker: str = ""


def doomed_orphans(
    orphans: Iterable[Orphan], living: Mapping[int, str], *, known: Collection[int], has_ended: bool
) -> list[int]:
    """Returns the orphans whose worker has ended.

    A daemon started by a living worker is an orphan too, and stays. A new orphan of unknown origin belongs to
    the worker that has just ended.

    Args:
        living: the workers that run, by pid.
        known: orphans that were there before.
        has_ended: a worker has ended since.
    """
    addresses = set(living.values())
    return [
        each.pid
        for each in orphans
        if each.worker not in addresses
        and each.session not in living
        and (each.worker or (has_ended and each.pid not in known))
    ]
