"""Keeping finished prompt groups in the run folder: what it adds to a rollout.

The real sampler, scorer and writer thread of one controller; engines and reward functions answer at once, so
a rollout takes only the controller's own time, and every other rollout's share is smaller.
"""

import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.unit.control.engine_stand_in import completion
from tests.unit.control.test_sampling import Bench
from yatt.control.rollouts.groups.kept_files import KeptGroup, encode_group, kept_files
from yatt.records import message as m

GROUPS, N, TOKENS, ROUNDS = 32, 8, 2048, 11
TOKEN_MS = 10.0
"""Time of an engine for one token of all its sequences, for the share of a real rollout."""


def answer(_: str, sample: m.SampleRequest) -> m.Completed:
    draw = random.Random(sample.seed)
    return completion(sample, [draw.randrange(5, 100)] * draw.randint(TOKENS // 2, TOKENS))


async def timed(bench: Bench, iteration: int) -> float:
    began_s = time.perf_counter()
    found = await bench.advance(iteration, GROUPS)
    seconds = time.perf_counter() - began_s
    bench.trained(found, iteration)
    return seconds


async def arms(bench: Bench) -> dict[str, list[float]]:
    """Seconds of rollouts with and without keeping, in turn."""
    keep, found = bench.sampler.kept.keep, {"kept": list[float](), "not kept": list[float]()}
    await timed(bench, 1)
    for iteration in range(2, 2 * ROUNDS + 2):
        name = ("kept", "not kept")[iteration % 2]
        bench.sampler.kept.keep = keep if name == "kept" else lambda *_: None  # type: ignore[method-assign]
        found[name].append(await timed(bench, iteration))
        while not bench.writer.flush(0.0):
            await asyncio.sleep(0.01)
    return found


def on_loop_ms(bench: Bench) -> tuple[float, int]:
    """Milliseconds of the event loop and bytes for one group."""
    (group,) = asyncio.run(sampled(bench))
    kept = KeptGroup(group=group)
    took = []
    for _ in range(50):
        began_s = time.perf_counter()
        data = encode_group(kept)
        took.append(1e3 * (time.perf_counter() - began_s))
    return statistics.median(took), len(data)


async def sampled(bench: Bench) -> list[Any]:
    found = await bench.advance(1000, 1)
    return bench.sampler.groups_of({group.number for group in found.groups})


def run() -> dict[str, Any]:
    settings = {
        "rollout": {"max_response_tokens": TOKENS, "n": N, "engine": "scripted"},
        "run": {"deterministic": False},
        "trainer": {"total_iterations": 4, "max_tokens_per_micro_batch": 2 * TOKENS},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), answer, num_samples=N, **settings)
        try:
            found = asyncio.run(arms(bench))
            encode_ms, size = on_loop_ms(bench)
            assert len(kept_files(bench.node.paths.kept_groups)) <= 3
        finally:
            bench.close()
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    added_s = medians["kept"] - medians["not kept"]
    whole = added_s / (added_s + TOKENS * TOKEN_MS / 1e3)
    return {
        "title": "Keeping finished prompt groups",
        "how": f"{GROUPS} groups of {N} completions of {TOKENS // 2} to {TOKENS} tokens in one controller, "
        "written to the run folder as they come or not, in turn. Engines answer at once, so the rollout is "
        f"the controller's time alone. An engine that takes {TOKEN_MS:g} ms per token needs "
        f"{TOKENS * TOKEN_MS / 1e3:g} s for the longest completion.",
        "head": ["rollout", "median", "per group on the event loop", "bytes per group"],
        "rows": [
            ["kept", f"{1e3 * medians['kept']:.0f} ms", f"{encode_ms:.2f} ms", f"{size:,}"],
            ["not kept", f"{1e3 * medians['not kept']:.0f} ms", "", ""],
        ],
        "targets": [
            {
                "what": "kept / not kept, median, engines that answer at once",
                "target": "<= 1.1", "value": f"{medians['kept'] / medians['not kept']:.3f}",
                "met": medians["kept"] / medians["not kept"] <= 1.1,
            },
            {
                "what": f"share of a rollout of {TOKENS} tokens at {TOKEN_MS:g} ms",
                "target": "<= 0.5 %", "value": f"{100 * whole:.3f} %", "met": whole <= 0.005,
            },
        ],
    }  # fmt: skip
