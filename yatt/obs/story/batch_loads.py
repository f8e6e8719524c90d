"""What a run measured of its last batches, from its event log."""

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from yatt.adapters.files.segments import SegmentTail
from yatt.records.events.log import logged_event
from yatt.records.events.slabs import BatchMeasured

LAST = 3
"""Number of a run's last batches that are used."""


def read_batch_loads(events: Path, num: int = LAST) -> tuple[list[BatchMeasured], int]:
    """Returns the last `num` batches of a run's newest attempt that has any, oldest first, and the number of
    damaged lines of the log."""
    found, tail = deque[tuple[int, BatchMeasured]](maxlen=num), SegmentTail(events, logged_event)
    for batch in tail.batches():
        found += [(each.attempt, each.event) for each in batch if isinstance(each.event, BatchMeasured)]
    return [load for attempt, load in found if attempt == found[-1][0]], tail.unreadable


def mean_lengths(loads: Sequence[BatchMeasured]) -> tuple[float, ...]:
    """Returns the mean of each quantile of several batches; only of those with as many as the last has."""
    alike = [load.lengths for load in loads if len(load.lengths) == len(loads[-1].lengths)]
    return tuple(sum(each) / len(each) for each in zip(*alike, strict=True))
