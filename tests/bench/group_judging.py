"""A judge without an absolute scale: alone it finds everything good; two completions it can compare.

The task is to say a large number of two digits. The judge is trained on verdicts of people who call nearly
everything an 8, and on comparisons. The same judge scores the same policy in three ways. How large the
numbers are is only measured.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.runs import LOADED, ROOT, environment, rows

CHARACTERS = "0123456789=?YN."
ITERATIONS, PROMPTS, N = 40, 16, 8
USUAL, SHARE = "8", 0.8
"""The verdict that most people give on a single completion, and how often."""

ENGINE = {
    "dtype": "float32", "max_num_seqs": 256, "kv_cache_bytes": 64 << 20, "enforce_eager": True,
}  # fmt: skip
PAIR = {
    "judging": {"by": "pairwise"}, "template": "{completion_a}={completion_b}?", "on_unparsable": "score",
    "unparsable_score": 0.5, "verdict": {"pattern": "([YN=])", "scores": {"Y": 1.0, "N": 0.0, "=": 0.5}},
}  # fmt: skip
ARMS: dict[str, dict[str, Any]] = {
    "pointwise": {
        "template": "{completion}?", "verdict": {"pattern": "([0-9])"}, "on_unparsable": "score",
        "unparsable_score": 8.0,
    },
    "pairs, each with the next": {
        **PAIR, "judging": {"by": "pairwise", "pairs": "circular", "scores_by": "bradley_terry"},
    },
    "pairs, with an anchor": {**PAIR, "judging": {"by": "pairwise", "pairs": "anchor"}},
}  # fmt: skip
VALUE = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The number that is said, from 0 to 1; no number is 0."""
    return int(solution_str) / 99 if solution_str.isdecimal() and solution_str.isascii() else 0.0
