"""Sends a run's metrics to one tracker; a separate process beside the run, one for each tracker.

It only reads ``metrics.jsonl``, ``samples.jsonl`` and the records of commits. If it fails, or if the tracker
is slow, missing or unreachable, training does not wait for it.

A run keeps one id at the tracker over all its attempts. A resumed attempt repeats the iterations after its
checkpoint, and few trackers can replace what they have. So a row is logged when a checkpoint covers it. With
`logging.send_rows: at_once` it is logged when it is written; then a tracker shows the first result of such an
iteration, and the report the last one.

Its state (the tracker's run id, the last steps) is kept over all starts of a run. If the file cannot be read,
the tracker gets a new run, or some rows again.
"""

import argparse
import contextlib
import importlib
import math
import re
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from yatt.adapters.files.files import make_within, read_or_none, write_atomically
from yatt.adapters.files.lines import MOST, Record, Tail
from yatt.adapters.files.patience import with_retries
from yatt.adapters.inputs.user_module import load_module
from yatt.adapters.processes.stack_dump import answer_stack_requests
from yatt.adapters.run_folder.ledger import (
    COMMITTED,
    known_commit,
    newest_attempt,
    record_of_attempt,
    run_is_finished,
)
from yatt.adapters.run_folder.run_config import load_run
from yatt.config.schema import RunConfig
from yatt.config.sections.operation import TRACKERS, WANDB, tracker_name
from yatt.credentials import redacted_text
from yatt.errors import EXIT_FAILED, EXIT_FINISHED, ConfigError, words_of
from yatt.obs.metrics import STEP, as_row
from yatt.obs.samples import as_sample
from yatt.obs.trackers.tracker import FACTORY, TrackedRun, Tracker, shown_config
from yatt.paths import RunPaths

POLL_S = 0.25
LOOK_S = 1.0

ROWS, SAMPLES = "last_step", "last_samples"
"""Files with the highest step whose row, or whose samples, are logged."""

_RUN_ID = re.compile(rb"[0-9A-Za-z_-]{1,64}")


@dataclass(frozen=True, slots=True)
class TrackerState:
    """The files of one follower.

    Args:
        folder: the tracker's folder in the run folder; it exists.
    """

    folder: Path

    def run_id(self) -> str:
        """Returns the tracker's run id; creates it at the first start."""
        known = read_or_none(self.folder / "run_id")
        if known is not None and _RUN_ID.fullmatch(known.strip()):
            return known.decode().strip()
        fresh = secrets.token_hex(6)
        write_atomically(self.folder / "run_id", fresh.encode())
        return fresh

    def last(self, name: str = ROWS) -> int:
        """Returns the highest step logged so far; -1 before the first."""
        known = read_or_none(self.folder / name)
        text = (known or b"").decode(errors="replace").strip()
        return int(text) if text.isdecimal() and text.isascii() else -1

    def logged(self, step: int, name: str = ROWS) -> None:
        """Notes that a step is logged. If this fails, a later start logs it again."""
        with contextlib.suppress(OSError):
            write_atomically(self.folder / name, str(step).encode())


def follow_rows(paths: RunPaths, tracker: str, told: Sequence[int]) -> None:
    """Logs every new row until a signal comes, then the remaining rows.

    Args:
        tracker: its entry in `logging.trackers`, or wandb.
        told: signals received so far; the first one ends the logging.
    """
    config = with_retries(partial(load_run, paths))
    folder = paths.tracker(tracker_name(tracker))
    with_retries(partial(make_within, paths.root, folder))
    state = TrackerState(folder)
    opened = open_tracker(tracker, with_retries(partial(tracked_run, paths, config, state)))
    last = with_retries(state.last)
    rows, covered = Rows(paths.metrics, last), Covered(paths, is_all=sends_at_once(config))
    samples = Samples(paths.samples, with_retries(partial(state.last, SAMPLES)))
    while True:
        is_last_turn = bool(told)
        for row in rows.until(covered.step(is_last_turn=is_last_turn)):
            last = row[STEP]
            opened.log_row(last, row)
            state.logged(last)
        if config.logging.send_samples:
            for step, found in samples.until(last + is_last_turn):
                opened.log_samples(step, found)
                state.logged(step, SAMPLES)
        if is_last_turn:
            break
        time.sleep(POLL_S)
    opened.close()


def tracked_run(paths: RunPaths, config: RunConfig, state: TrackerState) -> TrackedRun:
    """Returns the run as a tracker sees it."""
    return TrackedRun(
        id=state.run_id(),
        name=paths.root.absolute().name,
        folder=state.folder.absolute(),
        last_step=state.last(),
        config=shown_config(config),
        logging=config.logging,
    )


def open_tracker(tracker: str, run: TrackedRun) -> Tracker:
    """Returns a tracker of the package, or that of the user's file.

    Raises:
        ConfigError: the user's file cannot be loaded, or has no function `make_tracker`.
        ImportError: the tracker's library is missing.
    """
    if tracker in (WANDB, *TRACKERS):
        module: Any = importlib.import_module(f"yatt.obs.trackers.{tracker}")
    else:
        module = load_module(Path(tracker).absolute(), "logging.trackers")
    factory = getattr(module, FACTORY, None)
    if not callable(factory):
        raise ConfigError(f"logging.trackers: {tracker} defines no function {FACTORY}(run).")
    return cast(Tracker, factory(run))


