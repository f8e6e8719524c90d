"""Whole runs with given completions: they learn, and a reward model judges the next run."""

import json
import math
import statistics
from pathlib import Path

import pytest

from tests.given_runs import GivenRunFile
from tests.reward_models import expected_values
from tests.runs import RunFile, rows, yatt
from yatt.adapters.inputs.tokenizer import Tokenizer

pytestmark = pytest.mark.slow


def finished(run: RunFile) -> list[dict]:
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    return rows(run.run_dir / "metrics.jsonl")


def test_a_model_learns_completions_and_prefers_them_afterwards(tmp_path: Path) -> None:
    """A whole run of sft, and one of dpo that begins with its model."""
    steps = {"total_iterations": 40, "train_batch_size": 16, "mini_batch_size": 8}
    tuned = GivenRunFile(tmp_path / "sft", "sft", {"trainer": steps, "optimizer": {"lr": 3.0e-3}})
    learnt = finished(tuned)
    assert learnt[-1]["train/nll"] < 0.5 * learnt[0]["train/nll"]
    assert {row["training/epoch"] for row in learnt} == set(range(10))
    model = str(tuned.run_dir / "model")
    settings = {
        "model": {"path": model}, "preference": {"beta": 0.5},
        "trainer": steps | {"mini_batch_size": 16}, "validation": {"every": 10},
        "checkpoint": {"save_every": 10, "keep_best": 1, "best_metric": "val/accuracy"},
    }  # fmt: skip
    found = finished(GivenRunFile(tmp_path / "dpo", "dpo", settings))
    measured = {row["training/global_step"]: row["val/accuracy"] for row in found if "val/accuracy" in row}
    assert measured.keys() == {0, 10, 20, 30, 40} and measured[0] < 0.1 and measured[40] > 0.9
    found = found[1:]
    assert found[0]["train/margin"] == pytest.approx(0.0, abs=1e-5), "it begins as its reference"
    assert found[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert statistics.mean(row["train/accuracy"] for row in found[-4:]) > 0.9
    assert found[-1]["train/margin"] > 1.0


def test_a_reward_model_is_trained_and_judges_the_next_run(tmp_path: Path) -> None:
    """Two whole runs; the second one's scores are transformers' of the folder that the first has written."""
    steps = {"total_iterations": 40, "train_batch_size": 16, "mini_batch_size": 8}
    trained = GivenRunFile(tmp_path / "rm", "reward_model", {"trainer": steps, "optimizer": {"lr": 3.0e-3}})
    found = finished(trained)
    assert statistics.mean(row["train/accuracy"] for row in found[-4:]) > 0.9
    model = str(trained.run_dir / "model")
    genrm = {
        "name": "learnt", "model": model, "kind": "scalar", "engine": "transformers", "dtype": "float32",
        "chat": True, "max_model_tokens": 128,
    }  # fmt: skip
    judged = RunFile(tmp_path / "rl", {
        "launch": {"nodes": 1}, "genrms": [genrm], "rewards": [], "trainer": {"total_iterations": 2},
    })  # fmt: skip
    finished(judged)
    tokenizer = Tokenizer(model)
    seen = rows(judged.run_dir / "samples.jsonl")
    assert len(seen) > 1
    for sample in seen:
        said = [("user", sample["prompt"]), ("assistant", sample["completion"])]
        messages = [{"role": role, "content": text} for role, text in said]
        ids = tokenizer.encode_chat(messages, add_generation_prompt=False)
        ((value,),) = expected_values(model, [ids])
        assert sample["scores"]["learnt"] == pytest.approx(value, abs=3e-6), json.dumps(sample)
    for kind, origin, says in (
        ("sft", trained, "000040.000001.json is of a reward model"),
        ("reward_model", judged, "is of a policy, without a value head; `yatt ckpt export` makes a folder"),
    ):
        begin = {"run": {"from_checkpoint": {"url": str(origin.run_dir / "checkpoints")}}}
        done = yatt("check", str(GivenRunFile(tmp_path / f"from-{kind}", kind, begin).write()))
        assert done.returncode == 2 and says in done.stdout + done.stderr
