"""Shared code of the demonstrations: the quickstart's data and models, its files, and printing of checks.

Standard library only; imported by the scripts beside it.
"""

import json
import os
import subprocess
import sys
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
