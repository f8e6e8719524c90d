"""Whether a run learns the same in each placement, and when one or two batches are sampled ahead.

The quickstart with 80 iterations, three seeds an arm, real vLLM engines and a GenRM's verdict as the reward.
The measure is the accuracy on held-out sums after the last iteration, which the run itself never sees.
"""

import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.runs import ROOT, rows, yatt

ITERATIONS, SEEDS = 80, (1, 2, 3)
ACCURACY = "val-core/arithmetic/rule/mean@1"
APART = ("placement.mode=disaggregated", "placement.trainer_nodes=1", "launch.nodes=3")
ARMS: dict[str, tuple[str, ...]] = {
    "colocated": ("placement.mode=colocated", "placement.genrm_gpu_sets=0"),
    "partial": (),
    "disaggregated": APART,
    "disaggregated, dynamic split": (
        *APART[:2],
        "launch.nodes=2",
        "launch.engine_gpus_per_node=4",
        "placement.split=dynamic",
    ),
    "disaggregated, 1 ahead": (*APART, "rollout.ahead=1"),
    "disaggregated, 2 ahead": (*APART, "rollout.ahead=2", "rollout.max_policy_age=2"),
}
MOST_ERRORS = 3.0
"""Largest difference of two arms' means, in standard errors of that difference."""


def run() -> dict[str, Any]:
    make_models()
    with tempfile.TemporaryDirectory(prefix="yatt-") as name:
        found = {arm: [measured(Path(name), arm, seed) for seed in SEEDS] for arm in ARMS}
    after = {arm: [pair[1] for pair in pairs] for arm, pairs in found.items()}
    spread = math.sqrt(statistics.mean(statistics.variance(values) for values in after.values()))
    error = spread * math.sqrt(2 / len(SEEDS))
    mean = {arm: statistics.mean(values) for arm, values in after.items()}
    worst = max(abs(mean[arm] - mean["colocated"]) for arm in ARMS)
    gain = min(b - a for pairs in found.values() for a, b in pairs)
    return {
        "title": "Learning in each placement, and with batches sampled ahead",
        "how": f"The quickstart with {ITERATIONS} iterations: a policy that adds, a GenRM that judges, both "
        f"in vLLM. Accuracy on held-out sums after the last iteration, seeds {', '.join(map(str, SEEDS))}. "
        f"Seeds of an arm spread by {spread:.3f} (pooled standard deviation); two arms' means differ by "
        f"chance by {error:.3f} (standard error).",
        "head": ["arm", "accuracy before", "after, each seed", "mean"],
        "rows": [
            [arm, f"{statistics.mean(a for a, _ in pairs):.3f}", ", ".join(f"{b:.3f}" for _, b in pairs),
             f"{mean[arm]:.3f}"]
            for arm, pairs in found.items()
        ],
        "targets": [
            {"what": "largest difference to colocated", "target": f"<= {MOST_ERRORS:g} standard errors",
             "value": f"{worst:.3f} = {worst / error:.1f} standard errors",
             "met": worst <= MOST_ERRORS * error},
            {"what": "every run learns: smallest gain", "target": ">= 0.1", "value": f"{gain:.3f}",
             "met": gain >= 0.1},
        ],
    }  # fmt: skip


def make_models() -> None:
    """As `make demo` does; models that are there are kept."""
    made = [[sys.executable, "tools/arithmetic.py", "runs/quickstart/data"]]
    for command in made:
        subprocess.run(command, cwd=ROOT, check=True)
    for model in ("policy", "judge"):
        done = yatt("sft", f"configs/quickstart-{model}.yaml", timeout_s=900, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr


def measured(folder: Path, arm: str, seed: int) -> tuple[float, float]:
    """One run's accuracy before and after."""
    run_dir = folder / f"{arm}-{seed}".replace(", ", "-").replace(" ", "-")
    settings = (
        f"run.dir={run_dir}", f"run.seed={seed}", f"trainer.total_iterations={ITERATIONS}",
        f"validation.every={ITERATIONS}", f"checkpoint.save_every={ITERATIONS}", *ARMS[arm],
    )  # fmt: skip
    done = yatt("run", "configs/quickstart.yaml", *settings, timeout_s=1200, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [row[ACCURACY] for row in rows(run_dir / "metrics.jsonl") if ACCURACY in row]
    print(f"{arm}, seed {seed}: {found[0]:.3f} to {found[-1]:.3f}", flush=True)
    return found[0], found[-1]
