"""Shared code of the demonstrations: the quickstart's models, runs whose processes are killed, and checks.

Standard library only; imported by the scripts beside it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "quickstart"
YATT = str(Path(sys.executable).parent / "yatt")
CONFIG = "configs/quickstart.yaml"


def make_models() -> None:
    """Makes the data and missing models; changes the working directory to the repository's root."""
    os.chdir(ROOT)
    call([sys.executable, "tools/arithmetic.py", "runs/quickstart/data"])
    for model in ("policy", "judge"):
        print(f"making the {model} (kept for the next time)", flush=True)
        call([YATT, "sft", f"configs/quickstart-{model}.yaml"])


def call(argv: list[str]) -> None:
    """Runs a command; if it fails, ends this process with its exit code."""
    done = subprocess.run(argv, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def run_with_kills(config: str, folder: Path, kills: dict[str, int]) -> list[str]:
    """Runs a config, and kills processes of it once each by SIGKILL; returns their names.

    Args:
        folder: of the run.
        kills: by the beginning of a process's name, the iteration in whose rollout it is killed.
    """
    run = subprocess.Popen([YATT, "run", config])
    killed: dict[str, str] = {}
    try:
        while run.poll() is None:
            time.sleep(0.2)
            for kind, iteration in kills.items():
                if kind not in killed and (found := _to_kill(folder, kind, iteration)):
                    killed[kind], pid = found
                    print(f"--- killing {killed[kind]} (pid {pid}) with SIGKILL ---", flush=True)
                    os.kill(pid, signal.SIGKILL)
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGTERM)
            run.wait(timeout=60)
    if run.returncode:
        sys.exit(run.returncode)
    return list(killed.values())


def _to_kill(folder: Path, kind: str, iteration: int) -> tuple[str, int] | None:
    """Name and pid of the newest process of a kind, once the run is in a rollout from this iteration on."""
    found, sampling = None, False
    for event in lines(folder / "events.jsonl"):
        if event["kind"] == "worker.start" and event["worker"].startswith(kind):
            found = (event["worker"], event["pid"])
        if event["kind"] == "phase.begin":
            sampling = event["phase"] == "rollout" and event["iteration"] >= iteration
    return found if sampling else None


def started_again(folder: Path, kind: str) -> bool:
    """Whether a process of this kind was started a second time."""
    starts = [e["worker"] for e in lines(folder / "events.jsonl") if e["kind"] == "worker.start"]
    return any(name.startswith(kind) and not name.endswith(".1") for name in starts)


def lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSONL file; empty if the file is missing."""
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines() if line]


def verdict(checks: dict[str, bool]) -> int:
    """Prints each check; returns 0 if all pass."""
    for text, holds in checks.items():
        print(f"{'ok  ' if holds else 'FAIL'} {text}")
    return 0 if all(checks.values()) else 1
