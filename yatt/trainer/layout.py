"""Which layouts can be: sizes that must divide each other. No torch, so that it can be asked anywhere."""

from yatt.config.schema import TrainerSection
from yatt.errors import ConfigError
from yatt.weights.shape import ModelShape


def check_layout(shape: ModelShape, layout: TrainerSection, world_size: int) -> None:
    """Refuse layouts that cannot be, before anything is built.

    Raises:
        ConfigError: names the sizes that do not fit.
    """
    tp, pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    vpp, cp = layout.virtual_pipeline_model_parallel_size, layout.context_parallel_size
    rules = [
        (
            world_size % (tp * pp * cp) == 0,
            f"{world_size} ranks are no multiple of TP {tp} x PP {pp} x CP {cp}",
        ),
        (
            shape.num_heads % tp == 0,
            f"tensor_model_parallel_size {tp} does not divide {shape.num_heads} heads",
        ),
        (
            shape.num_kv_heads % tp == 0,
            f"tensor_model_parallel_size {tp} does not divide {shape.num_kv_heads} key/value heads",
        ),
        (
            shape.ffn_size % tp == 0,
            f"tensor_model_parallel_size {tp} does not divide FFN size {shape.ffn_size}",
        ),
        (
            shape.num_layers % (pp * vpp) == 0,
            f"{shape.num_layers} layers do not divide into PP {pp} x VPP {vpp}",
        ),
        (
            vpp == 1 or pp > 1,
            "virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size above 1",
        ),
        (layout.expert_model_parallel_size == 1, "expert_model_parallel_size must be 1: the model is dense"),
    ]
    for holds, says in rules:
        if not holds:
            raise ConfigError(f"trainer: {says}.")


def steps_per_iteration(layout: TrainerSection) -> int:
    """Optimizer steps of one iteration."""
    return layout.ppo_epochs * layout.train_batch_size // layout.mini_batch_size
