"""A policy that judges itself on real vLLM: with its present weights, and killed engines change nothing."""

import gzip
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_lost_samples import events, finish
from tests.faults.test_resume_exact import final_state, metrics
from tests.runs import RunFile, kill, living, rows, start, wait_for, yatt

pytestmark = [pytest.mark.faults, pytest.mark.slow]

ITERATIONS = 3
TEMPLATE = "{prompt}{completion} is it a or b? "


def run_file(folder: Path) -> RunFile:
    judge = {
        "name": "self", "model": "policy", "template": TEMPLATE, "max_model_tokens": 96, "max_tokens": 2,
        "verdict": {"choices": ["a", "b"], "scores": {"a": 1, "b": 0}, "read": "soft", "grid": 0},
    }  # fmt: skip
    return RunFile(folder, {
        "launch": {"nodes": 1},
        "rollout": {"engine": "vllm", "kv_cache_bytes": 32 << 20, "enforce_eager": True},
        "genrms": [judge],
        "rewards": [{"name": "digits", "path": str(folder / "reward.py"), "weight": 0}],
        "optimizer": {"lr": 0.02},
        "trainer": {"total_iterations": ITERATIONS},
        "checkpoint": {"save_every": 1, "keep": ITERATIONS},
        "logging": {"rollouts": "all"},
    })  # fmt: skip


def shares_of(folder: Path, questions: list[str]) -> list[float]:
    """The share of "a" among "a" and "b" as the next token of each question, by transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    words = [tokenizer.encode(word, add_special_tokens=False)[0] for word in "ab"]
    found = []
    for question in questions:
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer.encode(question)])).logits[0, -1, words]
        found.append(float(logits.double().softmax(-1)[0]))
    return found


def judged(run: RunFile, iteration: int) -> list[dict[str, Any]]:
    """The judge's answers in an iteration."""
    with gzip.open(run.run_dir / "rollouts" / f"{iteration:06d}.0.jsonl.gz", "rt") as lines:
        return [record for record in map(json.loads, lines) if record.get("genrm") == "self"]


def killed_engine(run: RunFile, iterations: int) -> bool:
    """Kills the engine once the run has so many iterations behind it."""
    begun = [each for each in events(run, "worker.start") if each["worker"].startswith("rollout")]
    has_come = bool(begun) and len(rows(run.run_dir / "metrics.jsonl")) >= iterations
    return has_come and living(run.run_dir).get(begun[-1]["pid"]) == "yatt.rollout" and kill(begun[-1]["pid"])


def test_a_policy_judges_itself_with_its_present_weights_and_killed_engines_change_nothing(
    tmp_path: Path,
) -> None:
    """A whole run: questions among the completions of one engine, whose weights change; killed twice."""
    calm, disturbed = (run_file(tmp_path / name) for name in ("calm", "disturbed"))
    done = yatt("run", str(calm.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    process = start("run", str(disturbed.write()))
    for iterations in (0, 2):
        wait_for(partial(killed_engine, disturbed, iterations), what="the engine")
    finish(process)
    assert metrics(disturbed) == metrics(calm)
    assert final_state(disturbed) == final_state(calm)
    assert not [each for each in events(calm, "worker.start") if each["worker"].startswith("genrm")]
    exported = yatt("ckpt", "export", str(calm.run_dir), "2", str(tmp_path / "second"))
    assert exported.returncode == 0, exported.stderr
    means = []
    for iteration, weights in ((1, calm.folder / "policy"), (3, tmp_path / "second")):
        answers = judged(calm, iteration)
        assert len(answers) == 16, "one question about each completion"
        expected = shares_of(weights, [each["prompt"] for each in answers])
        assert [each["score"] for each in answers] == pytest.approx(expected, abs=1e-5)
        means.append(statistics.mean(expected))
    assert abs(means[1] - means[0]) > 0.05, "else the policy of the first iteration would pass as well"