def sends_at_once(config: RunConfig) -> bool:
    """Whether rows do not wait for a checkpoint; where only the end is saved, they would wait for the end."""
    saves = config.checkpoint.save_every or config.checkpoint.save_every_minutes
    return config.logging.send_rows == "at_once" or not saves


class Rows:
    """The rows of metrics, each step once.

    Args:
        last: the highest step whose row is logged.
    """

    def __init__(self, path: Path, last: int) -> None:
        self._tail, self._last = Tail(path, as_row), last
        self._waiting: dict[int, Record] = {}

    def until(self, end: float) -> Iterator[Record]:
        """Yields each row up to step `end` that was not yielded, without None values, steps rising."""
        found, is_anew = self._tail.read()
        if is_anew:
            self._waiting.clear()
        for row in found:
            if row[STEP] > self._last:
                self._waiting.setdefault(row[STEP], row)
        for step in sorted(step for step in self._waiting if step <= end):
            self._last, row = step, self._waiting.pop(step)
            yield {key: value for key, value in row.items() if value is not None}


class Covered:
    """The highest step that no start repeats.

    Args:
        is_all: whether every step counts, also one that may be repeated.
    """

    def __init__(self, paths: RunPaths, *, is_all: bool) -> None:
        self._paths, self._is_all = paths, is_all
        self._step: float = -1
        self._looked_s = -math.inf

    def step(self, *, is_last_turn: bool) -> float:
        """Returns it; infinite if the run is finished. Looks at the ledger once in `LOOK_S`."""
        if self._is_all:
            return math.inf
        now_s = time.monotonic()
        if is_last_turn or now_s - self._looked_s > LOOK_S:
            self._looked_s = now_s
            self._step = max(self._step, with_retries(self._found))
        return self._step

    def _found(self) -> float:
        if run_is_finished(self._paths):
            return math.inf
        if self._step < 0:
            return known_commit(self._paths)[0]
        committed = record_of_attempt(self._paths, newest_attempt(self._paths), COMMITTED).get("iteration")
        return committed if type(committed) is int else -1


class Samples:
    """The samples of each iteration, complete and once.

    They are written before the next iteration's row. So an iteration's samples are complete when a later row
    is there; at the end, when its own row is.

    Args:
        last: the highest step whose samples are logged.
    """

    def __init__(self, path: Path, last: int) -> None:
        self._tail, self._last = Tail(path, as_sample), last
        self._waiting: dict[int, list[Record]] = {}

    def until(self, end: int) -> Iterator[tuple[int, list[Record]]]:
        """Yields step and samples of each iteration before `end` that was not yielded, of its newest
        attempt."""
        found, is_anew = self._tail.read()
        first, cut = min((sample[STEP] for sample in found), default=-1), list[Record]()
        if is_anew:  # what comes before its first line was left out of a full file
            cut = self._waiting.get(first, [])
            self._waiting = {step: kept for step, kept in self._waiting.items() if step < first}
        for sample in found:
            if sample[STEP] > self._last:
                self._waiting.setdefault(sample[STEP], []).append(sample)
        if len(cut) > len(self._waiting.get(first, [])):
            self._waiting[first] = cut
        for step in sorted(step for step in self._waiting if step < end):
            self._last, waiting = step, self._waiting.pop(step)
            newest = max(map(_attempt, waiting))
            yield step, [each for each in waiting if _attempt(each) == newest]


def _attempt(record: Record) -> int:
    attempt = record.get("attempt")
    return attempt if type(attempt) is int and abs(attempt) < MOST else 0


def main() -> int:
    """Sends metrics until SIGTERM; the last line of the log names an error."""
    parser = argparse.ArgumentParser(prog="yatt.obs.trackers.follow")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--tracker", required=True)
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: told.append(received))
    arguments = parser.parse_args()
    paths, tracker = RunPaths(arguments.run), arguments.tracker
    answer_stack_requests(paths.root, tracker_name(tracker))
    try:
        follow_rows(paths, tracker, told)
    except ImportError as error:
        sys.stderr.write(f"{error}; {_cure(tracker)}\n")
        return EXIT_FAILED
    except Exception as error:  # noqa: BLE001 - main of the process: logs the error and exits
        said = str(error) if isinstance(error, ConfigError) else words_of(error)
        sys.stderr.write(f"{redacted_text(' '.join(said.split()))}\n")
        return EXIT_FAILED
    return EXIT_FINISHED


def _cure(tracker: str) -> str:
    if tracker == WANDB:
        return "pip install 'yatt[wandb]', or write logging.wandb_mode: disabled"
    if tracker in TRACKERS:
        return f"pip install 'yatt[{tracker}]', or take {tracker} out of logging.trackers"
    return f"install it, or take {tracker} out of logging.trackers"


if __name__ == "__main__":
    sys.exit(main())
