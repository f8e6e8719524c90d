"""What the backward pass computes again, as megatron-core's settings. No torch: any process can use it."""

from collections.abc import Iterator
from typing import Any

from yatt.config.sections.training import TrainerSection
from yatt.models.shape import DenseFeedForward, LatentAttention, Shape


def recompute_settings(layout: TrainerSection) -> dict[str, Any]:
    """megatron-core's settings. Its method `block` takes the first layers of a stage; `uniform` takes
    all of them."""
    if layout.recompute == "none":
        return {}
    if layout.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(layout.recompute_modules)}
    return {
        "recompute_granularity": "full",
        "recompute_method": "block" if layout.recompute_layers else "uniform",
        "recompute_num_layers": layout.recompute_layers or 1,
    }


def recompute_faults(shape: Shape, layout: TrainerSection) -> Iterator[str]:
    """Modules that are to be computed again and that the model does not have."""
    experts = shape.experts
    has = {
        "core_attn": True,
        "mlp": any(isinstance(layer.feed_forward, DenseFeedForward) for layer in shape.layers),
        "moe": experts is not None,
        "shared_experts": experts is not None and experts.shared_size > 0,
        "mla_up_proj": isinstance(shape.attention, LatentAttention),
    }
    known = [module for module, is_there in has.items() if is_there]
    for module in layout.recompute_modules:
        if not has[module]:
            yield f"recompute_modules: the model has no {module}; write some of {', '.join(known)}."
