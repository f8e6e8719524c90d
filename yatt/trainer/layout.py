"""Checks that parallel sizes divide the model and the ranks. No torch, so that any process can use it."""

import math
from collections.abc import Iterator

from yatt.config.schema import TrainerSection
from yatt.errors import ConfigError
from yatt.weights.shape import ModelShape


def check_layout(shape: ModelShape, layout: TrainerSection, world_size: int) -> None:
    """Refuses impossible layouts before anything is built.

    Raises:
        ConfigError: names the keys, the sizes that do not fit, and the fix; one line per fault.
    """
    faults = [*_parallel_faults(shape, layout), *_size_faults(layout, world_size)]
    if faults:
        raise ConfigError("\n".join(f"trainer.{fault}" for fault in faults))


def _parallel_faults(shape: ModelShape, layout: TrainerSection) -> Iterator[str]:
    """Faults of tensor parallelism, which splits heads and the FFN, and of pipelines, which split layers."""
    tp = layout.tensor_model_parallel_size
    fits = math.gcd(shape.num_heads, shape.num_kv_heads, shape.ffn_size)
    cut = (
        (shape.num_heads, "heads"),
        (shape.num_kv_heads, "key/value heads"),
        (shape.ffn_size, "FFN columns"),
    )
    for size, called in cut:
        if size % tp:
            yield (
                f"tensor_model_parallel_size {tp} does not divide {size} {called} of the model; write one of "
                f"{_divisors(fits)}."
            )
    pp, vpp = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    if shape.num_layers % (pp * vpp):
        yield (
            f"pipeline_model_parallel_size: {shape.num_layers} layers do not divide into PP {pp} x VPP {vpp}"
            f"; let the product be one of {_divisors(shape.num_layers)}."
        )
    if vpp > 1 and pp == 1:
        yield (
            "virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size above 1; write 1, or "
            "raise that."
        )
    if layout.expert_model_parallel_size != 1:
        yield "expert_model_parallel_size must be 1: the model is dense."


def _size_faults(layout: TrainerSection, world_size: int) -> Iterator[str]:
    tp, pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    cp = layout.context_parallel_size
    if world_size % (tp * pp * cp):
        yield (
            f"tensor_model_parallel_size: {world_size} ranks are no multiple of TP {tp} x PP {pp} x CP {cp}; "
            "change a size, or the number of GPUs that train."
        )


def _divisors(number: int, most: int = 64) -> str:
    return ", ".join(str(size) for size in range(1, min(number, most) + 1) if number % size == 0)


def steps_per_iteration(layout: TrainerSection) -> int:
    """Optimizer steps of one iteration."""
    return layout.ppo_epochs * layout.train_batch_size // layout.mini_batch_size
