"""Packing under a token cap: what ranks that meet in every micro-step wait for each other.

Lengths are log-normal(8.2, 1.0) clipped to 64 .. 32,768 tokens, cost is 24576 L + L^2 (verl's constant,
for a hidden size of 4096), as in the comparison of other systems that this answers.
"""

import random
import statistics
import time
from typing import Any

from yatt.core.samples.balance import Cost, deal_mini_batch
from yatt.records.message import SampleFact

COST = Cost(a=24576.0, b=1.0)
CASES = ((512, 8, 40_960), (2048, 32, 40_960), (2048, 32, 65_536))
SEEDS = range(5)
TARGET = 1.03


def facts(num_samples: int, seed: int) -> list[SampleFact]:
    draw = random.Random(f"lengths/{num_samples}/{seed}")
    lengths = [min(32_768, max(64, round(draw.lognormvariate(8.2, 1.0)))) for _ in range(num_samples)]
    return [SampleFact(index, index // 8, 0.0, 0, length) for index, length in enumerate(lengths)]


def measure(num_samples: int, dp_size: int, cap_tokens: int, seed: int) -> dict[str, float]:
    samples = facts(num_samples, seed)
    lengths = {sample.sample_id: sample.num_completion_tokens for sample in samples}
    began_s = time.perf_counter()
    plan = deal_mini_batch(samples, dp_size=dp_size, cap_tokens=cap_tokens, cost=COST).micro_batches
    seconds = time.perf_counter() - began_s
    tokens = [[sum(lengths[n] for n in micro) for micro in rank] for rank in plan]
    costs = [[sum(COST.of(lengths[n]) for n in micro) for micro in rank] for rank in plan]
    ideal = sum(map(sum, costs)) / dp_size
    return {
        "sync_path": sum(map(max, zip(*costs, strict=True))) / ideal,
        "rank_max_over_mean": max(map(sum, costs)) / ideal,
        "over_cap": sum(t > cap_tokens for rank in tokens for t in rank),
        "micro_batches": len(plan[0]),
        "fewest_possible": -(-sum(lengths.values()) // (cap_tokens * dp_size)),
        "milliseconds": seconds * 1e3,
    }


def run() -> dict[str, Any]:
    rows, worst, over = [], 0.0, 0
    for case in CASES:
        seen = [measure(*case, seed) for seed in SEEDS]
        middle = {key: statistics.median(one[key] for one in seen) for key in seen[0]}
        highest = max(one["sync_path"] for one in seen)
        worst, over = max(worst, middle["sync_path"]), over + sum(int(one["over_cap"]) for one in seen)
        rows.append([
            f"{case[0]:,} samples, {case[1]} ranks, cap {case[2]:,}",
            f"{middle['sync_path']:.3f} (worst {highest:.3f})",
            f"{middle['rank_max_over_mean']:.4f}",
            f"{sum(int(one['over_cap']) for one in seen)}",
            f"{middle['micro_batches']:.0f} (at least {middle['fewest_possible']:.0f})",
            f"{middle['milliseconds']:.1f} ms",
        ])  # fmt: skip
    return {
        "title": "Balanced micro-batches under a token cap",
        "how": "Medians of 5 seeds. Sync path: the sum over micro-steps of the dearest rank's cost, over "
        "the ideal in which every rank costs the same in every micro-step.",
        "head": ["case", "sync path / ideal", "rank max / mean", "over the cap", "micro-batches a rank",
                 "time"],
        "rows": rows,
        "targets": [
            {"what": "sync path / ideal, worst case's median", "target": f"<= {TARGET}",
             "value": f"{worst:.3f}", "met": worst <= TARGET},
            {"what": "micro-batches over the cap", "target": "0", "value": f"{over}", "met": over == 0},
        ],
    }  # fmt: skip
