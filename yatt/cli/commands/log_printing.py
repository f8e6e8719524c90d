"""`yatt logs RUN`: the last lines of all processes of an attempt, merged by time."""

import os
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from yatt.adapters.slurm.job_note import noted_job
from yatt.cli.commands.look import REFRESH_S, open_view
from yatt.errors import ConfigError
from yatt.obs.terminal.log_lines import LogFile, LogFilter, LogLine, merged_lines
from yatt.paths import RunPaths
from yatt.printable import printable

LINES, SINCE_LINES = 200, 10_000
JOB = "job"
"""Role of the launcher of a Slurm job, whose log is in `submitit/`."""

_AGO = re.compile(r"(\d{1,6})([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Which logs and lines are printed. `attempt`: 0 is the newest; `most`: 0 is the default number."""

    role: str = ""
    attempt: int = 0
    most: int = 0
    filter: LogFilter = field(default_factory=LogFilter)


def print_logs(run: Path, chosen: Chosen, *, follow: bool) -> int:
    """Prints the last lines of the logs; with `follow` also new lines, until Ctrl-C.

    Raises:
        ConfigError: there is no log, or none of that role or attempt.
    """
    paths = open_view(run).paths
    if not follow:
        _check(paths, chosen)
    most = chosen.most if chosen.most > 0 else SINCE_LINES if chosen.filter.since_s else LINES
    files = {path: LogFile(name, path, chosen.filter) for name, path in sorted(_logs(paths, chosen).items())}
    _print(merged_lines((file.last(most, is_growing=follow) for file in files.values()), most))
    if any(file.is_cut for file in files.values()):
        sys.stderr.write("yatt: older lines of large logs were not searched\n")
    try:
        while follow:
            time.sleep(REFRESH_S)
            for name, path in sorted(_logs(paths, chosen).items()):
                files.setdefault(path, LogFile(name, path, chosen.filter, is_new=True))
            new = [line for file in files.values() for line in file.new()]
            _print(sorted(new, key=lambda line: line.at_s))
    except KeyboardInterrupt:
        pass
    return 0


def since_s(text: str, now_s: float) -> float:
    """Returns the time of `--since` in seconds since 1970; 0 if it is empty.

    Raises:
        ConfigError: it is neither an age nor a time.
    """
    if not text:
        return 0.0
    if (match := _AGO.fullmatch(text)) is not None:
        return now_s - int(match[1]) * _UNITS[match[2]]
    now = datetime.fromtimestamp(now_s)
    try:
        if re.fullmatch(r"\d\d:\d\d(:\d\d)?", text):
            at = datetime.fromisoformat(f"{now.date()}T{text}")
            return (at if at <= now else at - timedelta(days=1)).timestamp()
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(
            f"--since {text}: write an age (90s, 10m, 2h, 3d), a time of day (14:30), or a date and a time "
            "(2026-01-31T14:30, with +00:00 for UTC)."
        ) from None


def _check(paths: RunPaths, chosen: Chosen) -> None:
    every = _logs(paths, Chosen(attempt=chosen.attempt))
    if not every and chosen.attempt:
        raise ConfigError(f"{paths.root} has no logs of attempt {chosen.attempt}.")
    if not every:
        raise ConfigError(f"{paths.root} has no logs yet: the run was not started.")
    if not _logs(paths, chosen):
        known = ", ".join(sorted({name.partition(".")[0] for name in every}))
        raise ConfigError(f"--role {chosen.role}: no log has a name that begins so; there are {known}.")


def _logs(paths: RunPaths, chosen: Chosen) -> dict[str, Path]:
    """Maps names to log files: those of the attempt, and with the newest one the launcher's of the newest
    job."""
    noted = noted_job(paths)
    launcher = paths.submitit / f"{noted.job if noted else ''}_0_log.out"
    found = {JOB: launcher} if noted and launcher.exists() and not chosen.attempt else {}
    folder = paths.attempt(chosen.attempt) if chosen.attempt else paths.latest
    logs = Path(os.path.realpath(folder / "logs"))
    found |= {path.stem: path for path in logs.glob("*.log") if path.is_file()}
    return {name: path for name, path in found.items() if name.startswith(chosen.role)}


def _print(lines: Iterable[LogLine]) -> None:
    for line in lines:
        sys.stdout.write(f"{printable(line.name)}: {printable(line.text)}\n")
    sys.stdout.flush()
