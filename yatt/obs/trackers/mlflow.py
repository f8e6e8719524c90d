"""MLflow: at MLFLOW_TRACKING_URI, in the experiment MLFLOW_EXPERIMENT_NAME; both are MLflow's own variables,
as are those with credentials. Without a URI it uses a file store in the run folder.

This is the only module that imports mlflow.
"""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 refuses it otherwise

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from yatt.adapters.files.lines import Record
from yatt.obs.metrics import STEP
from yatt.obs.trackers.table import COLUMNS, table_cells
from yatt.obs.trackers.tracker import TrackedRun, dotted_keys

EXPERIMENT = "yatt"
ID_TAG = "yatt.run"
MOST_PARAMS, MOST_METRICS = 100, 1000
"""In one call, by MLflow's limits."""

MOST_CHARS = 500
"""Longest value of a parameter that every store accepts."""

MOST_NAME = 250


class MlflowTracker:
    """A run at MLflow. It is found by its tag, so every start continues the same run."""

    def __init__(self, run: TrackedRun) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or run.folder.as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        self._id = self._found(run)
        known = self._client.get_run(self._id).data.params  # a value may not be set twice
        params = [
            Param(metric_name(key), _value(value))
            for key, value in dotted_keys(run.config).items()
            if metric_name(key) not in known
        ]
        for begin in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[begin : begin + MOST_PARAMS])
        self._client.update_run(self._id, status="RUNNING")

    def _found(self, run: TrackedRun) -> str:
        """Returns MLflow's id of the run; creates experiment and run if they are missing."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        experiment = self._client.get_experiment_by_name(name)
        key = experiment.experiment_id if experiment else self._client.create_experiment(name)
        for found in self._client.search_runs([key], f"tags.`{ID_TAG}` = '{run.id}'", max_results=1):
            return str(found.info.run_id)
        return str(self._client.create_run(key, tags={ID_TAG: run.id}, run_name=run.name).info.run_id)

    def log_row(self, step: int, row: Mapping[str, float]) -> None:
        """Logs a metric for each number."""
        now_ms = int(time.time() * 1000)
        metrics = [Metric(metric_name(key), value, now_ms, step) for key, value in row.items() if key != STEP]
        for begin in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + MOST_METRICS])

    def log_samples(self, step: int, samples: Sequence[Record]) -> None:
        """Writes a table as an artifact, in the form that MLflow's page shows as a table."""
        table = {"columns": list(COLUMNS), "data": [list(table_cells(sample)) for sample in samples]}
        self._client.log_text(self._id, json.dumps(table), f"samples/{step:06d}.json")

    def close(self) -> None:
        """Marks this start as over; a later start continues the run."""
        self._client.set_terminated(self._id)


def metric_name(key: str) -> str:
    """Returns a name that MLflow allows: `mean@4` becomes `mean_at_4`, other characters become `_`."""
    text = re.sub(r"[^\w. :/-]", "_", key.replace("@", "_at_"), flags=re.ASCII)
    parts = [part for part in text.split("/") if part.strip(".")]
    return "/".join(parts)[:MOST_NAME]


def _value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text[:MOST_CHARS]


def make_tracker(run: TrackedRun) -> MlflowTracker:
    """Returns the tracker."""
    return MlflowTracker(run)
