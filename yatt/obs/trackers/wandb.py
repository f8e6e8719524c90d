"""Weights & Biases. This is the only module that imports wandb."""

from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from yatt.adapters.files.lines import Record
from yatt.obs.metrics import STEP
from yatt.obs.trackers.table import COLUMNS, table_cells
from yatt.obs.trackers.tracker import TrackedRun


class WandbTracker:
    """A run at Weights & Biases."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = wandb.init(
            **wandb_arguments(run),
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True
            ),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log_row(self, step: int, row: Mapping[str, float]) -> None:
        """Logs the row; its step is one of its values, wandb's own counts the calls."""
        self._run.log({**row, STEP: step})

    def log_samples(self, step: int, samples: Sequence[Record]) -> None:
        """Logs a table with a row for each sample."""
        table = wandb.Table(columns=list(COLUMNS), data=[list(table_cells(sample)) for sample in samples])
        self._run.log({STEP: step, "samples": table})

    def close(self) -> None:
        """Waits until everything is sent or written."""
        self._run.finish()


def wandb_arguments(run: TrackedRun) -> dict[str, Any]:
    """Returns the arguments of ``wandb.init``, with the same run id at each start."""
    mode = run.logging.wandb_mode
    return {
        "project": run.logging.wandb_project,
        "name": run.logging.wandb_name or run.name,
        "id": run.id,
        "dir": str(run.folder.parent),
        "mode": mode,
        "config": run.config,
        "resume": "allow" if mode == "online" else None,
    }


def make_tracker(run: TrackedRun) -> WandbTracker:
    """Returns the tracker."""
    return WandbTracker(run)
