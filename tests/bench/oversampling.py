"""What `rollout.oversample` saves where the lengths of completions are log-normal, and what it does to them.

Whole runs: a scripted engine whose steps take real time, however many sequences they continue, and a real
trainer. Both arms sample the same prompts with the same lengths. `balance_of` counts the tokens of a run.
"""

import json
import math
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.runs import RunFile, rows, yatt
from tests.tiny_models import make_qwen3
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.store.store import FolderStore
from yatt.control.rollouts.groups.carried import read_state

BATCH, N, ITERATIONS, WARM_UP = 16, 4, 24, 2
MEDIAN_TOKENS, SIGMA, MOST_TOKENS = 60, 1.0, 480
STEP_S = 0.006
KEYS = range(240, 304)
"""Tokens that no prompt has; the first token of a completion, one for each length."""


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Tokens of one run: of groups that were completed, trained on, complete but not needed, and of groups
    that were not completed."""

    sampled: int
    trained: int
    left: int
    unfinished: int
    restarted: int
    lengths: list[float]
    steps_s: list[float]
    ages: list[float]


def lengths() -> dict[int, int]:
    """The quantiles of the log-normal distribution, cut at `MOST_TOKENS`, by first token."""
    normal = statistics.NormalDist()
    return {
        key: min(MOST_TOKENS, max(2, round(MEDIAN_TOKENS * math.exp(SIGMA * normal.inv_cdf(place)))))
        for place, key in ((((i + 0.5) / len(KEYS)), key) for i, key in enumerate(KEYS))
    }


def run_of(folder: Path, oversample: float, iterations: int, **script: Any) -> RunFile:
    """A run of one node with these lengths."""
    run = RunFile(folder, {
        "run": {"deterministic": False},
        "launch": {"nodes": 1},
        "rollout": {
            "n": N, "max_response_tokens": MOST_TOKENS, "oversample": oversample, "max_num_seqs": 1024,
        },
        "trainer": {
            "total_iterations": iterations, "train_batch_size": BATCH, "mini_batch_size": BATCH,
            "max_tokens_per_micro_batch": 4096,
        },
        "checkpoint": {"save_every": iterations},
    })  # fmt: skip
    policy = folder / "policy"
    make_qwen3(policy, tied=True)
    table = {str(key): length for key, length in lengths().items()}
    (policy / "scripted.json").write_text(json.dumps({"lengths": table, **script}))
    return run


def balance_of(run: RunFile, num_samples: int = BATCH * N) -> Balance:
    """Counts a finished run's tokens, by metrics and by its last checkpoint.

    Args:
        num_samples: of an iteration.
    """
    metrics = [row for row in rows(run.run_dir / "metrics.jsonl") if row["training/global_step"]]
    store = FolderStore(run.run_dir / "checkpoints")
    manifest = Checkpoints(store, 0).newest().manifest
    assert manifest is not None
    num = len(manifest.nodes)
    states = [read_state(store, manifest.nodes, shard=shard, num_shards=num) for shard in range(num)]
    accepted = [group for state in states for group in state.accepted]
    unfinished = [group for state in states for group in state.unfinished]
    return Balance(
        sampled=round(sum(row.get("rollout/tokens", 0) for row in metrics)),  # 0: all was there already
        trained=round(sum(row["response_length/mean"] for row in metrics) * num_samples),
        left=sum(s.num_tokens for group in accepted for s in group.samples),
        unfinished=sum(s.num_tokens for group in unfinished for s in group.samples),
        restarted=round(sum(row.get("rollout/restarted_groups", 0) for row in metrics)),
        lengths=[row["response_length/mean"] for row in metrics],
        steps_s=[row["timing_s/step"] for row in metrics[WARM_UP:-1]],
        ages=[row["training/policy_age_max"] for row in metrics],
    )


def arm(folder: Path, oversample: float) -> Balance:
    """One run to its end."""
    run = run_of(folder, oversample, ITERATIONS, seconds_per_step=STEP_S)
    done = yatt("run", str(run.write()), timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return balance_of(run)


def run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="yatt-") as name:
        found = {f: [arm(Path(name) / f"{f}-{i}", f) for i in range(3)] for f in (1.0, 1.25)}
    median = {f: statistics.median([s for each in arms for s in each.steps_s]) for f, arms in found.items()}
    mean = {f: statistics.mean([n for each in arms for n in each.lengths]) for f, arms in found.items()}
    saved, shift = 1 - median[1.25] / median[1.0], abs(mean[1.25] / mean[1.0] - 1)
    unbalanced = [abs(b.sampled - b.trained - b.left) for arms in found.values() for b in arms]
    restarted = sum(b.restarted for arms in found.values() for b in arms)
    return {
        "title": "Oversampling where lengths are log-normal",
        "how": f"{BATCH} prompts x {N} completions, median {MEDIAN_TOKENS} tokens, sigma {SIGMA:g}, at most "
        f"{MOST_TOKENS}; a scripted engine of {STEP_S * 1e3:g} ms a step, a trainer of 0.2 M parameters, one "
        f"node, colocated; {ITERATIONS} iterations, three runs an arm. Same prompts and same lengths in all.",
        "head": ["rollout.oversample", "iteration, median", "mean tokens", "left at the end"],
        "rows": [
            [f"{f:g}", f"{median[f]:.2f} s", f"{mean[f]:.1f}",
             f"{statistics.mean([b.left + b.unfinished for b in found[f]]):.0f} tokens"]
            for f in found
        ],
        "targets": [
            {"what": "time of an iteration saved at 1.25", "target": ">= 20%", "value": f"{saved:.0%}",
             "met": saved >= 0.2},
            {"what": "mean length trained on, against 1", "target": "<= 1%", "value": f"{shift:.1%}",
             "met": shift <= 0.01},
            {"what": "tokens lost or made twice", "target": "0", "value": f"{sum(unbalanced)}; "
             f"{restarted} groups restarted", "met": not sum(unbalanced) and not restarted},
        ],
    }  # fmt: skip
