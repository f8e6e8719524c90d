"""Which job is a run's, and that two submitters never submit at the same time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import environment, wait_for
from yatt.adapters.slurm import job_note
from yatt.adapters.slurm.job_note import JobNote, is_same_job, names_run, note_job, noted_job, only_submitter
from yatt.errors import DeadlineExceeded
from yatt.paths import RunPaths

ROOT = Path("/runs/a lr=1e-6")
SCRIPT = f"{ROOT}/submitit/submission_file_0.sh"


@pytest.mark.parametrize(
    ("command", "is_ours"),
    [
        (SCRIPT, True),
        (f"/home/u/eval.sh {ROOT}", False),
        (f"{ROOT}2/submitit/submission_file_0.sh", False),
        (f"/home{SCRIPT}", False),
        ("", False),
    ],
)
def test_a_job_that_yatt_submitted_names_its_run_by_its_command(command, is_ours):
    assert names_run(command, ROOT) is is_ours


def test_a_job_is_the_noted_one_by_its_command_and_not_by_what_can_be_changed(tmp_path):
    noted = JobNote("7", SCRIPT)
    assert is_same_job(noted, [{"Command": SCRIPT, "Comment": "the site's own"}], ROOT)
    assert not is_same_job(noted, [{"Command": "/home/other.sh", "Comment": str(ROOT)}], ROOT), (
        "an id given anew"
    )
    assert is_same_job(JobNote("7"), [{"Command": "/home/u/wrapper.sh"}], ROOT), "Slurm did not say then"
    assert is_same_job(JobNote("7"), [{"Command": "/tmp/chained.sh", "Comment": str(ROOT)}], ROOT)
    assert not is_same_job(JobNote("7"), [{"Command": "/home/other.sh", "Comment": "(null)"}], ROOT)
    assert not is_same_job(noted, [], ROOT)
    paths = RunPaths(tmp_path)
    assert noted_job(paths) is None
    note_job(paths, "7", [{"Command": SCRIPT}])
    assert noted_job(paths) == noted
    note_job(paths, "8", None)
    assert noted_job(paths) == JobNote("8")
    paths.job.write_text("9\n")
    assert noted_job(paths) == JobNote("9"), "as it was before commands were noted"
    for nonsense in ('{"job": 7}', '{"job":', '{"jobs": "7"}', "[1]", '{"job": "7;ls"}', "x"):
        paths.job.write_text(nonsense)
        assert noted_job(paths) is None


SUBMITTER = """
import sys, time
from pathlib import Path
from yatt.adapters.slurm.job_note import only_submitter
from yatt.paths import RunPaths
root = Path(sys.argv[1])
with only_submitter(RunPaths(root)):
    there = list(root.glob("inside-*"))
    (root / f"inside-{sys.argv[2]}").touch()
    print(len(there), flush=True)
    time.sleep(float(sys.argv[3]))
    (root / f"inside-{sys.argv[2]}").unlink()
"""


def submitter(root: Path, name: int, for_s: float) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-c", SUBMITTER, str(root), str(name), str(for_s)]
    return subprocess.Popen(argv, env=environment(), stdout=subprocess.PIPE, text=True)


def test_eight_submitters_are_inside_one_after_another(tmp_path):
    started = [submitter(tmp_path, name, 0.1) for name in range(8)]
    assert [process.communicate(timeout=300)[0] for process in started] == ["0\n"] * 8
    assert not (tmp_path / "submitting").exists()


def test_submit_lock_is_released_when_its_owner_is_killed(tmp_path):
    killed = submitter(tmp_path, 0, 600)
    wait_for((tmp_path / "submitting").exists, what="the claim")
    assert killed.stdout is not None
    assert killed.stdout.readline() == "0\n"
    killed.kill()
    killed.communicate()
    with only_submitter(RunPaths(tmp_path)):
        pass
    assert not (tmp_path / "submitting").exists()


def test_a_submitter_on_another_machine_is_waited_for_and_then_named(tmp_path, monkeypatch):
    monkeypatch.setattr(job_note, "WAIT_S", 0.5)
    claimed = {"pid": os.getpid(), "begun": "1", "place": "another boot", "host": "login2"}
    (tmp_path / "submitting").write_text(json.dumps(claimed))
    with pytest.raises(DeadlineExceeded, match=r"remove .*submitting"), only_submitter(RunPaths(tmp_path)):
        pass
    assert (tmp_path / "submitting").exists()
    (tmp_path / "submitting").unlink()
    with only_submitter(RunPaths(tmp_path)):
        pass
