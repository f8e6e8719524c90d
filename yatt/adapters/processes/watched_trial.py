"""Reads files of strangers in a separate process, with limits of time and memory.

A chat template is a program, a tokenizer has regular expressions, and a damaged parquet file can crash the
library that reads it. So a template that loops or allocates, and a file that kills its reader, end only this
process, and the message says what it was doing.
"""

import contextlib
import json
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from yatt.adapters.files.patience import is_passing
from yatt.adapters.machine.host_memory import available_bytes
from yatt.adapters.machine.memory import data_bytes
from yatt.adapters.processes.trial import (
    TrialProcess,
    raise_found,
    read_arguments,
    trial_process,
    write_found,
)
from yatt.core.attempts.exits import describe_exit
from yatt.errors import ConfigError, words_of

T = TypeVar("T")
LEAST_BYTES = 4 << 30
TEMPLATE_S, TEMPLATE_BYTES = 10.0, 1 << 30
"""Most time and memory for a chat template and one prompt; usual ones take less than a millisecond."""

LOOK_S, TICK_S = 0.2, 0.5
SINGLE_THREADED = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class Stages:
    """Tells the parent of a trial what it is doing, and that it makes progress.

    Args:
        folder: the trial's folder.
        limit_s: longest time without progress, unless a stage has a limit of its own.
    """

    def __init__(self, folder: Path, limit_s: float) -> None:
        self._file, self._limit_s = folder / "stage", limit_s
        self._now: tuple[str, float] = "", limit_s
        self._count, self._told_s = 0, 0.0

    @contextlib.contextmanager
    def doing(self, what: str, limit_s: float = 0.0, memory_bytes: int = 0) -> Iterator[None]:
        """Context manager: names the current work, and gives it limits of its own.

        Raises:
            ConfigError: it needed more memory than it may take.
        """
        before, self._now = self._now, (what, limit_s or self._limit_s)
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = min(data_bytes() + memory_bytes, soft) if memory_bytes else soft
        self._tell()
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
        try:
            yield
        except MemoryError:
            raise ConfigError(f"{what} needs more memory than a check may take. {CURE}") from None
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
            self._now = before
            self._tell()

    def tick(self) -> None:
        """Tells that there was progress; cheap."""
        if time.monotonic() - self._told_s > TICK_S:
            self._tell()

    def _tell(self) -> None:
        self._count, self._told_s = self._count + 1, time.monotonic()
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps([*self._now, self._count]))
        new.replace(self._file)


CURE = "Replace the file: it is damaged, or made to do harm."


def memory_limit() -> int:
    """Most bytes that a trial may allocate."""
    return max(LEAST_BYTES, available_bytes() // 2)


def run_watched(module: str, arguments: list[Any], limit_s: float, cure: str = CURE) -> list[str]:
    """Runs `python -m module`, whose main function is `answer_watched`.

    Args:
        limit_s: longest time without progress, unless the stage has its own.
        cure: what to do about a stage that ended the process, or was ended.

    Returns:
        Notes for the user.

    Raises:
        ConfigError: the trial found mistakes, or a stage of it was too slow, too large, or ended the process.
    """
    with trial_process(module, [limit_s, memory_limit(), *arguments], SINGLE_THREADED) as trial:
        how = describe_exit(_wait(trial, limit_s, cure))
        if not trial.found.exists():
            what, cure = _stage(trial)[0], f" {cure}"
            if not what:  # nothing of a stranger was read yet
                what, cure = "reading the run's files", ""
            raise ConfigError(f"{what} ended the process that checks it ({how}){trial.last_words()}.{cure}")
        raise_found(trial.found)
        notes = trial.folder / "notes"
        return list(json.loads(notes.read_text())) if notes.exists() else []


def _wait(trial: TrialProcess, limit_s: float, cure: str) -> int:
    known, since_s = _stage(trial), time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return trial.process.wait(LOOK_S)
        if (now := _stage(trial)) != known:
            known, since_s = now, time.monotonic()
        what, stage_limit_s = known[0] or "reading the run's files", known[1] or limit_s
        if time.monotonic() - since_s > stage_limit_s:
            raise ConfigError(f"{what} took longer than {stage_limit_s:g} s and was ended. {cure}")


def _stage(trial: TrialProcess) -> tuple[str, float, int]:
    with contextlib.suppress(FileNotFoundError):
        what, limit_s, count = json.loads((trial.folder / "stage").read_text())
        return str(what), float(limit_s), int(count)
    return "", 0.0, 0


def answer_watched(check: Callable[..., tuple[list[ConfigError], list[str]]]) -> None:
    """Main function of the process: calls `check` with its stages and arguments, which returns mistakes and
    notes; writes them."""
    folder, (limit_s, memory_bytes, *arguments) = read_arguments()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    try:
        faults, notes = check(Stages(folder, limit_s), *arguments)
    except ConfigError as error:
        faults, notes = [error], []
    cause = faults[0].__cause__ if faults and all(map(is_passing, faults)) else None
    (folder / "notes").write_text(json.dumps(notes))
    heading = faults[0].heading if len(faults) == 1 else ""
    write_found(folder, (each for fault in faults for each in fault.findings), cause, heading)
    os._exit(0)


def result_of_stage(what: str, work: Callable[[], T]) -> T:
    """Returns the result of `work`.

    Args:
        what: the file, for the message of an error that is not ours.

    Raises:
        ConfigError: it raised anything else than MemoryError, which ends the stage.
    """
    try:
        return work()
    except (ConfigError, MemoryError):
        raise
    except BaseException as error:  # a library's, about what a stranger wrote; its panics are no `Exception`
        raise ConfigError(f"{what} cannot be used: {words_of(error)}. {CURE}") from error
