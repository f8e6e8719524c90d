"""Refusals of layouts that cannot be or do not fit, with the nearest one that does.

A near layout has few changes: a doubled or halved size counts as one; recomputation, smaller micro-batches
and a critic that takes turns with the policy as less. Layouts are tried in this order, and the first that
fits is taken.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from yatt.adapters.inputs.model_family import critic_of_run
from yatt.config.schema import RunConfig, TrainerSection
from yatt.config.sizes import num_trainer_nodes
from yatt.core.gpus.placement import ROLLOUT
from yatt.errors import ConfigError, Finding
from yatt.forecast.memory.fit import GPU_BYTES, MemoryPlan, memory_faults, room_of
from yatt.forecast.memory.parameters import table_of
from yatt.forecast.memory.trainer import (
    TrainerDemand,
    critic_table,
    longest_sample,
    trainer_demand,
    trainer_memory,
    worst_stage,
)
from yatt.models.model import Model
from yatt.models.shape import Shape
from yatt.trainer.mcore.layout import check_layout

MOST_TIMES_NODES = 64
RECOMPUTE_COST, SWAP_COST, TOKENS_COST = 0.5, 0.4, 0.25
"""In doublings."""

SIZE_COSTS = {
    "tensor_model_parallel_size": 1.0,
    "expert_model_parallel_size": 1.0,
    "context_parallel_size": 1.25,  # keys and values of the whole sequence travel in every layer
    "pipeline_model_parallel_size": 1.5,  # stages are idle at the ends of a mini-batch
}
"""Of a doubling."""

KEYS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "router_replay",
    "recompute",
    "max_tokens_per_micro_batch",
)


@dataclass(frozen=True, slots=True)
class NearLayout:
    """A layout that fits, and the number of nodes for it."""

    config: RunConfig
    changes: tuple[str, ...]
    """Settings that make the run's config this one, as on a command line."""


def nearest_layout(config: RunConfig, model: Model, room: int) -> NearLayout | None:
    """The nearest layout that fits; None if there is none with up to 64 times the nodes.

    Args:
        room: bytes of a GPU for the trainer's peak.
    """
    times, parameters, critic = 1, table_of(model, config.vision.train), critic_table(config)
    shapes = (model.shape, *(() if critic is None else critic[:1]))
    while times <= MOST_TIMES_NODES:
        wider = _with_nodes(config, times)
        for found in _candidates(wider, shapes):
            if _fits(trainer_demand(found, model.shape, parameters, critic), room):
                return NearLayout(found, _changes(config, found))
        times *= 2
    return None


def _with_nodes(config: RunConfig, times: int) -> RunConfig:
    """The run with more nodes that train."""
    if times == 1:
        return config
    more, place = (times - 1) * num_trainer_nodes(config), config.placement
    launch = replace(config.launch, nodes=config.launch.nodes + more)
    if place.mode == "disaggregated":
        place = replace(place, trainer_nodes=place.trainer_nodes + more)
    return replace(config, launch=launch, placement=place)


def _candidates(config: RunConfig, shapes: Sequence[Shape]) -> list[RunConfig]:
    """Layouts that are possible for policy and critic, the nearest first."""
    world = num_trainer_nodes(config) * config.launch.gpus_per_node
    found = list[tuple[float, int, RunConfig]]()
    swaps = (False, True) if config.has_critic and not config.critic.swap else (config.critic.swap,)
    for number, section in enumerate(_sections(config, shapes[0], world)):
        try:
            for shape in shapes:
                check_layout(shape, section, world)
        except ConfigError:
            continue
        distance = _distance(config.trainer, section)
        for swap in swaps:
            cost = SWAP_COST * (swap != config.critic.swap)
            candidate = replace(config, trainer=section, critic=replace(config.critic, swap=swap))
            found.append((distance + cost, number, candidate))
    return [candidate for _, _, candidate in sorted(found, key=lambda each: each[:2])]


def _sections(config: RunConfig, shape: Shape, world: int) -> Iterator[TrainerSection]:
    now, experts = config.trainer, shape.experts
    divisors = [size for size in range(1, world + 1) if world % size == 0]
    tps = [size for size in divisors if size <= config.launch.gpus_per_node]
    eps = [size for size in divisors if experts and experts.num_experts % size == 0] or [1]
    tokens = sorted({now.max_tokens_per_micro_batch, longest_sample(config)}, reverse=True)
    recomputed = dict.fromkeys((now.recompute, "none", "full"))
    for tp, pp, cp in itertools.product(tps, divisors, divisors):
        if world % (tp * pp * cp) or pp > shape.num_layers:
            continue
        for ep, recompute, most in itertools.product(eps, recomputed, tokens):
            yield replace(
                now,
                router_replay=now.router_replay and experts is not None,
                expert_tensor_parallel_size=_expert_tp(now, ep) if experts else 0,
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=_interleaving(now, pp),
                context_parallel_size=cp,
                expert_model_parallel_size=ep,
                sequence_parallel=tp > 1 and (now.sequence_parallel or tp != now.tensor_model_parallel_size),
                recompute=recompute,
                recompute_layers=now.recompute_layers if recompute == now.recompute else 0,
                recompute_modules=now.recompute_modules if recompute == now.recompute else (),
                max_tokens_per_micro_batch=most,
            )


