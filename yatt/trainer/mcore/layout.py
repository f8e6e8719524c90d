"""Checks that parallel sizes divide the model and the ranks. No torch, so that any process can use it."""

import math
from collections.abc import Iterator

from yatt.config.schema import TrainerSection
from yatt.errors import ConfigError, Finding
from yatt.models.shape import LatentAttention, Shape
from yatt.trainer.mcore.recompute import recompute_faults


def end_stages(num_layers: int, layout: TrainerSection) -> tuple[int | None, int | None]:
    """Layers of the first and of the last pipeline stage if the layers do not divide; else None, None.

    The stages between have the same number; the ends, which also have embedding and head, have fewer or as
    many where possible.
    """
    pp = layout.pipeline_model_parallel_size
    if num_layers % pp == 0:
        return None, None
    for middle in (-(-num_layers // pp), num_layers // pp):
        rest = num_layers - middle * (pp - 2)
        if rest >= 2:
            return -(-rest // 2), rest // 2
    raise AssertionError(f"{num_layers} layers in {pp} stages")


def check_layout(shape: Shape, layout: TrainerSection, world_size: int) -> None:
    """Refuses impossible layouts before anything is built.

    Raises:
        ConfigError: names the keys, the sizes that do not fit, and the fix; one line per fault.
    """
    if not shape.layers or not shape.is_regular:
        raise ConfigError(
            "model.family: the model has no layers, or they differ in more than in whether they have "
            "experts or the one window; the trainer cannot build it."
        )
    faults = [
        *_parallel_faults(shape, layout),
        *_size_faults(layout, world_size),
        *recompute_faults(shape, layout),
        *_tower_faults(shape, layout),
    ]
    if faults:
        raise ConfigError(findings=[Finding(says=f"trainer.{fault}") for fault in faults])


def check_spec(shape: Shape, spec: str, key: str = "model.spec") -> None:
    """Refuses layers of Transformer Engine for a model that it has none for.

    Args:
        spec: `model.spec`.
        key: begins the sentence.

    Raises:
        ConfigError: so it is.
    """
    if spec == "te" and shape.needs_torch_spec:
        raise ConfigError(
            f"{key}: Transformer Engine's layers have no norm over all heads, none after a half of a layer, "
            "and no YaRN in some layers only, of which this model has some; write auto or torch."
        )


def _tower_faults(shape: Shape, layout: TrainerSection) -> Iterator[str]:
    """Faults of a tower's levels, which layers of the first chunk of a pipeline add."""
    num_levels = len(shape.vision.levels) if shape.vision else 0
    pp, vpp = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    if pp == 1 or not num_levels or shape.num_layers < pp:  # fewer layers than stages: told elsewhere
        return
    first = end_stages(shape.num_layers, layout)[0] or shape.num_layers // pp
    if first // vpp < num_levels:
        yield (
            f"pipeline_model_parallel_size {pp}: the first stage has {first // vpp} layers, but {num_levels} "
            "add features of pictures; write fewer stages."
        )


def _parallel_faults(shape: Shape, layout: TrainerSection) -> Iterator[str]:
    """Faults of tensor parallelism, which splits heads and the FFN, and of pipelines, which split layers."""
    tp = layout.tensor_model_parallel_size
    cut = _cut_sizes(shape)
    fits = math.gcd(*(size for size, _ in cut))
    for size, called in cut:
        if size % tp:
            yield (
                f"tensor_model_parallel_size {tp} does not divide {size} {called} of the model; write one of "
                f"{_divisors(fits)}."
            )
    pp, vpp = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    if vpp > 1 and shape.num_layers % (pp * vpp):
        yield (
            f"pipeline_model_parallel_size: {shape.num_layers} layers do not divide into PP {pp} x VPP {vpp}"
            f"; let the product be one of {_divisors(shape.num_layers)}."
        )
    elif shape.num_layers < pp:
        yield (
            f"pipeline_model_parallel_size {pp} is more than the model's {shape.num_layers} layers; write at "
            "most that."
        )
    if vpp > 1 and pp == 1:
        yield (
            "virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size above 1; write 1, or "
            "raise that."
        )
    needs = {"experts": shape.experts, "latent attention": isinstance(shape.attention, LatentAttention)}
    if tp > 1 and not layout.sequence_parallel and any(needs.values()):
        named = next(kind for kind, has in needs.items() if has)
        yield (
            f"sequence_parallel: a model with {named} needs it with tensor_model_parallel_size above 1; "
            "write true."
        )
    yield from _expert_faults(shape, layout)


def _expert_faults(shape: Shape, layout: TrainerSection) -> Iterator[str]:
    """Faults of the ranks that share experts."""
    tp, ep, experts = layout.tensor_model_parallel_size, layout.expert_model_parallel_size, shape.experts
    expert_tp = layout.expert_tp_size
    if experts is None:
        for key in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            if getattr(layout, key) > 1:
                yield f"{key} {getattr(layout, key)}: the model is dense; remove it."
        if layout.router_replay:
            yield "router_replay: the model is dense; remove it."
        return
    if experts.num_experts % ep:
        yield (
            f"expert_model_parallel_size {ep} does not divide the {experts.num_experts} experts of a layer; "
            f"write one of {_divisors(experts.num_experts)}."
        )
    if experts.size % expert_tp:
        yield (
            f"{_key_of_expert_tp(layout)} {expert_tp} does not divide {experts.size} FFN columns of an "
            f"expert; write one of {_divisors(experts.size)}."
        )
    if ep == 1 and expert_tp != tp:
        yield (
            f"expert_tensor_parallel_size {expert_tp}: it can differ from tensor_model_parallel_size {tp} "
            "only if experts are spread over ranks; remove it, or raise expert_model_parallel_size."
        )


def _key_of_expert_tp(layout: TrainerSection) -> str:
    tensor = "tensor_model_parallel_size"
    return "expert_tensor_parallel_size" if layout.expert_tensor_parallel_size else tensor


def _cut_sizes(shape: Shape) -> list[tuple[int, str]]:
    """What tensor parallelism divides, with its name."""
    sizes = [(shape.attention.num_heads, "heads"), (shape.attention.num_kv_heads, "key/value heads")]
    if shape.dense is not None:
        sizes.append((shape.dense.size, "FFN columns"))
    if shape.experts is not None and shape.experts.shared_size:
        sizes.append((shape.experts.shared_size, "FFN columns of the shared expert"))
    return sizes


def _size_faults(layout: TrainerSection, world_size: int) -> Iterator[str]:
    tp, pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    cp = layout.context_parallel_size
    if world_size % (tp * pp * cp):
        yield (
            f"tensor_model_parallel_size: {world_size} ranks are no multiple of TP {tp} x PP {pp} x CP {cp}; "
            "change a size, or the number of GPUs that train."
        )
    expert_tp, ep = layout.expert_tp_size, layout.expert_model_parallel_size
    if ep > 1 and world_size % (expert_tp * ep * pp):
        yield (
            f"expert_model_parallel_size: {world_size} ranks are no multiple of expert TP {expert_tp} x EP "
            f"{ep} x PP {pp}; change a size, or write expert_tensor_parallel_size: 1."
        )


def _divisors(number: int, most: int = 64) -> str:
    return ", ".join(str(size) for size in range(1, min(number, most) + 1) if number % size == 0)


def steps_per_iteration(layout: TrainerSection) -> int:
    """Optimizer steps of one iteration."""
    return layout.ppo_epochs * layout.train_batch_size // layout.mini_batch_size
