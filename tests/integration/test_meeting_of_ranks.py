"""How the ranks of an engine meet, without the process group that they make then."""

import threading
import time
from pathlib import Path

import pytest

from tests.runs import HANG_S
from yatt.adapters.net.curve import make_keys
from yatt.collectives import group
from yatt.engine.spanning.meeting import EnginePlace, RankMeeting
from yatt.paths import RunPaths


class Rank(threading.Thread):
    """One rank that meets the others; each process of a node's later life has the names of the former one."""

    def __init__(self, run: Path, index: int) -> None:
        super().__init__(daemon=True)
        place = EnginePlace(
            paths=RunPaths(run), attempt=1, worker=f"rollout-n{index}s0r{index}.1", engine="rollout-n0",
            rank=index, num_ranks=2, host="127.0.0.1", meeting_s=60.0, timeout_s=60.0, device="cpu",
        )  # fmt: skip
        self.meeting = RankMeeting(place, lambda: None)
        self.start()

    def run(self) -> None:
        self.meeting.meet()

    def has_met(self, within_s: float = HANG_S) -> bool:
        self.join(within_s)
        return not self.is_alive()


def test_a_rank_of_a_later_life_does_not_join_a_group_that_has_begun_with_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports: list[int] = []
    monkeypatch.setattr(
        group.dist, "init_process_group", lambda *_, store, **__: ports.append(store._client._address)
    )
    make_keys(RunPaths(tmp_path).keys)
    first, second = Rank(tmp_path, 0), Rank(tmp_path, 1)
    assert first.has_met() and second.has_met()
    again = Rank(tmp_path, 1)  # rank 0 has not noticed yet that the former one is over
    time.sleep(1.0)
    assert not again.has_met(0.0)
    fresh = Rank(tmp_path, 0)
    assert fresh.has_met() and again.has_met()
    assert ports[2:] == [ports[2]] * 2 != ports[:2]
    for rank in (second, again, first, fresh):
        rank.meeting.leave()
