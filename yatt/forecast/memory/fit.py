"""The plan of a run: memory of every kind of GPU and node, and what does not fit."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from yatt.adapters.node_local.host_segment import aligned_size
from yatt.config.schema import RunConfig
from yatt.config.sizes import engine_node_gpus, num_trainer_nodes, slab_gpus
from yatt.control.gpus.unfit import PROCESS_BYTES
from yatt.core.gpus.placement import ROLLOUT, placement_of
from yatt.errors import Finding, mistake_in
from yatt.forecast.memory.engines import SLEEPING_BYTES, EngineMemory, engine_memory
from yatt.forecast.memory.fetching import slice_sizes
from yatt.forecast.memory.parameters import table_of
from yatt.forecast.memory.ranks import planned_layout
from yatt.forecast.memory.trainer import (
    OtherModels,
    TrainerMemory,
    critic_table,
    trainer_demand,
    trainer_memory,
    worst_stage,
)
from yatt.models.model import Model

GIB = 1 << 30
GPU_BYTES = 80 * GIB
PROCESS_GPU_BYTES = 2 * GIB
"""Context and NCCL's buffers of a trainer rank; assumed."""

ROOM = 0.95
"""Share of a GPU that the parts may fill; the rest is lost to fragmentation. Assumed."""

"""A key, and what does not fit with what to write."""


@dataclass(frozen=True, slots=True)
class OtherCopies:
    """Bytes of the reference model, and of the critic's parameters and its optimizer's state."""

    reference: int = 0
    critic: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes of one node.

    Args:
        kind: `trainer` or `engine` node; in colocated and partial placement all nodes are trainer nodes.
        weights: host copies of parameters, which engines load.
        optimizer: host copies of main copies and moments.
        others: host copies of models beside the policy.
        fetched: weights of other nodes' ranks, without which the node's engines have not all that they need.
        unknown: of these, tensors of which an engine over several nodes has slices, but not known which, so
            that each node fetches all of them.
        given: the former version of the weights that other nodes fetch (`placement.send_changes`).
        genrms: weights of GenRMs that sleep.
        media: prepared pictures, if the run file says how much.
        processes: beside these; on a trainer node with teachers' likeliest tokens, see `likeliest_bytes`.
    """

    kind: str
    weights: int = 0
    optimizer: int = 0
    others: OtherCopies = OtherCopies()
    fetched: int = 0
    unknown: int = 0
    given: int = 0
    genrms: int = 0
    media: int = 0
    processes: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        kept = self.weights + self.optimizer + self.others.reference + self.others.critic
        return kept + self.fetched + self.given + self.genrms + self.media + self.processes

    @property
    def in_shm(self) -> int:
        """Of these, what is in the memory filesystem (`launch.shm_dir`)."""
        return self.weights + self.optimizer + self.others.critic + self.fetched + self.media


def host_memory(
    config: RunConfig, stages: Sequence[TrainerMemory], engines: Sequence[EngineMemory], policy: Model
) -> list[HostMemory]:
    """Memory of a node of each kind, of the node that needs most of each part.

    Args:
        stages: the trainer's memory, of every pipeline stage.
    """
    gpus, is_split = config.launch.gpus_per_node, config.placement.mode == "disaggregated"
    exchanged = exchanged_weights(config, stages, policy)
    fetched, given = max(exchanged.fetched.values(), default=0), max(exchanged.given.values(), default=0)
    unknown, media = max(exchanged.unknown.values(), default=0), config.media.cache_bytes
    num_engines = 0 if is_split else sum(max(gpus // engine.num_gpus, 1) for engine in engines)
    trainer = HostMemory(
        kind="trainer",
        weights=gpus * max(aligned_size(stage.weights) for stage in stages),
        optimizer=gpus * max(aligned_size(stage.optimizer) for stage in stages),
        others=OtherCopies(
            gpus * max(stage.others.reference for stage in stages),
            gpus * max(_critic_copies(stage.others) for stage in stages),
        ),
        fetched=0 if is_split else fetched,
        unknown=0 if is_split else unknown,
        given=given,
        media=media,
        genrms=0 if is_split else _sleeping(engines, _genrm_gpus(config)),
        processes=PROCESS_BYTES * (gpus + num_engines) + likeliest_bytes(config),
    )
    if not is_split:
        return [trainer]
    gpus = engine_node_gpus(config)
    engine = HostMemory(
        kind="engine",
        fetched=fetched,
        unknown=unknown,
        media=media,
        genrms=_sleeping(engines, gpus) if config.placement.split == "dynamic" else 0,
        processes=PROCESS_BYTES * gpus,
    )
    return [trainer, engine]


def likeliest_bytes(config: RunConfig) -> int:
    """Bytes of teachers' likeliest tokens (`genrms[].top_k`) on a trainer node, if all completions of a batch
    are of the maximum length: the controller has its groups' and sends them on; each rank of a model copy has
    all of that copy's, as they come, as they are shared, and in micro-batches."""
    section, nodes = config.trainer, num_trainer_nodes(config)
    gpus, whole = config.launch.gpus_per_node, 8 * config.top_k * config.rollout.max_response_tokens
    whole *= section.train_batch_size * config.rollout.n
    layout = planned_layout(section, nodes * gpus)
    return 2 * whole // nodes + 3 * gpus * whole // max(layout.dp, 1)


def _critic_copies(others: OtherModels) -> int:
    return aligned_size(others.critic_weights) + aligned_size(others.critic_optimizer)


@dataclass(frozen=True, slots=True)
class ExchangedWeights:
    """Bytes of weights that go from node to node, by node.

    Args:
        fetched: what a node has fetched when it has a version.
        unknown: of these, see HostMemory.
        given: the former versions that a node keeps to send changes.
    """

    fetched: Counter[int]
    unknown: Counter[int]
    given: Counter[int]


