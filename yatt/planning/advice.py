"""Refusals of layouts that cannot be or do not fit, with the nearest one that does."""

from collections.abc import Mapping

from yatt.config.schema import RunConfig
from yatt.config.sizes import num_trainer_nodes
from yatt.core.placement import ROLLOUT
from yatt.errors import ConfigError
from yatt.models.model import Model
from yatt.planning.fit import GPU_BYTES, Fault, MemoryPlan, memory_faults, room_of
from yatt.planning.nearest import nearest_layout
from yatt.trainer.layout import check_layout


def check_possible(config: RunConfig, model: Model, gpu_bytes: int = GPU_BYTES) -> None:
    """Refuses an impossible layout, like `check_layout`, with the nearest that is possible and fits.

    Raises:
        ConfigError: names the keys, the sizes that do not fit, and the nearest layout.
    """
    try:
        check_layout(model.shape, config.trainer, num_trainer_nodes(config) * config.launch.gpus_per_node)
    except ConfigError as error:
        if not model.shape.layers or not model.shape.is_regular:
            raise
        raise ConfigError(f"{error}\n{nearest_in_words(config, model, gpu_bytes)}") from error


def plan_faults(
    config: RunConfig, models: Mapping[str, Model], plan: MemoryPlan, host_bytes: int = 0
) -> list[Fault]:
    """What of a plan does not fit, with the nearest layout of the trainer that fits.

    Args:
        host_bytes: host memory of a node; 0: not known.
    """
    faults = list(memory_faults(plan, host_bytes))
    if plan.trainer_fits:
        return faults
    advice = nearest_in_words(config, models[ROLLOUT], plan.gpu_bytes)
    has_scores = config.model.spec == "torch" and config.model.dtype != "bfloat16"
    if has_scores and config.trainer.context_parallel_size > 1:
        advice += " In bfloat16 the scores of context-parallel attention are not kept in memory."
    return [(key, f"{says} {advice}" if key == "trainer" else says) for key, says in faults]


def nearest_in_words(config: RunConfig, model: Model, gpu_bytes: int) -> str:
    """A sentence with the settings of the nearest layout that fits."""
    found = nearest_layout(config, model, room_of(config, gpu_bytes))
    if found is None:
        return "No layout fits, also not with 64 times the nodes."
    return f"The nearest layout that fits: {' '.join(found.changes)}."
