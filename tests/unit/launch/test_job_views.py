"""What `yatt status` says of a job that began no attempt."""

from pathlib import Path

import pytest

from yatt.adapters.files.files import sealed_record, write_atomically
from yatt.adapters.run_folder.attempt_claim import claim_attempt
from yatt.adapters.run_folder.ledger import ENDED, STARTED, write_record
from yatt.launch.folder.jobs import JobView, shown_job, state_in_words
from yatt.paths import RunPaths


def run_of(tmp_path: Path, *jobs: str) -> RunPaths:
    """A run folder with one attempt of each of these jobs, all saved and stopped."""
    paths = RunPaths(tmp_path / "run")
    paths.submitit.mkdir(parents=True)
    for job in jobs:
        attempt = claim_attempt(paths)
        paths.attempt(attempt).mkdir(parents=True, exist_ok=True)
        write_record(paths, attempt, STARTED, {"job": job, "restarts": 0})
        write_record(paths, attempt, ENDED, {"exit_code": 75, "reason": "warned by Slurm"})
    return paths


def shown(paths: RunPaths, job: str, state: str = "FAILED") -> tuple[str, str]:
    view = shown_job(paths, job, [{"JobState": state, "BatchHost": "n3"}])
    return state_in_words(paths, "stopped", view)


def test_a_later_job_that_ended_at_once_is_told(tmp_path: Path) -> None:
    paths = run_of(tmp_path, "7")
    (paths.submitit / "8_0_log.out").write_text("ModuleNotFoundError: No module named 'yatt'\n")
    state, why = shown(paths, "8")
    assert state == "stopped"
    assert why == f"job 8 ended before an attempt of it began; see its log {paths.submitit}/8_0_log.out"


def test_a_job_that_slurm_has_forgotten_is_told_without_its_log(tmp_path: Path) -> None:
    paths = run_of(tmp_path, "7")
    assert shown(paths, "8")[1].endswith(f"probably n3 does not see {paths.root}")
    forgotten = shown_job(paths, "8", [])
    assert "job 8 ended before an attempt of it began" in state_in_words(paths, "stopped", forgotten)[1]


@pytest.mark.parametrize(("job", "state"), [("7", "FAILED"), ("6", "FAILED"), ("8", "CANCELLED")])
def test_others_are_told_by_their_attempt(tmp_path: Path, job: str, state: str) -> None:
    """The attempt's own job, an older one, and one that its user has cancelled."""
    assert shown(run_of(tmp_path, "7"), job, state) == ("stopped", "warned by Slurm")


def test_an_attempt_of_this_machine_is_newer_than_any_job(tmp_path: Path) -> None:
    paths = run_of(tmp_path, "7")
    attempt = claim_attempt(paths)
    paths.attempt(attempt).mkdir(parents=True)
    write_record(paths, attempt, STARTED, {"launcher": {}})
    write_record(paths, attempt, ENDED, {"exit_code": 75, "reason": "by hand"})
    assert shown(paths, "8") == ("stopped", "by hand")


def test_a_run_whose_first_job_failed_at_once_never_began(tmp_path: Path) -> None:
    state, why = shown(run_of(tmp_path), "8")
    assert state == "never began"
    assert why.startswith("job 8 ended before the run began")


def test_a_finished_run_is_finished_whatever_its_last_job_was(tmp_path: Path) -> None:
    paths = run_of(tmp_path, "7")
    write_atomically(paths.finished, sealed_record({"wall": ""}, 1))
    assert shown(paths, "8") == ("finished", "")


def test_a_job_that_waits_has_not_ended(tmp_path: Path) -> None:
    assert JobView(job_id="8", state="PENDING").is_alive
    assert shown(run_of(tmp_path, "7"), "8", "PENDING")[0] == "waiting"


@pytest.mark.parametrize(
    ("state", "reason", "says"),
    [
        ("SUSPENDED", "None", "Slurm has suspended the job"),
        (
            "PENDING",
            "ReqNodeNotAvail,_Reserved_for_maintenance",
            "a smaller time_limit_min may start before it",
        ),
        ("PENDING", "ReqNodeNotAvail", "down, drained or reserved"),
    ],
)
def test_why_a_job_waits(tmp_path: Path, state: str, reason: str, says: str) -> None:
    view = shown_job(run_of(tmp_path, "7"), "8", [{"JobState": state, "Reason": reason}])
    assert says in view.why
