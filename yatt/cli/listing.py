"""`yatt list`: one line a run."""

import sys
from collections.abc import Iterator
from pathlib import Path

from yatt.adapters.slurm import Slurm
from yatt.config.load import load_resolved
from yatt.errors import ConfigError
from yatt.launch.jobs import job_view, state_in_words
from yatt.launch.known import known_runs
from yatt.obs.view import RunView
from yatt.paths import RunPaths
from yatt.printable import printable


def print_runs(folders: list[Path]) -> int:
    """Runs in these folders, or all that this person has submitted."""
    roots = list(dict.fromkeys(root for folder in folders for root in _runs_in(folder)))
    rows = [_row(root) for root in (roots if folders else known_runs())]
    if not rows:
        sys.stdout.write("no runs\n")
        return 0
    rows.insert(0, ("JOB", "JOB STATE", "ITERATION", "RUN STATE", "FOLDER"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:4], widths, strict=True)]
        sys.stdout.write("  ".join([*cells, printable(row[4])]) + "\n")
    return 0


def _runs_in(folder: Path) -> Iterator[Path]:
    """The folder itself if it is a run, else the runs directly below it.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}.")
    candidates = [folder] if (folder / "config.yaml").exists() else sorted(folder.glob("*/"))
    yield from (path for path in candidates if (path / "epochs").is_dir() or (path / "slurm.json").exists())


def _row(root: Path) -> tuple[str, str, str, str, str]:
    paths = RunPaths(root)
    try:
        total = load_resolved(paths.config).trainer.total_iterations
    except ConfigError:
        return "-", "-", "-", "unreadable config.yaml", str(root)
    view = RunView(paths, total)
    view.refresh()
    summary, job = view.summary(), job_view(paths, Slurm())
    iteration = f"{summary['iteration']}/{summary['total_iterations']}"
    return (
        job.job_id or "-",
        job.state or "-",
        iteration,
        state_in_words(paths, summary["state"], job)[0],
        str(root),
    )
