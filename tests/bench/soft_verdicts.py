"""Whether soft verdicts order completions better than words, on which grid, and whether a run learns more.

The quickstart's judge, which is sure of most verdicts. What it said is read from recorded rollouts of a run
without a grid: the likelier word is what it would have written, and other grids are rounded afterwards.
"""

import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.bench.learning import ACCURACY, ITERATIONS, make_models
from tests.runs import ROOT, rows, yatt
from yatt.obs.rollouts import whole_samples
from yatt.paths import RunPaths

SEEDS, RECORDED = (1, 2, 3, 4, 5), 4
GRIDS = (0.0, 0.01, 0.02, 0.05, 0.1)
FLAT = 1e-6
FILE = ROOT / "configs" / "quickstart.yaml"


def run_quickstart(folder: Path, name: str, verdict: dict[str, Any], *settings: str) -> Path:
    """Runs the quickstart with these keys of the verdict; returns the run folder."""
    (genrm,) = yaml.safe_load(FILE.read_text())["genrms"]
    overlay, place = folder / f"{name}.yaml", folder / name
    overlay.write_text(yaml.safe_dump({"genrms": [{**genrm, "verdict": {**genrm["verdict"], **verdict}}]}))
    done = yatt("run", str(FILE), str(overlay), f"run.dir={place}", *settings, timeout_s=1200, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def order_chance(said: Sequence[tuple[float, float]]) -> float:
    """The chance that of two completions, one right and one wrong, the right one has the higher score; a tie
    counts a half (area under the curve)."""
    right, wrong = ([score for score, truth in said if truth == value] for value in (1.0, 0.0))
    wins = sum((a > b) + 0.5 * (a == b) for a in right for b in wrong)
    return wins / (len(right) * len(wrong))


def flat_share(groups: Sequence[Sequence[float]]) -> float:
    return statistics.fmean(max(scores) - min(scores) < FLAT for scores in groups)


def recorded(folder: Path) -> Iterator[list[tuple[float, float]]]:
    """The judge's score and the truth of each completion, by prompt group."""
    found: dict[int, list[tuple[float, float]]] = {}
    for iteration in range(1, RECORDED + 1):
        for sample in whole_samples(RunPaths(folder), iteration):
            scores = sample["scores"]
            found.setdefault(sample["group"], []).append((scores["judge"], scores["rule"]))
    yield from found.values()


def read_as(score: float, grid: float | None) -> float:
    """The score as a word (None), or on a grid."""
    if grid is None:
        return float(score > 0.5)
    return round(score / grid) * grid if grid else score


def learned(folder: Path, name: str, verdict: dict[str, Any], seed: int) -> tuple[float, float]:
    """Accuracy after the run, and the share of its groups that were flat."""
    place = run_quickstart(
        folder, f"{name}-{seed}", verdict, f"run.seed={seed}", f"trainer.total_iterations={ITERATIONS}",
        f"validation.every={ITERATIONS}", f"checkpoint.save_every={ITERATIONS}",
    )  # fmt: skip
    found = rows(place / "metrics.jsonl")
    after = [row[ACCURACY] for row in found if ACCURACY in row][-1]
    flat = statistics.fmean(row.get("rollout/flat_groups", 0.0) for row in found[1:])
    print(f"{name}, seed {seed}: {after:.3f}, {flat:.1f} flat groups an iteration", flush=True)
    return after, flat


def run() -> dict[str, Any]:
    make_models()
    with tempfile.TemporaryDirectory(prefix="yatt-") as name:
        folder = Path(name)
        place = run_quickstart(
            folder, "recorded", {"read": "soft", "grid": 0}, f"trainer.total_iterations={RECORDED}",
            "logging.rollouts=all", "validation.every=0", "algorithm.filter_groups=false",
        )  # fmt: skip
        groups = list(recorded(place))
        arms = {"word": {}, "soft": {"read": "soft"}}
        runs = {arm: [learned(folder, arm, keys, seed) for seed in SEEDS] for arm, keys in arms.items()}
    tried = {}
    for grid in (None, *GRIDS):
        read = [[(read_as(score, grid), truth) for score, truth in group] for group in groups]
        flat = flat_share([[score for score, _ in group] for group in read])
        tried[grid] = order_chance([each for group in read for each in group]), flat
    gains = [soft - word for (word, _), (soft, _) in zip(runs["word"], runs["soft"], strict=True)]
    gain, error = statistics.fmean(gains), statistics.stdev(gains) / math.sqrt(len(gains))
    chance, flat = tried[0.05]
    return {
        "title": "Soft verdicts",
        "how": f"The quickstart's judge about {sum(map(len, groups)):,} completions of {len(groups)} "
        f"prompts, as a word, softly, and on grids; and the quickstart with {ITERATIONS} iterations, seeds "
        f"{SEEDS[0]} to {SEEDS[-1]}, with words and with soft verdicts on the default grid.",
        "head": ["read", "orders right above wrong (area under the curve)", "flat groups"],
        "rows": [
            ["word" if grid is None else f"soft, grid {grid:g}", f"{area:.3f}", f"{share:.1%}"]
            for grid, (area, share) in tried.items()
        ],
        "targets": [
            {"what": "area under the curve, soft", "target": ">= 0.99", "value": f"{tried[0.0][0]:.3f}",
             "met": tried[0.0][0] >= 0.99},
            {"what": "flat groups on the default grid, beside those of words", "target": "within 2 points",
             "value": f"{100 * (flat - tried[None][1]):+.1f}", "met": abs(flat - tried[None][1]) <= 0.02},
            {"what": f"accuracy gained by soft verdicts, mean of {len(SEEDS)} seeds", "target": ">= 0",
             "value": f"{gain:+.3f} ± {2 * error:.3f} (two standard errors)", "met": gain >= 0},
        ],
        "notes": [
            f"Accuracy after {ITERATIONS} iterations, seed by seed: "
            + "; ".join(f"{arm} {', '.join(f'{after:.3f}' for after, _ in found)}"
                        for arm, found in runs.items()) + ".",
            f"On the default grid the area is {chance:.3f}.",
        ],
    }  # fmt: skip
