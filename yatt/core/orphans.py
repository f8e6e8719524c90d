"""Which orphans of a node's workers have to end. Pure.

A reward function may start processes in sessions of their own, which no signal to the worker's process group
reaches. When their parent ends they become children of the controller: *orphans*.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """A process that the controller has not started.

    Attributes:
        worker: the worker it came from, by its environment; empty if that does not say.
    """

    pid: int
    session: int
    worker: str = ""


def doomed(
    orphans: Iterable[Orphan], living: Mapping[int, str], *, known: Collection[int], has_ended: bool
) -> list[int]:
    """The orphans whose worker has ended.

    A daemon that a living worker has started is an orphan too, and stays. One that does not say whose it is
    belongs to the worker that has just ended if it was not there before.

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