def exchanged_weights(config: RunConfig, stages: Sequence[TrainerMemory], policy: Model) -> ExchangedWeights:
    """Bytes that each node fetches and gives: slices exactly, whole segments without their padding."""
    placement, section = placement_of(config), config.trainer
    per_stage, whole = placement.world_size // section.pipeline_model_parallel_size, section.whole_stage
    sizes, found = slice_sizes(config, policy), ExchangedWeights(Counter(), Counter(), Counter())
    keeps_former = config.placement.send_changes and config.model.dtype == "bfloat16"
    chains = placement.weight_chains(whole, section.pipeline_model_parallel_size, in_parts=sizes is not None)
    for (rank, part), nodes in chains.items():
        stage, place = divmod(rank, per_stage)
        if sizes is None:
            size, unknown = aligned_size(stages[stage].weights), 0
        else:
            at = stage, place % whole, part
            size, unknown = sizes.total[at], sizes.unknown[at]
        found.given[placement.node_of(rank)] += size if keeps_former else 0
        for node in nodes:
            found.fetched[node] += size
            found.unknown[node] += unknown
    return found


def _genrm_gpus(config: RunConfig) -> int:
    """GPUs of a node on which GenRMs may sleep: all, or those of the GenRMs' slabs if these do not move."""
    place, gpus = config.placement, config.launch.gpus_per_node
    if place.mode == "partial" and place.split == "fixed":
        return min(gpus, place.genrm_gpu_sets * slab_gpus(config))
    return gpus


def _sleeping(engines: Sequence[EngineMemory], gpus: int) -> int:
    """GenRMs keep their weights on the host while they sleep; rollout engines drop theirs."""
    return sum(gpus * engine.weights for engine in engines if engine.role != ROLLOUT)


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
    if config.is_given:
        return 0
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
    policy = models[ROLLOUT]
    table = table_of(policy, config.vision.train)
    stages = trainer_memory(trainer_demand(config, policy.shape, table, critic_table(config)))
    sleeping = num_sleeping(config)
    engines = engine_memory(config, models, gpu_bytes, num_sleeping=sleeping)
    return MemoryPlan(
        gpu_bytes=gpu_bytes,
        trainer=tuple(stages),
        other=other_bytes(config),
        engines=tuple(engines),
        hosts=tuple(host_memory(config, stages, engines, policy)),
    )


def memory_faults(plan: MemoryPlan, host_bytes: int = 0, shm_bytes: int = 0) -> Iterator[Finding]:
    """Yields what does not fit.

    Args:
        host_bytes: host memory of a node; 0: not known.
        shm_bytes: size of a node's memory filesystem; 0: half of its memory, as Linux makes it.
    """
    if not plan.trainer_fits:
        yield mistake_in(
            "trainer",
            f"training needs {_gib(plan.trainer_peak)} of each GPU of pipeline stage {plan.worst.stage}; "
            f"{_gib(plan.room)} of {_gib(plan.gpu_bytes)} can be used.",
        )
    for engine in plan.engines:
        yield from _engine_faults(engine, plan.gpu_bytes)
    for host in plan.hosts:
        if host_bytes and host.total > host_bytes:
            yield mistake_in(
                "launch.nodes",
                f"each {host.kind} node needs {_gib(host.total)} of host memory, and has {_gib(host_bytes)}; "
                "more nodes have less of the optimizer each.",
            )
        if (has := shm_bytes or host_bytes // 2) and host.in_shm > has:
            yield mistake_in(
                "launch.shm_dir", " ".join(shm_fault(f"each {host.kind} node", host.in_shm, has))
            )


def shm_fault(where: str, held: int, has: int, which: str = "which") -> tuple[str, str]:
    """Two sentences about a memory filesystem that is too small: what is wrong, and what to do."""
    what = (
        f"{where} holds {_gib(held)} of weights, optimizer state and prepared pictures in its memory "
        f"filesystem, {which} has {_gib(has)}."
    )
    cure = (
        "Make it larger (mount -o remount,size=...), name a larger one, or use more nodes, which have less "
        "of the optimizer each."
    )
    return what, cure


def _engine_faults(engine: EngineMemory, gpu_bytes: int) -> Iterator[Finding]:
    if engine.num_sequences < 1:
        needed = engine.weights + engine.other - engine.logits + int(engine.kv.of_tokens(engine.longest))
        yield mistake_in(
            f"{engine.key}.tp_size",
            f"{engine.num_gpus}: weights, and a KV cache for one sequence of {engine.longest} tokens, need "
            f"{_gib(needed)} of each GPU; the engine may use {_gib(engine.limit)}. Write a larger tp_size, "
            "or a larger gpu_memory_utilization or kv_cache_bytes.",
        )
    elif engine.peak > gpu_bytes and engine.logits:
        yield mistake_in(
            f"{engine.key}.engine_args",
            f"a teacher's logits need {_gib(engine.logits)} beside what gpu_memory_utilization counts; "
            f"together that is {_gib(engine.peak)} of {_gib(gpu_bytes)}. Write a smaller "
            "max_num_batched_tokens (longer texts are read in parts), or a smaller gpu_memory_utilization.",
        )
    elif engine.peak > gpu_bytes:
        yield mistake_in(
            f"{engine.key}.kv_cache_bytes",
            f"weights, KV cache and what else is on the GPU need {_gib(engine.peak)} of {_gib(gpu_bytes)}; "
            "write a smaller one, or a smaller gpu_memory_utilization.",
        )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
