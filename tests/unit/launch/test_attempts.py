"""The loop over the attempts of a start, with a ledger as earlier starts left it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.obs_runs import make_run
from yatt.adapters.run_folder.attempt_claim import claim_attempt
from yatt.adapters.run_folder.ledger import ENDED, STARTED, run_is_finished, started_attempts, write_record
from yatt.config.load import load_resolved
from yatt.core.attempts.outcome import Outcome, Verdict
from yatt.launch.attempt.attempts import Attempts
from yatt.launch.attempt.follower import Followers
from yatt.launch.folder.folder_wait import FolderWait
from yatt.paths import RunPaths


class Here:
    """A place to run in, where attempts end as they are told to."""

    submission = "mine"
    absent = frozenset({3})

    def __init__(self, *outcomes: Outcome | Callable[[], Outcome], warned: bool = False) -> None:
        self.outcomes, self.warned = list(outcomes), warned
        self.left: list[Outcome] = []

    def told(self) -> str:
        return ""

    def is_warned(self) -> bool:
        return self.warned

    def superseded(self, *, has_begun: bool) -> str:
        return ""

    def about(self) -> dict[str, Any]:
        return {"job": "7"}

    def carry_out(self, attempt: int, followers: Followers) -> Outcome:
        outcome = self.outcomes.pop(0)
        return outcome if isinstance(outcome, Outcome) else outcome()

    def leave(self, attempt: int, outcome: Outcome) -> None:
        self.left.append(outcome)


CRASH = Outcome(verdict=Verdict.AGAIN, reason="a crash", exit_code=1)
FINISHED = Outcome(verdict=Verdict.FINISHED, reason="finished", exit_code=0)
SUCCEED = Outcome(verdict=Verdict.SUCCEED, reason="preempted", exit_code=75)


def run_of(folder: Path, backend: Here) -> tuple[int, RunPaths, list[str]]:
    paths, said = RunPaths(folder / "run"), []
    wait = FolderWait(root=paths.root, limit_s=30, signals=[], ending=frozenset(), say=said.append)
    code = Attempts(load_resolved(paths.config), paths, backend, wait, said.append).run(os.environ)
    return code, paths, said


def crashed(paths: RunPaths, *, times: int, committed: int) -> None:
    """Attempts of this submission, the last of which had got further than it was when it began."""
    for number in range(times):
        attempt = claim_attempt(paths)
        write_record(paths, attempt, STARTED, {"submission": "mine", "committed": 0})
        after = committed if number == times - 1 else 0
        write_record(paths, attempt, ENDED, {"exit_code": 1, "committed": after, "reason": "a crash"})


def test_crashes_are_followed_by_attempts_until_the_run_is_finished(tmp_path):
    make_run(tmp_path)
    code, paths, said = run_of(tmp_path, Here(CRASH, FINISHED))
    assert (code, run_is_finished(paths)) == (0, True)
    assert [attempt.started["absent"] for attempt in started_attempts(paths)] == [[3], [3]]
    assert [attempt.started["job"] for attempt in started_attempts(paths)] == ["7", "7"]
    assert said[0] == "attempt 1 ended at iteration 0: a crash"
    assert said[1] == "starting again from iteration 0"
    assert said[2].startswith("finished: ")


def test_crash_after_crash_ends_with_93_also_over_several_starts(tmp_path):
    crashed(make_run(tmp_path), times=2, committed=0)
    backend = Here(CRASH, CRASH)
    code, paths, said = run_of(tmp_path, backend)
    assert (code, len(started_attempts(paths))) == (93, 3)
    assert said[-1].startswith(
        "3 attempts in a row failed without a checkpoint after iteration 0; reason of the last one:"
    )


def test_a_warning_between_attempts_is_no_lack_of_progress(tmp_path):
    """Nothing is asked of the store then, so how far the run is saved is not known for sure."""
    crashed(make_run(tmp_path), times=3, committed=10)
    backend = Here(SUCCEED, warned=True)
    code, paths, _ = run_of(tmp_path, backend)
    assert (code, backend.left) == (75, [SUCCEED])
    assert started_attempts(paths)[-1].started["committed"] == 10, "the ledger knows it"


def test_a_start_is_over_once_another_has_claimed_the_run(tmp_path):
    paths = make_run(tmp_path)

    def taken_over() -> Outcome:
        claim_attempt(paths)
        return CRASH

    code, _, said = run_of(tmp_path, Here(taken_over))
    assert code == 75
    assert said[-1] == "a newer start of this run exists: this one ends"
