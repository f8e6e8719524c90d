"""Where the last state of an attempt is saved when its time is limited: pure.

A warning (preemption, time limit) leaves a known time until everything is killed. A save to the store needs
time by its size, at the rate of the slowest of the last uploads of this attempt. A save to the local disks
needs less, but only a start on the same nodes can use it. So the store is chosen if the save fits. An upload
in flight is given up at the last moment at which a save to the disks still fits, unless it is expected to
end in time.

Without a local tier, or without a known time, the store is the only choice.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

RESERVE_S = 20.0
"""Time that stays free: for the switch of GPUs to the trainers before a save, for the end of the attempt, and
for the delay with which a stop request arrives."""

LOCAL_BYTES_PER_S = 200e6
"""Rate per node that is assumed of a local disk before one was measured."""

LATE_S = 2.0
"""Longest delay with which the last moment for a save to the disks is noticed; the reserve covers it."""

MOST_RATES = 3
"""Number of last uploads that are compared."""


class SaveTarget(Enum):
    """Where a save goes."""

    STORE = "store"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Transfer:
    """A finished transfer of all nodes together."""

    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """The measured transfers of an attempt, oldest first.

    Args:
        uploads: to the store.
        local: to the local disks; `seconds` are those of the slowest node.
        num_nodes: number of trainer nodes, which write their parts at the same time.
        has_local: whether there is a local tier that has taken its last save.
    """

    uploads: Sequence[Transfer] = ()
    local: Sequence[Transfer] = ()
    num_nodes: int = 1
    has_local: bool = False

    def upload_s(self, size_bytes: int) -> float:
        """Returns the seconds of an upload; 0 if none was measured."""
        return size_bytes * _slowest(self.uploads)

    def local_s(self, size_bytes: int) -> float:
        """Returns the seconds of a save to the local disks."""
        assumed = 1 / (LOCAL_BYTES_PER_S * self.num_nodes)
        return size_bytes * (_slowest(self.local) or assumed)


def target_of(size_bytes: int, left_s: float, speeds: Speeds) -> SaveTarget:
    """Returns where a save goes that begins now. A save that fits nowhere goes to the local disks, which need
    less time.

    Args:
        left_s: seconds until everything is killed; infinite if not known.
    """
    if not speeds.has_local or speeds.upload_s(size_bytes) + RESERVE_S <= left_s:
        return SaveTarget.STORE
    return SaveTarget.LOCAL


def is_given_up(size_bytes: int, left_s: float, waited_s: float, speeds: Speeds) -> bool:
    """Whether an upload in flight is given up now for a save to the local disks.

    If such a save does not fit either, by a guess of the disks' rate, the upload goes on: it may end in time.

    Args:
        size_bytes: of the upload, and of that save.
        waited_s: seconds since the upload began.
    """
    if not speeds.has_local:
        return False
    free_s, local_s, upload_s = left_s - RESERVE_S, speeds.local_s(size_bytes), speeds.upload_s(size_bytes)
    rest_s = upload_s - waited_s if upload_s > waited_s else math.inf  # unknown, or later than expected
    if rest_s <= free_s or local_s < free_s:
        return False
    is_last_moment = local_s <= free_s + LATE_S
    return is_last_moment or local_s < upload_s - waited_s


def _slowest(transfers: Sequence[Transfer]) -> float:
    """Returns the most seconds per byte of the last transfers; 0 if there are none."""
    last = [each.seconds / each.size_bytes for each in transfers[-MOST_RATES:] if each.size_bytes > 0]
    return max(last, default=0.0)
