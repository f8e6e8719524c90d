"""Sends a run's metrics to Weights & Biases; a separate process beside the run.

It only reads ``metrics.jsonl``. If it fails, or if wandb is slow, missing or unreachable, training does not
wait for it. This is the only module that imports wandb.

A run keeps one wandb id over all its attempts (``RUN/wandb/run_id``). A resumed attempt repeats the
iterations after its checkpoint. Steps already logged (``RUN/wandb/last_step``) are not logged again, so wandb
shows the first result of such an iteration and the report the last one.
"""

import argparse
import contextlib
import re
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from yatt.adapters.files import make_within, publish, read_or_none
from yatt.adapters.lines import Tail
from yatt.adapters.patience import patiently
from yatt.adapters.run_config import load_run
from yatt.adapters.stack_dump import answer_stack_requests
from yatt.config.load import without_secrets
from yatt.config.schema import RunConfig
from yatt.credentials import HIDDEN
from yatt.errors import EXIT_FAILED, EXIT_FINISHED
from yatt.obs.metrics import STEP, as_row
from yatt.paths import RunPaths

POLL_S = 0.25
_RUN_ID = re.compile(rb"[0-9A-Za-z_-]{1,64}")


def follow(paths: RunPaths, told: Sequence[int]) -> None:
    """Logs every new row until a signal comes, then the remaining rows.

    Args:
        told: signals received so far; the first one ends the logging.
    """
    import wandb

    config = patiently(partial(load_run, paths))
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
    """Returns the arguments of ``wandb.init``, with the same run id at each start."""
    mode = config.logging.wandb_mode
    return {
        "project": config.logging.wandb_project,
        "name": config.logging.wandb_name or paths.root.absolute().name,
        "id": run_id(paths),
        "dir": str(paths.root),
        "mode": mode,
        "config": shown_config(config),
        "resume": "allow" if mode == "online" else None,
    }


def shown_config(config: RunConfig) -> dict[str, Any]:
    """Returns what the tracker may know of the config: of `storage_options` only the names, because a driver
    may have a credential under any name."""
    shown = asdict(without_secrets(config))
    for section in (shown["checkpoint"], shown["run"]["from_checkpoint"]):
        section["storage_options"] = dict.fromkeys(section["storage_options"], HIDDEN)
    return shown


def run_id(paths: RunPaths) -> str:
    """Returns the run's wandb id; creates it at the first start."""
    known = read_or_none(paths.wandb / "run_id")
    if known is not None and _RUN_ID.fullmatch(known.strip()):
        return known.decode().strip()
    fresh = secrets.token_hex(6)
    publish(paths.wandb / "run_id", fresh.encode())
    return fresh


def last_step(paths: RunPaths) -> int:
    """Returns the highest step logged so far; -1 before the first."""
    known = read_or_none(paths.wandb / "last_step")
    text = (known or b"").decode(errors="replace").strip()
    return int(text) if text.isdecimal() and text.isascii() else -1


def new_rows(rows: Sequence[dict[str, Any]], last: int) -> list[dict[str, Any]]:
    """Returns the rows above `last`, each step once, without None values."""
    fresh = []
    for row in rows:
        if row[STEP] > last:
            last = row[STEP]
            fresh.append({key: value for key, value in row.items() if value is not None})
    return fresh


def main() -> int:
    """Sends metrics until SIGTERM; the last line of the log names an error."""
    parser = argparse.ArgumentParser(prog="yatt.obs.wandb")
    parser.add_argument("--run", type=Path, required=True)
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: told.append(received))
    paths = RunPaths(parser.parse_args().run)
    answer_stack_requests(paths.root, "wandb")
    try:
        follow(paths, told)
    except ImportError as error:
        sys.stderr.write(f"{error}; pip install 'yatt[wandb]', or write logging.wandb_mode: disabled\n")
        return EXIT_FAILED
    except Exception as error:  # noqa: BLE001 - main of the process: logs the error and exits
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return EXIT_FAILED
    return EXIT_FINISHED


if __name__ == "__main__":
    sys.exit(main())
