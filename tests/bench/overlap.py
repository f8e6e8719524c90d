"""What `rollout.ahead` saves in disaggregated placement, where sampling and training cost the same.

Whole runs on two nodes: a real trainer with one thread, and a scripted engine whose steps take real time but
no CPU time. The first run measures the trainer; the engine's steps are then made as long as the training.
Completions all have the same length; or lengths are log-normal and sampling takes twice as long as training,
so that engines wait for the longest completion at the end of each batch, unless it is cut
(`rollout.oversample`).
"""

import json
import math
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.oversampling import KEYS
from tests.runs import RunFile, rows, yatt
from tests.tiny_models import make_qwen3

BATCH, N, ITERATIONS, WARM_UP = 16, 4, 14, 3
TOKENS, MOST_TOKENS = 96, 384
SIGMA, SPREAD_COST = 1.0, 2.0
LAYERS = 8


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """One run: medians of its iterations after the first ones, in seconds."""

    step_s: float
    sampled_s: float
    trained_s: float
    ages: list[float]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One arm: how far ahead, whether lengths differ, and settings of the section `rollout`."""

    ahead: int
    is_spread: bool = False
    oversample: float = 1.0

    @property
    def tokens(self) -> int:
        """Of the longest completion."""
        return MOST_TOKENS if self.is_spread else TOKENS

    @property
    def rollout(self) -> dict[str, Any]:
        age = max(1, self.ahead + (self.oversample > 1))
        return {"ahead": self.ahead, "max_policy_age": age, "oversample": self.oversample}


CASES = (
    Case(ahead=0), Case(ahead=1), Case(ahead=0, is_spread=True), Case(ahead=1, is_spread=True),
    Case(ahead=1, is_spread=True, oversample=1.25),
)  # fmt: skip


def lengths(tokens: int, *, is_spread: bool) -> dict[str, int]:
    """Length of a completion by its first token."""
    normal = statistics.NormalDist()
    places = [(i + 0.5) / len(KEYS) for i in range(len(KEYS))]
    drawn = [math.exp(SIGMA * normal.inv_cdf(place)) for place in places] if is_spread else [1.0] * len(KEYS)
    return {
        str(key): max(2, round(tokens * each / max(drawn))) for key, each in zip(KEYS, drawn, strict=True)
    }


def run_of(
    folder: Path, ahead: int, iterations: int, *, seconds_per_step: float, tokens: int = TOKENS,
    is_spread: bool = False, layers: int = 2,
) -> RunFile:  # fmt: skip
    """A run of one trainer node and one engine node."""
    run = RunFile(folder, {
        "run": {"deterministic": False},
        "launch": {"nodes": 2},
        "placement": {"mode": "disaggregated", "trainer_nodes": 1},
        "rollout": {
            "n": N, "max_response_tokens": tokens, "max_num_seqs": 1024, **Case(ahead=ahead).rollout,
        },
        "trainer": {
            "total_iterations": iterations, "train_batch_size": BATCH, "mini_batch_size": BATCH,
            "max_tokens_per_micro_batch": 4096,
        },
        "checkpoint": {"save_every": iterations},
    })  # fmt: skip
    path = folder / "policy"
    make_qwen3(path, tied=True, layers=layers)
    table = lengths(tokens, is_spread=is_spread)
    (path / "scripted.json").write_text(json.dumps({"lengths": table, "seconds_per_step": seconds_per_step}))
    return run


def arm(folder: Path, case: Case, seconds_per_step: float) -> Overlap:
    """One run to its end."""
    run = run_of(
        folder,
        case.ahead,
        ITERATIONS,
        seconds_per_step=seconds_per_step,
        tokens=case.tokens,
        is_spread=case.is_spread,
        layers=LAYERS,
    )
    run.settings["rollout"] |= case.rollout
    done = yatt("run", str(run.write()), timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [row for row in rows(run.run_dir / "metrics.jsonl") if row["training/global_step"]]
    steady = found[WARM_UP:-1]
    return Overlap(
        step_s=statistics.median(row["timing_s/step"] for row in steady),
        sampled_s=statistics.median(row["timing_s/gen"] for row in steady),
        trained_s=statistics.median(row["timing_s/step"] - row["timing_s/gen"] for row in steady),
        ages=[row["training/policy_age_max"] for row in found],
    )


def run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="yatt-") as name:
        step_s = {
            is_spread: equal_step_s(Path(name) / f"first-{is_spread}", is_spread=is_spread)
            for is_spread in (False, True)
        }
        found = {
            case: [arm(Path(name) / f"{number}-{i}", case, step_s[case.is_spread]) for i in range(3)]
            for number, case in enumerate(CASES)
        }
    step = {case: statistics.median(each.step_s for each in arms) for case, arms in found.items()}
    gen = {case: statistics.median(each.sampled_s for each in arms) for case, arms in found.items()}
    turns, one = CASES[:2]
    trained = statistics.median(each.trained_s for each in found[turns])
    limit = (gen[turns] + trained) / max(gen[turns], trained)
    faster, age = step[turns] / step[one], max(max(each.ages) for each in found[one])
    return {
        "title": "Sampling one batch ahead",
        "how": f"{BATCH} prompts x {N} completions of {TOKENS} tokens, or with log-normal lengths of at most "
        f"{MOST_TOKENS} (sigma {SIGMA:g}); on one node a real trainer, on another one a scripted engine of "
        f"{step_s[False] * 1e3:.1f} ms a step: sampling takes as long as training. With log-normal lengths, "
        f"{step_s[True] * 1e3:.1f} ms a step: {SPREAD_COST:g} times as long. {ITERATIONS} iterations, three "
        "runs an arm.",
        "head": ["lengths", "rollout.ahead", "oversample", "iteration, median", "sampling of a batch",
                 "oldest policy"],
        "rows": [
            ["log-normal" if case.is_spread else "equal", f"{case.ahead}", f"{case.oversample:g}",
             f"{step[case]:.2f} s", f"{gen[case]:.2f} s",
             f"{max(max(each.ages) for each in found[case]):.0f} versions"]
            for case in CASES
        ],
        "targets": [
            {"what": "one batch ahead against taking turns", "target": ">= 1.6 x faster",
             "value": f"{faster:.2f} x; {limit:.2f} if nothing else took time", "met": faster >= 1.6},
            {"what": "oldest policy version trained on", "target": "<= 1", "value": f"{age:.0f}",
             "met": age <= 1},
        ],
    }  # fmt: skip


def equal_step_s(folder: Path, *, is_spread: bool) -> float:
    """Seconds of an engine's step with which sampling takes as long as the rest of an iteration, or twice as
    long."""
    case = Case(ahead=0, is_spread=is_spread)
    first = arm(folder, case, 0.0)
    cost = SPREAD_COST if is_spread else 1.0
    return max(0.0, cost * first.trained_s - first.sampled_s) / case.tokens