def _expert_tp(now: TrainerSection, ep: int) -> int:
    """With EP as it is now, else whole experts; without EP it has no effect."""
    same = ep == now.expert_model_parallel_size
    return now.expert_tensor_parallel_size if same else int(ep > 1)


def _interleaving(now: TrainerSection, pp: int) -> int:
    same = pp == now.pipeline_model_parallel_size
    return now.virtual_pipeline_model_parallel_size if same else 1


def _distance(now: TrainerSection, other: TrainerSection) -> float:
    """How much is changed, in doublings."""
    total = sum(
        cost * abs(math.log2(getattr(other, key) / getattr(now, key))) for key, cost in SIZE_COSTS.items()
    )
    if other.max_tokens_per_micro_batch != now.max_tokens_per_micro_batch:
        total += TOKENS_COST
    return total + (RECOMPUTE_COST if other.recompute != now.recompute else 0.0)


def _fits(demand: TrainerDemand, room: int) -> bool:
    """Whether the first two stages and the last fit; those between are like the second."""
    pp = demand.layout.pp
    stages = sorted({0, min(1, pp - 1), pp - 1})
    return worst_stage(trainer_memory(demand, stages)).peak <= room


def _changes(before: RunConfig, after: RunConfig) -> tuple[str, ...]:
    """Keys whose values differ, with their new values."""
    found = []
    if before.launch.nodes != after.launch.nodes:
        found.append(f"launch.nodes={after.launch.nodes}")
    if before.placement.trainer_nodes != after.placement.trainer_nodes:
        found.append(f"placement.trainer_nodes={after.placement.trainer_nodes}")
    if before.critic.swap != after.critic.swap:
        found.append(f"critic.swap={str(after.critic.swap).lower()}")
    for key in KEYS:
        value = getattr(after.trainer, key)
        if value != getattr(before.trainer, key):
            found.append(f"trainer.{key}={str(value).lower()}")
    return tuple(found)


def check_possible(config: RunConfig, model: Model, gpu_bytes: int = GPU_BYTES) -> None:
    """Refuses a layout that is impossible for policy or critic, like `check_layout`, with the nearest that is
    possible and fits.

    Raises:
        ConfigError: names the keys, the sizes that do not fit, and the nearest layout.
    """
    critic, world = critic_of_run(config), num_trainer_nodes(config) * config.launch.gpus_per_node
    for key, each in (("", model), ("critic.path", critic)):
        try:
            if each is not None:
                check_layout(each.shape, config.trainer, world)
        except ConfigError as error:
            if not model.shape.layers or not model.shape.is_regular:
                raise
            *others, last = error.about(key).findings
            advised = replace(last, cure=nearest_in_words(config, model, gpu_bytes))
            raise ConfigError(findings=[*others, advised]) from error


def plan_faults(
    config: RunConfig, models: Mapping[str, Model], plan: MemoryPlan, host_bytes: int = 0, shm_bytes: int = 0
) -> list[Finding]:
    """What of a plan does not fit, with the nearest layout of the trainer that fits.

    Args:
        host_bytes, shm_bytes: see memory_faults.
    """
    faults = list(memory_faults(plan, host_bytes, shm_bytes))
    if plan.trainer_fits:
        return faults
    advice = nearest_in_words(config, models[ROLLOUT], plan.gpu_bytes)
    has_scores = config.model.spec == "torch" and config.model.dtype != "bfloat16"
    if has_scores and config.trainer.context_parallel_size > 1:
        advice += " In bfloat16 the scores of context-parallel attention are not kept in memory."
    return [replace(fault, cure=advice) if fault.key == "trainer" else fault for fault in faults]


def nearest_in_words(config: RunConfig, model: Model, gpu_bytes: int) -> str:
    """A sentence with the settings of the nearest layout that fits."""
    found = nearest_layout(config, model, room_of(config, gpu_bytes))
    if found is None:
        return "No layout fits, also not with 64 times the nodes."
    return f"The nearest layout in which the trainer fits: {' '.join(found.changes)}."
