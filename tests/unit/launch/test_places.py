"""Who may take the place of an engine node, and with which life."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from yatt.adapters.files.files import sealed_record, write_atomically
from yatt.adapters.run_folder.attempt_claim import claim_attempt
from yatt.adapters.run_folder.ledger import ENDED, STARTED, STOP, write_record
from yatt.launch.attempt import join
from yatt.launch.attempt.join import CLAIMED_S, GRACE_S, SILENT_S, Places, why_over
from yatt.launch.node.places import NextLife, claim_life, has_ended, is_under_way, life_in_place, newest_claim
from yatt.paths import RunPaths


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(join.clock, "monotonic_s", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Run:
    """An attempt of four nodes, of which two run engines."""

    def __init__(self, root: Path, absent: tuple[int, ...] = ()) -> None:
        self.paths = RunPaths(root)
        self.attempt = claim_attempt(self.paths)
        self.beats = itertools.count(1)
        for folder in ("lost", "endpoints", "controllers"):
            (self.paths.attempt(self.attempt) / folder).mkdir(parents=True)
        write_record(self.paths, self.attempt, STARTED, {"absent": list(absent), "committed": 0})
        write_atomically(
            self.paths.all_endpoints(self.attempt), sealed_record({"addresses": {}}, self.attempt)
        )

    def beat(self) -> None:
        write_atomically(
            self.paths.heartbeat(self.attempt), sealed_record({"counter": next(self.beats)}, self.attempt)
        )

    def lose(self, node: int, **more: Any) -> None:
        content = {"node": node, "life": 1, "why": "is gone", "goes_on": True, **more}
        write_atomically(self.paths.lost(self.attempt, node), sealed_record(content, self.attempt))

    def leader_ends(self) -> None:
        write_atomically(
            self.paths.controller_record(self.attempt, 0), sealed_record({"ended": 0}, self.attempt)
        )


def looked(run: Run, places: Places, clock: Clock, seconds: float) -> None:
    """Looks at the run for so long, every ten seconds; the leader is alive."""
    for _ in range(max(1, int(seconds // 10))):
        run.beat()
        places.look()
        clock.now_s += min(10.0, seconds)


def test_lives_are_claimed_once_each(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert newest_claim(run.paths, 1, 3) == 1
    assert [claim_life(run.paths, 1, 3, 2) for _ in range(3)] == [2, 3, 4]
    assert (newest_claim(run.paths, 1, 3), newest_claim(run.paths, 1, 2)) == (4, 1)


def test_who_is_in_a_place(tmp_path: Path) -> None:
    run = Run(tmp_path, absent=(2,))
    assert (life_in_place(run.paths, 1, 2), life_in_place(run.paths, 1, 3)) == (0, 1)
    run.lose(3)
    assert life_in_place(run.paths, 1, 3) == 0
    run.lose(3, preparing=2)
    assert life_in_place(run.paths, 1, 3) == 2
    run.lose(3, joined=2)
    assert life_in_place(run.paths, 1, 3) == 2


def test_a_free_place_is_taken_after_a_while_by_one_of_two(tmp_path: Path, clock: Clock) -> None:
    run = Run(tmp_path)
    both = [Places(run.paths, range(2, 4)) for _ in range(2)]
    run.lose(3)
    for places in both:
        looked(run, places, clock, 1)
        assert places.take() is None, "its step may claim it"
    clock.now_s += GRACE_S
    assert [places.take() for places in both] == [(3, 2), None]
    for places in both:
        looked(run, places, clock, CLAIMED_S / 3)
        assert places.take() is None, "it is claimed"
    run.lose(3, preparing=2)
    looked(run, both[1], clock, 10 * CLAIMED_S)
    assert both[1].take() is None, "it is taken"


def test_a_place_whose_claimant_never_came_is_taken_by_another(tmp_path: Path, clock: Clock) -> None:
    run = Run(tmp_path)
    places = Places(run.paths, range(2, 4))
    run.lose(3)
    claim_life(run.paths, 1, 3, 2)
    looked(run, places, clock, CLAIMED_S + 10)
    assert places.take() == (3, 3)


def test_nothing_is_taken_of_an_attempt_that_ends_or_has_no_leader(tmp_path: Path, clock: Clock) -> None:
    run = Run(tmp_path)
    places = Places(run.paths, range(2, 4))
    run.lose(3)
    looked(run, places, clock, 100)
    clock.now_s += SILENT_S + 1
    places.look()
    assert places.take() is None, "the leader is silent"
    looked(run, places, clock, 100)
    write_record(run.paths, 1, STOP, {"reason": "preempted"})
    looked(run, places, clock, 100)
    assert places.take() is None
    assert not is_under_way(run.paths, 1)
    assert not has_ended(run.paths, 1), "guests are needed until it has saved"
    run.leader_ends()
    assert has_ended(run.paths, 1)


@pytest.mark.parametrize(
    ("code", "stop", "says"),
    [
        (75, "preempted", ""),
        (2, "", "given up"),
        (93, "", "given up"),
        (1, "", ""),
    ],
)
def test_whether_another_attempt_follows(tmp_path: Path, code: int, stop: str, says: str) -> None:
    run = Run(tmp_path)
    if stop:
        write_record(run.paths, 1, STOP, {"reason": stop})
    assert why_over(run.paths) == "", "it has not ended"
    write_record(run.paths, 1, ENDED, {"exit_code": code})
    assert says in why_over(run.paths) and bool(why_over(run.paths)) == bool(says)


def test_a_cancelled_run_is_over_once_it_has_saved(tmp_path: Path) -> None:
    run = Run(tmp_path)
    write_record(run.paths, 1, STOP, {"reason": join.CANCEL})
    assert why_over(run.paths) == ""
    write_record(run.paths, 1, ENDED, {"exit_code": 75})
    assert why_over(run.paths) == "the run was cancelled"


def test_a_step_begins_no_life_in_a_place_that_is_taken_or_after_the_end(tmp_path: Path) -> None:
    run = Run(tmp_path)
    step = NextLife(run.paths, 1, 3, lambda: False)
    assert step.wait(1, 0.0)
    assert not step.wait(1, None), "its controller's end was the attempt's"
    run.lose(3)
    assert step.wait(1, 0.0)
    run.lose(3, preparing=2)
    assert not step.wait(1, 0.0), "another machine has it"
    assert step.wait(2, 0.0), "its own later life"
    assert not NextLife(run.paths, 1, 3, lambda: True).wait(2, 0.0)
    run.leader_ends()
    assert not step.wait(2, 0.0)
    assert os.listdir(run.paths.attempt(1) / "lost") == ["3.json"]
