"""Whether two commits give the same results: parameters, metrics and events of four runs.

    python -m tests.bench.same_results OLD [NEW]

For changes that must not alter behaviour. Each commit is checked out beside this one; both run the same
config files in deterministic mode, with this environment's libraries. Times and placement are left out of the
metrics. Events are counted by node and kind, with the names of today.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from tests.runs import ROOT, RunFile
from tests.tiny_models import make_scripted_model
from yatt.obs.metrics import comparable_results

RENAMED, GONE = {"trouble": "failure.report"}, {"lease.request", "ckpt.delete"}
"""Kinds of events that had another name, and kinds that there are no more."""

BEST_EFFORT = {"worker.end"}
"""Kinds that another node sends while it ends: whether they arrive is a matter of time."""

QUICKSTART_ITERATIONS = 6


def main() -> int:
    """Prints a line a run; 0 if all are the same."""
    parser = argparse.ArgumentParser(prog="tests.bench.same_results", description=__doc__)
    parser.add_argument("old")
    parser.add_argument("new", nargs="?", default="HEAD")
    parser.add_argument("--only", default="", help="part of a run's name")
    arguments = parser.parse_args()
    differing = 0
    with tempfile.TemporaryDirectory(prefix="yatt-same-") as folder:
        trees = {name: _tree(Path(folder), name) for name in (arguments.old, arguments.new)}
        chosen = {n: c for n, c in run_files(Path(folder)).items() if arguments.only in n}
        for name, config in chosen.items():
            old, new = (_outcome(tree, config) for tree in trees.values())
            faults = [what for what in old if old[what] != new[what]]
            for what in faults:
                sys.stderr.write(f"{name}: {what}:\n  {old[what]}\n  {new[what]}\n")
            differing += bool(faults)
            says = f"differ in {', '.join(faults)}" if faults else "are the same"
            print(
                f"{name}: {len(old['metrics'])} iterations, {sum(old['events'].values())} events: {says}",
                flush=True,
            )
    return min(differing, 1)


def run_files(folder: Path) -> dict[str, Path]:
    """The four runs' config files: name -> path."""
    genrm = {
        "name": "judge", "model": make_scripted_model(folder / "judge", mean_tokens=3),
        "template": "{completion}?", "verdict": {"pattern": "([a-m])", "scores": {}},
        "on_unparsable": "score", "unparsable_score": 0.5, "max_tokens": 4, "max_model_tokens": 64,
        "engine": "scripted",
    }  # fmt: skip
    (folder / "judge" / "model.safetensors").write_bytes(b"")
    return {
        "quickstart": _quickstart(folder),
        "disaggregated, two trainer nodes": RunFile(folder / "disaggregated", {
            "launch": {"nodes": 4}, "placement": {"mode": "disaggregated", "trainer_nodes": 2},
        }).write(),
        "tensor parallel, reference policy, transformers": RunFile(folder / "parallel", {
            "launch": {"nodes": 1, "gpus_per_node": 2},
            "rollout": {"engine": "transformers"},
            "trainer": {"tensor_model_parallel_size": 2},
            "algorithm": {"kl_in": "loss", "kl_coef": 0.01},
            "sync": {"probe_prompts": 2},
        }).write(),
        "GenRM that takes the GPUs in turn, validation": RunFile(folder / "judged", {
            "genrms": [genrm], "validation": {"reward": "digits", "every": 2},
            "data": {"val_files": [str(folder / "judged" / "train.jsonl")]},
        }).write(),
    }  # fmt: skip


def _quickstart(folder: Path) -> Path:
    """As `make demo` runs it, but deterministic and shorter."""
    subprocess.run([sys.executable, "-c", "import quickstart; quickstart.make_models()"],
                   cwd=ROOT / "tools", check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    config = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    config["run"] = {"dir": str(folder / "quickstart" / "run"), "deterministic": True}
    config["trainer"]["total_iterations"] = QUICKSTART_ITERATIONS
    path = folder / "quickstart.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def _tree(folder: Path, commit: str) -> Path:
    tree = folder / f"tree-{len(list(folder.glob('tree-*')))}"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tree)], check=True)
    name = subprocess.run(["git", "rev-parse", commit], cwd=ROOT, check=True, capture_output=True, text=True)
    subprocess.run(["git", "checkout", "-q", name.stdout.strip()], cwd=tree, check=True)
    return tree


def _outcome(tree: Path, config: Path) -> dict[str, Any]:
    """What must be the same."""
    run = Path(yaml.safe_load(config.read_text())["run"]["dir"])
    shutil.rmtree(run, ignore_errors=True)
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-P", "-m", "yatt.cli.main", "run", str(config)]  # -P: not this tree
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{config} with {tree}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    weights = {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (run / "model").glob("*.safetensors")
    }
    assert weights, "the trained model is exported"
    return {
        "parameters": weights,
        "metrics": [comparable_results(row) for row in rows],
        "events": Counter(
            (e["node"], RENAMED.get(e["kind"], e["kind"]))
            for e in events
            if e["kind"] not in BEST_EFFORT | GONE
        ),
    }


if __name__ == "__main__":
    sys.exit(main())
