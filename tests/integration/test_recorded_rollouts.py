"""`logging.rollouts: all` in runs with a GenRM, undisturbed and killed."""

import json
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runs import RunFile, killed_when, rows, yatt
from tests.tiny_models import make_scripted_model
from yatt import open_run
from yatt.obs.rollouts import RecordedIteration, iterations_of, read_iteration
from yatt.paths import RunPaths

pytestmark = pytest.mark.slow


def recording(folder: Path, **settings: Any) -> RunFile:
    judge = make_scripted_model(folder / "judge", mean_tokens=3)
    (Path(judge) / "model.safetensors").write_bytes(b"")
    genrm = {
        "name": "judge", "model": judge, "template": "Rate {completion}!", "engine": "scripted",
        "verdict": {"pattern": "([a-z])", "scores": {"e": 1.0}}, "max_model_tokens": 128, "max_tokens": 8,
        "on_unparsable": "score", "votes": 2, "temperature": 1.0,
    }  # fmt: skip
    return RunFile(folder, {"genrms": [genrm], "logging": {"rollouts": "all"}, **settings})


def recorded(run: RunFile, iteration: int) -> RecordedIteration:
    found = read_iteration(RunPaths(run.run_dir), iteration)
    assert found is not None and not found.num_unreadable and found.is_whole
    return found


def test_every_sample_is_recorded_with_the_reward_and_the_advantage_that_it_was_trained_with(
    tmp_path: Path,
) -> None:
    run = recording(tmp_path)
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    for row in rows(run.run_dir / "metrics.jsonl"):
        found = recorded(run, row["training/global_step"]).samples
        trained = [each for each in found if not each["dropped"]]
        assert len(trained) == 16 and {each["node"] for each in trained} == {0, 1}
        rewards = [each["reward"] for each in trained]
        assert np.mean(rewards) == pytest.approx(row["critic/rewards/mean"], abs=1e-9)
        assert np.mean([each["num_tokens"] for each in trained]) == row["response_length/mean"]
        groups = defaultdict(list)
        for each in trained:
            groups[each["group"]].append((each["reward"], each["advantage"]))
        for group in groups.values():
            reward, advantage = np.array(group).T
            expected = (reward - reward.mean()) / (reward.std(ddof=1) + 1e-6)
            np.testing.assert_allclose(advantage, expected, atol=1e-5)
        assert max(each["advantage"] for each in trained) == pytest.approx(row["critic/advantages/max"])
    check_what_is_shown(run, trained[5])
    check_logs(run)
    RunPaths(run.run_dir).rollout_file(4, 1).unlink()
    half = read_iteration(RunPaths(run.run_dir), 4)
    assert half is not None and half.num_missing == 1 and len(half.samples) == 8


def check_what_is_shown(run: RunFile, one: dict[str, Any]) -> None:
    """The last iteration's table, and a sample with the GenRM's prompt and answers."""
    table = yatt("show", str(run.run_dir), "4")
    assert "iteration 4, attempt 1: 16 samples" in table.stdout, table.stderr
    full = json.loads(yatt("show", str(run.run_dir), "4", str(one["sample"]), "--json").stdout)
    completion = full["sample"]["completion"]
    assert [each["prompt"] for each in full["judged"]] == [f"Rate {completion}!"] * len(full["judged"])
    assert len(full["judged"]) >= 2 and full["sample"]["num_tokens"] == one["num_tokens"]
    verdicts = [each["score"] for each in full["judged"] if each["is_readable"]]
    if verdicts:
        assert full["sample"]["scores"]["judge"] == pytest.approx(np.mean(verdicts))
    whole = {each["sample"]: each for each in open_run(run.run_dir).samples(4)}
    assert len(whole) == 16 and whole[one["sample"]] == full["sample"]
    text = yatt("show", str(run.run_dir), "4", str(one["sample"])).stdout
    assert "prompt of GenRM judge" in text and "advantage" in text


def check_logs(run: RunFile) -> None:
    """Lines of controllers and trainer ranks, merged by time."""
    lines = yatt("logs", str(run.run_dir), "-n", "1000").stdout.splitlines()
    times = [datetime.fromisoformat(line.split()[1]) for line in lines]
    assert times == sorted(times) and len(times) > 20
    assert {"node0", "trainer-n0r0.1", "trainer-n1r0.1"} <= {line.partition(":")[0] for line in lines}
    assert not any("megatron" in line for line in lines)
    (one,) = yatt(
        "logs", str(run.run_dir), "--role", "node0", "--grep", "iteration 3: train"
    ).stdout.splitlines()
    assert one in lines


def test_an_iteration_that_is_repeated_after_a_kill_is_recorded_once(tmp_path: Path) -> None:
    run = recording(tmp_path, checkpoint={"save_every": 100}, model={"trainer": "scripted"})
    folder = RunPaths(run.run_dir).rollouts
    killed_when(run, lambda: len(iterations_of(folder).get(2, [])) == 2, what="two iterations")
    before = {iteration: recorded(run, iteration) for iteration in (1, 2)}
    assert {found.attempt for found in before.values()} == {1}
    done = yatt("resume", str(run.run_dir))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {i: len(files) for i, files in iterations_of(folder).items()} == dict.fromkeys((1, 2, 3, 4), 2)
    for iteration in (1, 2, 3, 4):
        after = recorded(run, iteration)
        numbers = [each["sample"] for each in after.samples]
        assert after.attempt == 2 and not after.num_replaced and len(numbers) == len(set(numbers)) == 16
        if iteration in before:  # the run is deterministic
            assert without_attempt(after) == without_attempt(before[iteration])
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def without_attempt(found: RecordedIteration) -> list[dict[str, Any]]:
    return [{**each, "attempt": 0} for each in found.samples]
