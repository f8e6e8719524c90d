"""TensorBoard: event files in the run folder, for ``tensorboard --logdir RUN``. It needs no torch.

This is the only module that imports tensorboard.
"""

import json
import time
from collections.abc import Mapping, Sequence

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from yatt.adapters.files.lines import Record
from yatt.obs.metrics import STEP
from yatt.obs.trackers.table import COLUMNS, table_cells
from yatt.obs.trackers.tracker import TrackedRun, dotted_keys


class TensorBoardTracker:
    """Event files of one run, a new one for each start.

    A start that was killed may have written a step that does not count as logged. The first event of the
    next start tells TensorBoard to hide such steps.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._writer = EventFileWriter(str(run.folder))
        self._add(Event(step=run.last_step + 1, session_log=SessionLog(status=SessionLog.START)))
        if run.last_step < 0:
            keys = [(key, json.dumps(value, default=str)) for key, value in dotted_keys(run.config).items()]
            self._text("config", 0, [("key", "value"), *keys])
        self._writer.flush()

    def log_row(self, step: int, row: Mapping[str, float]) -> None:
        """Writes a scalar for each number."""
        values = [Summary.Value(tag=key, simple_value=value) for key, value in row.items() if key != STEP]
        self._add(Event(step=step, summary=Summary(value=values)))
        self._writer.flush()

    def log_samples(self, step: int, samples: Sequence[Record]) -> None:
        """Writes a table with a row for each sample, which the page TEXT shows."""
        self._text(
            "samples", step, [COLUMNS, *(tuple(map(_shown, table_cells(sample))) for sample in samples)]
        )
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

    def _text(self, tag: str, step: int, rows: Sequence[Sequence[str]]) -> None:
        shape = [TensorShapeProto.Dim(size=len(rows)), TensorShapeProto.Dim(size=len(rows[0]))]
        tensor = TensorProto(
            dtype=DT_STRING,
            tensor_shape=TensorShapeProto(dim=shape),
            string_val=[cell.encode(errors="replace") for row in rows for cell in row],
        )
        metadata: SummaryMetadata = create_summary_metadata(tag, "")
        value = Summary.Value(tag=tag, tensor=tensor, metadata=metadata)
        self._add(Event(step=step, summary=Summary(value=[value])))

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)


def _shown(cell: str | float | None) -> str:
    """Returns a cell as Markdown: a text as it is, in a block."""
    if not isinstance(cell, str):
        return "" if cell is None else f"{cell:g}"
    return "".join(f"    {line}\n" for line in cell.splitlines())


def make_tracker(run: TrackedRun) -> TensorBoardTracker:
    """Returns the tracker."""
    return TensorBoardTracker(run)
