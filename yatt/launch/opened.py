"""A run as Python sees it: `yatt.open_run(folder)`. The run may be active or over."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yatt.adapters.lines import read_records
from yatt.adapters.run_config import load_run
from yatt.adapters.segments import SegmentTail
from yatt.adapters.slurm import Slurm
from yatt.config.schema import RunConfig
from yatt.launch.cancel import cancel
from yatt.launch.summary import Summary
from yatt.obs.events import as_event
from yatt.obs.metrics import STEP, read_rows
from yatt.obs.rollouts import whole_samples
from yatt.obs.samples import as_sample
from yatt.paths import RunPaths

if TYPE_CHECKING:
    import pandas


class Run:
    """A run folder.

    Args:
        folder: the run folder.

    Raises:
        ConfigError: it is not a run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._paths = RunPaths(folder.absolute())
        self._paths.check_is_run()

    def __repr__(self) -> str:
        return f"<yatt run {self.folder}>"

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._paths.root

    @property
    def config(self) -> RunConfig:
        """The run's config as its next attempt has it.

        Raises:
            ConfigError: it cannot be read.
        """
        return load_run(self._paths)

    def status(self) -> dict[str, Any]:
        """Returns what `yatt status --json` prints: state, iteration, reward, goodput, job and so on."""
        return Summary(self._paths).as_json()

    def metrics(self) -> list[dict[str, Any]]:
        """Returns one row per iteration, in order, with verl's names; `training/global_step` counts them."""
        return sorted(read_rows(self._paths.metrics), key=lambda row: row[STEP])

    def metrics_frame(self) -> "pandas.DataFrame":
        """Returns the metrics as a dataframe with the iteration as index.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        import pandas

        rows = self.metrics()
        return pandas.DataFrame(rows, columns=None if rows else [STEP]).set_index(STEP)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yields the events of all attempts, oldest first. Files that were deleted by age are missing."""
        for batch in SegmentTail(self._paths.events, as_event).batches():
            yield from batch

    def samples(self, iteration: int | None = None) -> list[dict[str, Any]]:
        """Returns completions with their prompts, scores and verdicts.

        Args:
            iteration: all of this iteration, if `logging.rollouts` is all, else some; None: those that are
                kept for the report, of all iterations.
        """
        if iteration is None:
            return read_records(self._paths.samples, as_sample)[0]
        return list(whole_samples(self._paths, iteration))

    def stop(self, *, now: bool = False) -> str:
        """Lets the run save a checkpoint and stop, as `yatt cancel` does; returns what was done.

        Args:
            now: end a job without saving.

        Raises:
            ConfigError: the run is not active.
        """
        return cancel(self._paths, Slurm(), now=now)
