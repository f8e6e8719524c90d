"""A GenRM that takes newer weights of another run, which trains meanwhile: both are killed, and resumed."""

import gzip
import json
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_resume_exact import final_state, metrics
from tests.faults.test_self_judge import TEMPLATE, shares_of
from tests.runs import RunFile, kill, living, rows, start, wait_for, yatt

pytestmark = [pytest.mark.faults, pytest.mark.slow]

ITERATIONS, JUDGE_ITERATIONS, EVERY, SEED = 5, 12, 2, 3
REFRESHED = "genrm/judge/refreshed_to"


def judge_run(folder: Path) -> RunFile:
    """The run that trains the judge."""
    return RunFile(folder, {
        "launch": {"nodes": 1}, "optimizer": {"lr": 0.02}, "trainer": {"total_iterations": JUDGE_ITERATIONS},
        "checkpoint": {"save_every": 1, "keep": 2},
    })  # fmt: skip


def policy_run(folder: Path, judge: RunFile, **settings: Any) -> RunFile:
    genrm = {
        "name": "judge", "model": str(judge.folder / "policy"), "template": TEMPLATE, "max_model_tokens": 96,
        "max_tokens": 2, "dtype": "float32", "engine": "vllm", "kv_cache_bytes": 32 << 20,
        "verdict": {"choices": ["a", "b"], "scores": {"a": 1, "b": 0}, "read": "soft", "grid": 0},
        "refresh": {"url": str(judge.run_dir / "checkpoints"), "every": EVERY},
    }  # fmt: skip
    return RunFile(folder, {
        "launch": {"nodes": 1}, "genrms": [genrm], "trainer": {"total_iterations": ITERATIONS},
        "checkpoint": {"save_every": 1, "keep": ITERATIONS}, "logging": {"rollouts": "all"}, **settings,
    })  # fmt: skip


def num_rows(run: RunFile) -> int:
    return len(rows(run.run_dir / "metrics.jsonl"))


def kill_everything(run: RunFile, launcher_pid: int) -> None:
    kill(launcher_pid)
    for pid in living(run.run_dir):
        kill(pid)


def has_rows(run: RunFile, wanted: int) -> bool:
    return num_rows(run) >= wanted


def test_two_runs_that_are_killed_at_random_and_resumed_are_as_one_that_was_never_killed(
    tmp_path: Path,
) -> None:
    """Whole runs at once: the judge's, and the policy's, which takes its weights as they come. Each is killed
    twice, after iterations that are drawn. A run that is given the recorded choices before its first
    iteration, and is not disturbed any more, ends with the same state, bit for bit; and what the judge said
    is what transformers says with the weights of its checkpoints.
    """
    draw, judge = random.Random(SEED), judge_run(tmp_path / "judge")
    judge.write()
    policy = policy_run(tmp_path / "policy", judge)
    runs = [(judge, JUDGE_ITERATIONS), (policy, ITERATIONS)]
    processes = {run.folder: start("run", str(run.write())) for run, _ in runs}
    for _ in range(2):
        for run, total in draw.sample(runs, 2):
            wanted = min(num_rows(run) + draw.randint(1, 2), total - 1)
            wait_for(partial(has_rows, run, wanted), timeout_s=200, what=f"row {wanted}")
            kill_everything(run, processes[run.folder].pid)
            processes[run.folder].communicate()
            processes[run.folder] = start("resume", str(run.run_dir))
    for process in processes.values():
        output, _ = process.communicate(timeout=400)
        assert process.returncode == 0, output
    calm = with_choices_of(policy, policy_run(tmp_path / "calm", judge))
    done = yatt("resume", str(calm.run_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    assert metrics(policy) == metrics(calm)
    assert final_state(policy) == final_state(calm)
    sources = [int(row[REFRESHED]) for row in rows(calm.run_dir / "metrics.jsonl")]
    assert sources[0] == sources[1] and len(set(sources)) > 1, "chosen in iterations 1, 3 and 5"
    for iteration, source in enumerate(sources, 1):
        check_said(calm, iteration, weights_of(calm, iteration) if source else judge.folder / "policy")


def with_choices_of(other: RunFile, run: RunFile) -> RunFile:
    """A run that was killed before its first iteration, with another's choices of weights in its folder."""
    process = start("run", str(run.write()))
    wait_for((run.run_dir / "attempts" / "000001" / "started.json").exists, what="the first attempt")
    kill_everything(run, process.pid)
    process.communicate()
    assert not num_rows(run)
    shutil.rmtree(run.run_dir / "judges", ignore_errors=True)
    shutil.copytree(other.run_dir / "judges", run.run_dir / "judges")
    return run


def weights_of(run: RunFile, iteration: int) -> Path:
    """The folder of the choice that held in an iteration."""
    folder = run.run_dir / "judges" / "genrm-judge"
    name = max(path.name for path in folder.glob("*.json") if int(path.stem) <= iteration)
    return folder / str(json.loads((folder / name).read_text())["folder"])


def check_said(run: RunFile, iteration: int, weights: Path) -> None:
    """Compares the judge's scores with transformers' shares."""
    with gzip.open(run.run_dir / "rollouts" / f"{iteration:06d}.0.jsonl.gz", "rt") as lines:
        answers = [record for record in map(json.loads, lines) if record.get("genrm") == "judge"]
    assert len(answers) == 16, "one question about each completion"
    expected = shares_of(weights, [each["prompt"] for each in answers])
    assert [each["score"] for each in answers] == pytest.approx(expected, abs=1e-5)
