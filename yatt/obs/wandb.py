"""Follows a run's metrics and logs them to Weights & Biases: a process of its own beside the run.

Never in the path of training: it only reads ``metrics.jsonl``, and if it fails or wandb is slow, absent
or unreachable, nothing waits for it. The only module that imports wandb.

A run keeps one wandb id over all its attempts (``RUN/wandb/run_id``). A resumed attempt repeats the
iterations after its checkpoint; steps that were logged once (``RUN/wandb/last_step``) are not logged
again, so wandb shows the first take of such an iteration and the report the last.
"""

import argparse
import contextlib
import re
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from yatt.adapters.files import make_within, publish, read_or_none
from yatt.adapters.lines import Tail
from yatt.adapters.patience import patiently
from yatt.config.load import load_resolved
from yatt.config.schema import RunConfig
from yatt.errors import EXIT_FAILED, EXIT_FINISHED
from yatt.obs.metrics import STEP, as_row
from yatt.paths import RunPaths

POLL_S = 0.25
_RUN_ID = re.compile(rb"[0-9A-Za-z_-]{1,64}")


def follow(paths: RunPaths, told: Sequence[int]) -> None:
    """Log every new row until told to end, then what is left.

    Args:
        told: signals received so far; the first one ends it.
    """
    import wandb

    config = patiently(partial(load_resolved, paths.config))
    patiently(partial(make_within, paths.root, paths.wandb))
    run = wandb.init(**patiently(partial(settings_of, paths, config)), settings=wandb.Settings(
        console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True))  # fmt: skip
    run.define_metric(STEP)
    run.define_metric("*", step_metric=STEP)
    tail, last = Tail(paths.metrics, as_row), patiently(partial(last_step, paths))
    while True:
        is_last_turn = bool(told)
        rows, _ = tail.read()
        for row in new_rows(rows, last):
            run.log(row)
            last = row[STEP]
            with contextlib.suppress(OSError):  # at worst a later start logs the row again
                publish(paths.wandb / "last_step", str(last).encode())
        if is_last_turn:
            break
        time.sleep(POLL_S)
    run.finish()


def settings_of(paths: RunPaths, config: RunConfig) -> dict[str, Any]:
    """Arguments of ``wandb.init``: the same run id at each start."""
    mode = config.logging.wandb_mode
    own = replace(config.logging, webhook_url="")  # it is a secret
    return {
        "project": config.logging.wandb_project,
        "name": config.logging.wandb_name or paths.root.absolute().name,
        "id": run_id(paths),
        "dir": str(paths.root),
        "mode": mode,
        "config": asdict(replace(config, logging=own)),
        "resume": "allow" if mode == "online" else None,
    }


def run_id(paths: RunPaths) -> str:
    """The run's id, made at the first start."""
    known = read_or_none(paths.wandb / "run_id")
    if known is not None and _RUN_ID.fullmatch(known.strip()):
        return known.decode().strip()
    fresh = secrets.token_hex(6)
    publish(paths.wandb / "run_id", fresh.encode())
    return fresh


def last_step(paths: RunPaths) -> int:
    """The highest step logged so far; -1 before the first."""
    known = read_or_none(paths.wandb / "last_step")
    text = (known or b"").decode(errors="replace").strip()
    return int(text) if text.isdecimal() and text.isascii() else -1


def new_rows(rows: Sequence[dict[str, Any]], last: int) -> list[dict[str, Any]]:
    """Rows above `last`, each step once, without what has no value."""
    fresh = []
    for row in rows:
        if row[STEP] > last:
            last = row[STEP]
            fresh.append({key: value for key, value in row.items() if value is not None})
    return fresh


def main() -> int:
    """Follow until SIGTERM; the last line of the log says what went wrong."""
    parser = argparse.ArgumentParser(prog="yatt.obs.wandb")
    parser.add_argument("--run", type=Path, required=True)
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: told.append(received))
    try:
        follow(RunPaths(parser.parse_args().run), told)
    except ImportError as error:
        sys.stderr.write(f"{error}; pip install 'yatt[wandb]', or write logging.wandb_mode: disabled\n")
        return EXIT_FAILED
    except Exception as error:  # noqa: BLE001 - a process's main: recorded, and it ends here
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return EXIT_FAILED
    return EXIT_FINISHED


if __name__ == "__main__":
    sys.exit(main())