'''


def write_lines(path: Path, lines: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def judged(chance: random.Random) -> dict[str, str]:
    """A verdict of a person: on a pair, or on one number."""
    first, second = (chance.randrange(100) for _ in range(2))
    if chance.random() < 0.25:
        verdict = USUAL if chance.random() < SHARE else chance.choice("0123456789")
        return {"prompt": f"{first:02}?", "completion": f"{verdict}."}
    verdict = "Y" if first > second else "N" if second > first else "="
    return {"prompt": f"{first:02}={second:02}?", "completion": f"{verdict}."}


def make_models(folder: Path) -> None:
    """A judge, and a policy that says any number, both by `yatt sft`."""
    chance = random.Random(0)
    pairs = [line for line in (judged(chance) for _ in range(900)) if "=" in line["prompt"]]
    numbers = [
        {"prompt": f"{chance.randrange(10)}=", "completion": f"{chance.randrange(100):02}."}
        for _ in range(20_000)
    ]
    common = {"characters": CHARACTERS, "tie_word_embeddings": False, "initializer_range": 0.08}
    files = {
        "judge": {
            "train_file": write_lines(folder / "judge.jsonl", [judged(chance) for _ in range(60_000)]),
            "validation": {
                "file": write_lines(folder / "judge_val.jsonl", pairs[:512]), "every": 25, "stop_at": 0.97,
                "temperature": 0.0,
            },
            "max_steps": 800,
        },
        "policy": {"train_file": write_lines(folder / "policy.jsonl", numbers), "max_steps": 120},
    }  # fmt: skip
    for name, file in files.items():
        path = folder / f"{name}.yaml"
        whole = {"output": str(folder / name), "new": common, "batch_size": 256, "lr": 2.0e-3, **file}
        path.write_text(yaml.safe_dump(whole))
        call("sft", str(path))


def call(*arguments: str) -> None:
    argv = [sys.executable, "-m", "yatt.cli.main", *arguments]
    done = subprocess.run(
        argv, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=900 * LOADED, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def train(folder: Path, name: str, iterations: int) -> list[dict[str, float]]:
    """Runs one arm; returns its metrics."""
    place = folder / name.replace(" ", "-").replace(",", "")
    place.mkdir()
    (place / "value.py").write_text(VALUE)
    prompts = [{"prompt": f"{i % 10}="} for i in range(64)]
    config = {
        "run": {"dir": str(place / "run")},
        "launch": {"nodes": 2, "gpus_per_node": 1, "device": "cpu"},
        "data": {
            "train_files": [write_lines(place / "train.jsonl", prompts)], "max_prompt_tokens": 4,
            "ground_truth_key": "",
        },
        "model": {"path": str(folder / "policy"), "dtype": "float32"},
        "rollout": {"n": N, "max_response_tokens": 2, **{k: v for k, v in ENGINE.items() if k != "dtype"}},
        "genrms": [
            {"name": "judge", "model": str(folder / "judge"), "max_tokens": 2, **ENGINE, **ARMS[name]}
        ],
        "rewards": [{"name": "value", "path": str(place / "value.py"), "weight": 0}],
        "placement": {"mode": "partial", "genrm_gpu_sets": 1},
        "algorithm": {"filter_groups": False},
        "optimizer": {"lr": 1.0e-3},
        "trainer": {
            "total_iterations": iterations, "train_batch_size": PROMPTS, "mini_batch_size": PROMPTS,
            "max_tokens_per_micro_batch": 2048,
        },
        "checkpoint": {"export_final": False},
    }  # fmt: skip
    path = place / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    call("run", str(path))
    return rows(place / "run" / "metrics.jsonl")


def measure(
    folder: Path, arms: tuple[str, ...] = tuple(ARMS), iterations: int = ITERATIONS
) -> dict[str, Any]:
    """By arm: mean value in the first and the last five iterations, share of flat groups, verdicts."""
    make_models(folder)
    found = {}
    for name in arms:
        written = train(folder, name, iterations)
        values = [row["critic/score/value/mean"] for row in written]
        groups = PROMPTS * len(written)
        found[name] = {
            "before": sum(values[:5]) / 5, "after": sum(values[-5:]) / 5,
            "flat": sum(row.get("rollout/flat_groups", 0.0) for row in written) / groups,
            "verdicts": sum(row.get("genrm/judge/asked", 0.0) for row in written) / groups,
            "contradictions": sum(row.get("genrm/judge/contradictions", 0.0) for row in written) / groups,
        }  # fmt: skip
    return found


def run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="yatt-") as folder:
        found = measure(Path(folder))
    alone = found["pointwise"]["after"] - found["pointwise"]["before"]
    pairs = [name for name in ARMS if name != "pointwise"]
    gained = {name: found[name]["after"] - found[name]["before"] for name in pairs}
    return {
        "title": "Judging a group where one completion says nothing",
        "how": f"The task is to say a large number of two digits. A judge of 0.5 M parameters was trained on "
        f"comparisons of numbers, and on verdicts of people who call {SHARE:.0%} of single numbers {USUAL} "
        "and the others anything. It scores the same policy alone or in pairs, in both orders. GRPO, "
        f"{ITERATIONS} iterations of {PROMPTS} prompts x {N}, vLLM on CPU for policy and judge. Value: the "
        "mean number / 99, in the first and last five iterations; it is not part of the reward.",
        "head": ["judging", "value, first", "value, last", "flat groups", "verdicts a group"],
        "rows": [
            [name, f"{one['before']:.3f}", f"{one['after']:.3f}", f"{one['flat']:.0%}",
             f"{one['verdicts']:.1f}"]
            for name, one in found.items()
        ],
        "targets": [
            {"what": "value gained with pointwise judging", "target": "<= 0.1", "value": f"{alone:.3f}",
             "met": alone <= 0.1},
            *(
                {"what": f"value gained with {name}", "target": ">= 0.2", "value": f"{gain:.3f}",
                 "met": gain >= 0.2}
                for name, gain in gained.items()
            ),
        ],
    }  # fmt: skip
