"""Stops with too little time for the store: a local commit, which the next start on the same nodes takes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_saves_in_flight import events, same_end
from tests.runs import RunFile, killed_when, rows, start, wait_for, yatt
from yatt.adapters.run_folder.ledger import STOP, newest_attempt, write_record
from yatt.core.phases.time_left import RESERVE_S
from yatt.obs.metrics import STEP
from yatt.paths import RunPaths

pytestmark = pytest.mark.faults

TRAINER = {"total_iterations": 8}
SLOW_BYTES_PER_S = 150_000
"""A save of a node is about 0.7 MB: five seconds; an iteration takes less than one."""

REWARD = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.03)
    return sum(c in "abcdefghijklm" for c in solution_str) / 8
"""


def run_file(folder: Path, **checkpoint: Any) -> RunFile:
    (folder / "disk").mkdir(exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    section = {"save_every": 1, "keep": 2, "local_dir": str(folder / "disk"), **checkpoint}
    return RunFile(folder, {"trainer": TRAINER, "checkpoint": section})


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    run = RunFile(
        tmp_path_factory.mktemp("quick"), {"trainer": TRAINER, "checkpoint": {"save_every": 1, "keep": 2}}
    )
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    return run


def stop(run: RunFile, left_s: float) -> None:
    """As the launcher of a Slurm job does after a warning."""
    paths = RunPaths(run.run_dir)
    write_record(paths, newest_attempt(paths), STOP, {"reason": "the time limit is near", "left_s": left_s})


def stopped(run: RunFile, left_s: float, *, after: int = 2) -> str:
    """Runs until an iteration after this one is trained, then stops with so little time; gives the output.

    A stop that is noticed before the work of a phase trains nothing more.
    """
    process = start("run", str(run.write()))
    try:
        wait_for(
            lambda: any(
                (e["phase"], e["part"]) == ("train", "act") and e["iteration"] > after
                for e in events(run, "phase.part")
            ),
            timeout_s=120, what="an iteration",
        )  # fmt: skip
        stop(run, left_s)
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 75, output
    return output


def go_on(run: RunFile) -> tuple[dict[str, Any], str]:
    """The next start."""
    done = yatt("run", str(run.write()), timeout_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return events(run, "attempt.resume")[-1], done.stdout


def trained_of(run: RunFile, attempt: int) -> int:
    """The newest iteration that was trained; a stop before the work of the phase ends the phase too."""
    parts = [e for e in events(run) if e.get("part") == "act" and e["attempt"] == attempt]
    return max(e["iteration"] for e in parts if e["phase"] == "train")


def record(run: RunFile) -> dict[str, Any]:
    (path,) = (run.run_dir / "local_commits").glob("*.json")
    return json.loads(path.read_text())


def kept(run: RunFile) -> list[Path]:
    """Files of the local commit, on the disks."""
    files = record(run)["manifest"]
    (users,) = (run.folder / "disk").iterdir()
    (root,) = users.iterdir()
    return [root / file["path"] for file in (*files["files"], *files["nodes"])]


@pytest.fixture
def run_with_local_commit(tmp_path: Path) -> RunFile:
    run = run_file(tmp_path, max_bytes_per_s=SLOW_BYTES_PER_S)
    output = stopped(run, RESERVE_S + 1.0)
    assert "is on the nodes' disks only" in output
    (event,) = events(run, "ckpt.kept")
    assert event["iteration"] == trained_of(run, 1)
    return run


def test_the_next_start_resumes_from_the_local_commit_and_uploads_it(
    quick: RunFile, run_with_local_commit: RunFile
) -> None:
    run = run_with_local_commit
    iteration = trained_of(run, 1)
    stored = [e["iteration"] for e in events(run, "ckpt.commit")]
    assert iteration not in stored, "the store does not have it"
    shown = yatt("status", str(run.run_dir)).stdout
    assert f"{iteration} is on the nodes' disks only" in shown
    assert all(path.exists() for path in kept(run))
    assert len(record(run)["hosts"]) == 2
    resumed, said = go_on(run)
    assert (resumed["iteration"], resumed["is_local"]) == (iteration, True) and resumed["local_bytes"] > 0
    assert "which only the nodes' disks have" in said
    commits = [e["iteration"] for e in events(run, "ckpt.commit") if e["attempt"] == 2]
    assert commits[0] == iteration, "it was uploaded first"
    same_end(run, quick)
    assert not list((run.run_dir / "local_commits").glob("*")), "the store has overtaken it"
    assert "disks only" not in yatt("status", str(run.run_dir)).stdout


def flipped(run: RunFile) -> None:
    path = next(path for path in kept(run) if path.name.startswith("rank-00001"))
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


def without_prompt_groups(run: RunFile) -> None:
    """Of the last node: the leader's own answer is whole."""
    [path for path in kept(run) if path.name.endswith(".groups")][-1].unlink()


def on_other_nodes(run: RunFile) -> None:
    shutil.rmtree(run.folder / "disk")
    (run.folder / "disk").mkdir()


def torn_beside(run: RunFile) -> int:
    """A newer record whose end is missing; gives its iteration."""
    (path,) = (run.run_dir / "local_commits").glob("*.json")
    iteration, _, rest = path.name.partition(".")
    newer = int(iteration) + 1
    path.with_name(f"{newer:08d}.{rest}").write_bytes(path.read_bytes()[:-20])
    return newer


@pytest.mark.parametrize("damage", [flipped, without_prompt_groups])
def test_those_that_are_not_whole_are_passed_over_with_the_reason(
    quick: RunFile, tmp_path: Path, damage: Callable[[RunFile], None]
) -> None:
    """A rank's file, or a controller's, and a record beside it. A whole run, since the leader asks all nodes
    and goes on with the next candidate; each damage alone is in `unit/checkpoint/test_local_commits.py` and
    `test_local_tier.py`."""
    run = run_file(tmp_path, save_every=4)
    stopped(run, 0.0, after=4)
    stored = max(e["iteration"] for e in events(run, "ckpt.commit"))
    local = events(run, "ckpt.kept")[-1]["iteration"]
    assert local > stored
    damage(run)
    torn = torn_beside(run)
    resumed, said = go_on(run)
    assert (resumed["iteration"], resumed["is_local"]) == (stored, False)
    assert "checkpoint skipped: " in said
    of_torn, reason = (event["reason"] for event in events(run, "ckpt.skip"))
    assert f"local commit of iteration {torn}" in of_torn and "is not a whole record" in of_torn
    assert f"local commit of iteration {local}" in reason
    assert ("is not what was saved" if damage is flipped else "is not on this node's disk") in reason
    same_end(run, quick)


def test_without_anything_in_the_store_the_run_does_not_start_over(tmp_path: Path) -> None:
    run = run_file(tmp_path, save_every=0)
    stopped(run, 0.0, after=1)
    assert not events(run, "ckpt.commit") and events(run, "ckpt.kept")
    on_other_nodes(run)
    done = yatt("run", str(run.write()))
    assert done.returncode == 93, done.stdout + done.stderr
    assert "the only saved state of this run is on the disks of its last nodes" in done.stdout + done.stderr
    assert "is not on this node's disk" in done.stdout + done.stderr
    assert max(row[STEP] for row in rows(run.run_dir / "metrics.jsonl")) >= 1
    assert "remove" in done.stdout + done.stderr


def test_a_start_that_is_killed_before_its_upload_leaves_the_local_commit_valid(
    quick: RunFile, run_with_local_commit: RunFile
) -> None:
    run, iteration = run_with_local_commit, trained_of(run_with_local_commit, 1)
    resumes = lambda: [e for e in events(run, "attempt.resume") if e["attempt"] == 2]  # noqa: E731
    killed_when(run, resumes, "the second attempt")
    assert not [e for e in events(run, "ckpt.commit") if e["attempt"] == 2]
    resumed, _ = go_on(run)
    assert (resumed["attempt"], resumed["iteration"], resumed["is_local"]) == (3, iteration, True)
    same_end(run, quick)


def test_with_time_enough_the_last_state_is_in_the_store(quick: RunFile, tmp_path: Path) -> None:
    run = run_file(tmp_path)
    stopped(run, 120.0)
    assert not events(run, "ckpt.kept") and not events(run, "ckpt.given_up")
    assert trained_of(run, 1) in [e["iteration"] for e in events(run, "ckpt.commit")]
    assert not go_on(run)[0]["is_local"]
    same_end(run, quick)


def test_without_a_local_tier_the_store_is_used_to_the_end(quick: RunFile, tmp_path: Path) -> None:
    run = run_file(tmp_path, local_dir="", max_bytes_per_s=400_000)
    stopped(run, 1.0)
    assert not events(run, "ckpt.kept")
    assert trained_of(run, 1) in [e["iteration"] for e in events(run, "ckpt.commit")]
    go_on(run)
    same_end(run, quick)
