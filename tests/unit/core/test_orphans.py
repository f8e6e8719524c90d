"""Which orphans end."""

import pytest

from yatt.core.attempts.orphans import Orphan, doomed_orphans

LIVING = {10: "node/reward-p0.2", 20: "node/reward-p1.1"}


@pytest.mark.parametrize(
    ("orphan", "ends", "ends_after_a_workers_end"),
    [
        (Orphan(pid=99, session=99, worker="node/reward-p0.1"), True, True),
        (Orphan(pid=99, session=99, worker="other/reward-p0.2"), True, True),
        (Orphan(pid=99, session=99, worker="node/reward-p0.2"), False, False),
        (Orphan(pid=99, session=20), False, False),
        (Orphan(pid=99, session=99), False, True),
        (Orphan(pid=5, session=5), False, False),
    ],
    ids=["of a former start", "of another run", "a living worker's", "in its session", "unmarked", "known"],
)
def test_an_orphan_ends_with_its_worker(orphan: Orphan, ends: bool, ends_after_a_workers_end: bool) -> None:
    for has_ended, expected in ((False, ends), (True, ends_after_a_workers_end)):
        assert doomed_orphans([orphan], LIVING, known={5}, has_ended=has_ended) == [orphan.pid] * expected
