"""What the demonstrations share: the quickstart's data and models, its files, and how checks are printed.

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
    """Make the data and both models where they are missing; leaves the process in the repository's root."""
    os.chdir(ROOT)
    call([sys.executable, "tools/arithmetic.py", "runs/quickstart/data"])
    for model in ("policy", "judge"):
        print(f"making the {model} (kept for the next time)", flush=True)
        call([YATT, "sft", f"configs/quickstart-{model}.yaml"])


def call(argv: list[str]) -> None:
    """Run a command; what fails ends this process with its exit code."""
    done = subprocess.run(argv, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file; none if it is not there."""
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines() if line]


def verdict(checks: dict[str, bool]) -> int:
    """Print each check; 0 if all hold."""
    for text, holds in checks.items():
        print(f"{'ok  ' if holds else 'FAIL'} {text}")
    return 0 if all(checks.values()) else 1
