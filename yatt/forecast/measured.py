"""The figures of a run for `yatt simulate`: the mean of its last batches."""

from collections.abc import Iterable, Mapping, Sequence

from yatt.adapters.run_folder.run_config import load_run
from yatt.core.gpus.engine_model import EngineSpeed
from yatt.errors import ConfigError
from yatt.forecast.time.figures import RunFigures, train_gpu_s
from yatt.obs.story.batch_loads import mean_lengths, read_batch_loads
from yatt.paths import RunPaths
from yatt.records.events.slabs import BatchMeasured


def measured_figures(paths: RunPaths) -> tuple[RunFigures, str]:
    """Returns the figures of a run's last batches, and a sentence that says where they are from.

    Raises:
        ConfigError: it is not a run folder, or it has no readable figures.
    """
    paths.check_is_run()
    loads, num_bad = read_batch_loads(paths.events)
    if not loads:
        damaged = f", and {num_bad} that cannot be read" if num_bad else ""
        raise ConfigError(
            f"{paths.root}: its events have no measured batch{damaged}. Let the run complete an iteration, "
            "or simulate the run file and give lengths and speeds: see yatt simulate --help."
        )
    config = load_run(paths)
    train_s = _mean(load.train_s for load in loads if load.train_s)
    figures = RunFigures(
        lengths=mean_lengths(loads),
        verdicts=_by_role([load.verdicts for load in loads]),
        questions=_by_role([load.questions for load in loads]),
        speeds=_speeds(loads),
        switch_s=_mean(load.switch_s for load in loads if load.switch_s),
        train_gpu_s=None if train_s is None else train_gpu_s(train_s, config),
        kept=_mean(load.kept for load in loads),
    )
    batches = f"iteration {loads[0].iteration}" if len(loads) == 1 else f"{len(loads)} iterations"
    last = "" if len(loads) == 1 else f" up to {loads[-1].iteration}"
    damaged = f"; {num_bad} damaged events were skipped" if num_bad else ""
    return figures, f"measured in {batches}{last} of {paths.root}{damaged}"


def _by_role(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of each role that the last batch has."""
    return {role: _mean(each[role] for each in found if role in each) or 0.0 for role in found[-1]}


def _speeds(loads: Sequence[BatchMeasured]) -> dict[str, EngineSpeed]:
    found: dict[str, list[EngineSpeed]] = {}
    for load in loads:
        for role, each in load.roles.items():
            step_s, sequence_s = each.step_s or 0.0, each.sequence_s or 0.0
            if step_s + sequence_s > 0:
                found.setdefault(role, []).append(EngineSpeed(step_s, sequence_s))
    return {
        role: EngineSpeed(
            sum(speed.step_s for speed in speeds) / len(speeds),
            sum(speed.sequence_s for speed in speeds) / len(speeds),
        )
        for role, speeds in found.items()
    }


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None
