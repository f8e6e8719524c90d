"""The plan of a run: memory of every kind of GPU and node, and what does not fit."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from yatt.config.schema import RunConfig
from yatt.core.placement import ROLLOUT
from yatt.models.model import Model
from yatt.planning.engines import SLEEPING_BYTES, EngineMemory, engine_memory
from yatt.planning.hosts import HostMemory, host_memory
from yatt.planning.parameters import table_of
from yatt.planning.trainer import TrainerMemory, demand_of, trainer_memory, worst_stage

GIB = 1 << 30
GPU_BYTES = 80 * GIB
PROCESS_GPU_BYTES = 2 * GIB
"""Context and NCCL's buffers of a trainer rank; assumed."""

ROOM = 0.95
"""Share of a GPU that the parts may fill; the rest is lost to fragmentation. Assumed."""

Fault = tuple[str, str]
"""A key, and what does not fit with what to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes that a run needs.

    Args:
        trainer: one for each pipeline stage.
        other: of the process and of the workers that sleep, on a GPU while it trains.
    """

    gpu_bytes: int
    trainer: tuple[TrainerMemory, ...]
    other: int
    engines: tuple[EngineMemory, ...]
    hosts: tuple[HostMemory, ...]

    @property
    def worst(self) -> TrainerMemory:
        """The pipeline stage that needs most."""
        return worst_stage(self.trainer)

    @property
    def trainer_peak(self) -> int:
        """Bytes of a GPU of that stage."""
        return self.worst.peak + self.other

    @property
    def room(self) -> int:
        """Bytes of a GPU that may be filled."""
        return int(ROOM * self.gpu_bytes)

    @property
    def trainer_fits(self) -> bool:
        """Whether every stage fits."""
        return self.trainer_peak <= self.room


def num_sleeping(config: RunConfig) -> int:
    """Workers of other roles that sleep on a GPU that a worker uses."""
    if config.placement.mode == "disaggregated" and config.placement.split == "fixed":
        return 0
    has_one_role = config.placement.mode == "partial" and config.placement.split == "fixed"
    return 1 if has_one_role else 1 + len(config.engine_genrms)


def other_bytes(config: RunConfig) -> int:
    """Bytes of a GPU that trains beside what the trainer itself needs."""
    is_split = config.placement.mode == "disaggregated"
    return PROCESS_GPU_BYTES + (0 if is_split else num_sleeping(config) * SLEEPING_BYTES)


def room_of(config: RunConfig, gpu_bytes: int) -> int:
    """Bytes of a GPU for what the trainer itself needs."""
    return int(ROOM * gpu_bytes) - other_bytes(config)


def memory_plan(config: RunConfig, models: Mapping[str, Model], gpu_bytes: int = GPU_BYTES) -> MemoryPlan:
    """The memory plan of a run whose layout was checked.

    Args:
        models: by role; a GenRM whose model is unknown is left out.
    """
    stages = trainer_memory(demand_of(config, models[ROLLOUT].shape, table_of(models[ROLLOUT])))
    sleeping = num_sleeping(config)
    engines = engine_memory(config, models, gpu_bytes, num_sleeping=sleeping)
    return MemoryPlan(
        gpu_bytes=gpu_bytes,
        trainer=tuple(stages),
        other=other_bytes(config),
        engines=tuple(engines),
        hosts=tuple(host_memory(config, stages, engines)),
    )


def memory_faults(plan: MemoryPlan, host_bytes: int = 0) -> Iterator[Fault]:
    """Yields what does not fit.

    Args:
        host_bytes: host memory of a node; 0: not known.
    """
    if not plan.trainer_fits:
        yield (
            "trainer",
            f"training needs {_gib(plan.trainer_peak)} of each GPU of pipeline stage {plan.worst.stage}; "
            f"{_gib(plan.room)} of {_gib(plan.gpu_bytes)} can be used.",
        )
    for engine in plan.engines:
        yield from _engine_faults(engine, plan.gpu_bytes)
    for host in plan.hosts:
        if host_bytes and host.total > host_bytes:
            yield (
                "launch.nodes",
                f"each {host.kind} node needs {_gib(host.total)} of host memory, and has {_gib(host_bytes)}; "
                "more nodes have less of the optimizer each.",
            )


def _engine_faults(engine: EngineMemory, gpu_bytes: int) -> Iterator[Fault]:
    if engine.num_sequences < 1:
        needed = engine.weights + engine.other + engine.longest * engine.kv_token_bytes
        yield (
            f"{engine.key}.tp_size",
            f"{engine.num_gpus}: weights, and a KV cache for one sequence of {engine.longest} tokens, need "
            f"{_gib(needed)} of each GPU; the engine may use {_gib(engine.limit)}. Write a larger tp_size, "
            "or a larger gpu_memory_utilization or kv_cache_bytes.",
        )
    elif engine.peak > gpu_bytes:
        yield (
            f"{engine.key}.kv_cache_bytes",
            f"weights, KV cache and what else is on the GPU need {_gib(engine.peak)} of {_gib(gpu_bytes)}; "
            "write a smaller one, or a smaller gpu_memory_utilization.",
        )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
