"""What preflight says of a run's memory: a refusal where it is sure, else a note.

The machine that starts a run need not have its GPUs, so their memory is not known there.
"""

from dataclasses import replace
from pathlib import Path

from yatt.adapters.inputs.model_family import trained_model
from yatt.config.schema import RunConfig
from yatt.core.gpus.placement import ROLLOUT, genrm_role
from yatt.errors import ConfigError, Finding, doubt_about
from yatt.forecast.memory.advice import nearest_in_words, plan_faults
from yatt.forecast.memory.fit import GIB, GPU_BYTES, memory_plan
from yatt.forecast.memory.parameters import table_of
from yatt.forecast.memory.trainer import critic_table, trainer_demand, trainer_memory, worst_stage
from yatt.models.model import Model, read_model

LARGEST_GPU_BYTES = 288 * GIB
"""Memory of the largest GPUs that are sold: NVIDIA B300, AMD MI355X."""


def check_planned_memory(config: RunConfig, model: Model) -> None:
    """Refuses a layout whose weights, gradients and optimizer fit on no GPU. These bytes are exact.

    Raises:
        ConfigError: names the size and the nearest layout that fits.
    """
    if config.launch.device == "cpu":
        return
    table = table_of(model, config.vision.train)
    demand = trainer_demand(config, model.shape, table, critic_table(config))
    kept = worst_stage(trainer_memory(demand)).kept
    if kept <= LARGEST_GPU_BYTES:
        return
    raise ConfigError(
        f"weights, gradients and optimizer need {kept / GIB:.0f} GiB of each GPU, and the largest GPUs have "
        f"{LARGEST_GPU_BYTES // GIB} GiB. {nearest_in_words(config, model, GPU_BYTES)}",
        key="trainer",
    )


def memory_doubts(config: RunConfig) -> list[Finding]:
    """Returns what does not fit on GPUs of 80 GiB. Other GPUs may be larger, so it is no mistake.

    A model that cannot be read, or has the user's own family, is not counted; other checks report it.
    """
    is_known = not config.model.family and Path(config.model.path).is_dir()
    if config.launch.device == "cpu" or not is_known:
        return []
    try:
        models = models_of(config)
        faults = plan_faults(config, models, memory_plan(config, models))
    except (ConfigError, OSError):
        return []
    size = f"does not fit on GPUs of {GPU_BYTES // GIB} GiB:"
    return [replace(doubt_about(each.key, f"{size} {each.says}"), cure=each.cure) for each in faults]


def held_in_shm(config: RunConfig) -> int:
    """Returns the bytes that a node of a run holds in its memory filesystem, of the kind of node that holds
    most; 0 if the model cannot be read here."""
    if config.model.family or not Path(config.model.path).is_dir():
        return 0
    try:
        return max(host.in_shm for host in memory_plan(config, models_of(config)).hosts)
    except (ConfigError, OSError):
        return 0


def models_of(config: RunConfig) -> dict[str, Model]:
    """The models of roles with engines whose config.json can be read; always that of the policy.

    Raises:
        ConfigError: the policy's cannot.
    """
    models = {ROLLOUT: trained_model(config)}
    for genrm in config.engine_genrms:
        try:
            models[genrm_role(genrm.name)] = read_model(genrm.model)
        except ConfigError:  # an engine may know architectures that the trainer does not
            continue
    return models
