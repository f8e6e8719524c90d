"""Runs with scripted engines whose slabs move between rollout and a GenRM, and a check of their events."""

import itertools
import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tests.bench.oversampling import KEYS, run_of
from tests.runs import RunFile
from tests.tiny_models import make_scripted_model

JUDGE = "genrm:judge"
PLACES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "partial": ({"nodes": 2, "gpus_per_node": 2}, {"mode": "partial"}),
    "disaggregated": (
        {"nodes": 3, "gpus_per_node": 1, "engine_gpus_per_node": 3},
        {"mode": "disaggregated", "trainer_nodes": 1},
    ),
}
"""Settings of launch and placement: four slabs that are shared with the trainer, or six that are not."""


def moving_run(
    folder: Path,
    place: str,
    iterations: int,
    *,
    genrm_gpu_sets: int = 1,
    split: str = "dynamic",
    **judge: Any,
) -> RunFile:
    """A run whose completions have log-normal lengths and whose verdicts take long; `judge` is for the
    GenRM's script."""
    script = {"mean_tokens": 60, "seconds_per_step": 0.01, **judge}
    run = run_of(folder, 1.0, iterations, seconds_per_step=0.004)
    model = make_scripted_model(folder / "judge", **script)
    (Path(model) / "model.safetensors").write_bytes(b"")
    run.settings["rollout"]["max_num_seqs"] = 16
    run.settings["genrms"] = [
        {"name": "judge", "model": model, "engine": "scripted", "max_model_tokens": 1024, "max_tokens": 100,
         "max_num_seqs": 2, "template": "{completion}", "on_unparsable": "score", "unparsable_score": 0.25,
         "retries": 0, "verdict": {"pattern": "([a-z])", "scores": {"e": 1.0, "t": 0.0}}}
    ]  # fmt: skip
    launch, placement = PLACES[place]
    run.settings["launch"].update(launch)
    run.settings["placement"] = {**placement, "genrm_gpu_sets": genrm_gpu_sets, "split": split}
    return run


def turning_run(folder: Path, iterations: int) -> RunFile:
    """A run whose completions all end together, so that nothing can be judged beside them, and whose switches
    are short: roles take turns as soon as it has measured a batch."""
    run = moving_run(folder, "partial", iterations)
    script = {"lengths": dict.fromkeys(map(str, KEYS), 200), "seconds_per_step": 0.004}
    (folder / "policy" / "scripted.json").write_text(json.dumps(script))
    return run


def double_holders(events: list[dict[str, Any]]) -> list[str]:
    """Grants of a slab before its holder has released it or ended. Looks at events alone."""
    events = sorted(events, key=lambda event: event["t"])
    grants, faults, lives = defaultdict(list), [], Counter()
    for event in events:
        lives[event["node"]] += event["kind"] == "node.lost"
        if event["kind"] == "lease.grant":
            grants[event["attempt"], lives[event["node"]], event["slab"]].append(event)
    for (_, _, slab), told in grants.items():
        for one, other in itertools.pairwise(told):
            if not _gave_up([event for event in events if event["t"] < other["t"]], one):
                faults.append(f"{slab}: {other['holder']} while {one['holder']} held it")
            if other["token"] <= one["token"]:
                faults.append(f"{slab}: token {other['token']} after {one['token']}")
    return faults


def _gave_up(events: list[dict[str, Any]], grant: dict[str, Any]) -> bool:
    """Whether the holder of a grant released the slab, or all its processes there ended since."""
    releases = [e for e in events if e["kind"] == "lease.release" and e["t"] > grant["t"]]
    if any((e["slab"], e["token"]) == (grant["slab"], grant["token"]) for e in releases):
        return True
    place = f"{grant['holder'].replace(':', '-')}-{grant['slab']}"
    # One engine of several on a slab has the suffix "e1", a process of an engine over several slabs "r1".
    own = re.compile(rf"({re.escape(place)}([er]\d+)?)\.\d+")

    ends: dict[str, bool] = {}
    for event in events:
        if event["kind"] in ("worker.start", "worker.end") and (found := own.fullmatch(event["worker"])):
            ends[found[1]] = event["kind"] == "worker.end" and event["t"] > grant["t"]
    return bool(ends) and all(ends.values())
