"""`yatt list`: one line per run."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from yatt.adapters.run_folder.run_config import load_run
from yatt.adapters.slurm.slurm import Slurm
from yatt.errors import ConfigError
from yatt.launch.folder.jobs import JobView, queued_views, state_in_words
from yatt.launch.folder.known import known_runs
from yatt.obs.story.view import RunView
from yatt.paths import RunPaths
from yatt.printable import printable

ANSWER_S = 1.2
"""Timeout of the call to Slurm. Without an answer, the list shows only what the run folders contain."""


MOST_KNOWN = 20
"""Number of runs that are listed if no folder is named: each is read."""


def print_runs(folders: list[Path], *, is_all: bool = False) -> int:
    """Lists the runs in these folders; without folders, the newest runs that this user has started.

    Args:
        is_all: without folders, all of them.
    """
    roots = list(dict.fromkeys(root for folder in folders for root in _runs_in(folder)))
    roots, num_older = (roots, 0) if folders else _known(is_all=is_all)
    runs = [RunPaths(root) for root in roots]
    with ThreadPoolExecutor(max_workers=1) as pool:  # query Slurm while the folders are read
        asked = pool.submit(queued_views, runs, Slurm(), ANSWER_S)
        totals = [_total(paths) for paths in runs]
        summaries = [_summary(paths, total) for paths, total in zip(runs, totals, strict=True)]
        jobs = asked.result()
    rows = [_row(*parts) for parts in zip(runs, totals, summaries, jobs, strict=True)]
    if any(job.state == "UNKNOWN" for job in jobs):
        sys.stderr.write("yatt: Slurm does not answer: the list shows only what the run folders contain\n")
    if not rows:
        sys.stdout.write("no runs\n")
        return 0
    rows.insert(0, ("JOB", "JOB STATE", "ITERATION", "RUN STATE", "FOLDER"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)]
        sys.stdout.write("  ".join([*cells, printable(row[4])]) + "\n")
    if num_older:
        sys.stdout.write(f"and {num_older} older {'run' if num_older == 1 else 'runs'}: yatt list --all\n")
    return 0


def _known(*, is_all: bool) -> tuple[list[Path], int]:
    """Returns this user's runs, oldest first, and how many older ones are left out."""
    roots = known_runs()
    num_older = 0 if is_all else max(0, len(roots) - MOST_KNOWN)
    return roots[num_older:], num_older


def _runs_in(folder: Path) -> Iterator[Path]:
    """Yields the folder itself if it is a run folder, else the run folders directly below it.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}.")
    candidates = [folder] if (folder / "config.yaml").exists() else sorted(folder.glob("*/"))
    yield from (path for path in candidates if (path / "claims").is_dir() or (path / "slurm.json").exists())


def _total(paths: RunPaths) -> int | None:
    try:
        return load_run(paths).trainer.total_iterations
    except (ConfigError, OSError):
        return None


def _summary(paths: RunPaths, total: int | None) -> dict[str, Any]:
    if total is None:
        return {}
    view = RunView(paths, total)
    try:
        view.refresh()
        return view.summary()
    except OSError:
        return {}


def _row(paths: RunPaths, total: int | None, summary: dict[str, Any], job: JobView) -> tuple[str, ...]:
    if total is None:
        return "-", "-", "-", "unreadable config", str(paths.root)
    if not summary:
        return "-", "-", "-", "unreadable folder", str(paths.root)
    state = state_in_words(paths, summary["state"], job)[0]
    iteration = f"{summary['iteration']}/{summary['total_iterations']}"
    return job.job_id or "-", job.state or "-", iteration, state, str(paths.root)
