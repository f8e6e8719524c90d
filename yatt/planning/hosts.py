"""Bytes of host memory of a node: host copies of trainer ranks, GenRMs that sleep, processes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from yatt.adapters.host_segment import aligned
from yatt.config.schema import RunConfig
from yatt.config.sizes import engine_node_gpus, slab_gpus
from yatt.control.gpus.unfit import PROCESS_BYTES
from yatt.core.placement import ROLLOUT, place
from yatt.planning.engines import EngineMemory
from yatt.planning.trainer import TrainerMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes of one node.

    Args:
        kind: `trainer` or `engine` node; in colocated and partial placement all nodes are trainer nodes.
        weights: host copies of parameters, which engines load.
        optimizer: host copies of main copies and moments.
        reference: host copies of the reference model.
        fetched: weights of other nodes' ranks, without which the node's engines have not the whole model.
        given: the former version of the weights that other nodes fetch (`placement.send_changes`).
        genrms: weights of GenRMs that sleep.
        processes: beside these.
    """

    kind: str
    weights: int = 0
    optimizer: int = 0
    reference: int = 0
    fetched: int = 0
    given: int = 0
    genrms: int = 0
    processes: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        kept = self.weights + self.optimizer + self.reference
        return kept + self.fetched + self.given + self.genrms + self.processes


def host_memory(
    config: RunConfig, stages: Sequence[TrainerMemory], engines: Sequence[EngineMemory]
) -> list[HostMemory]:
    """Memory of a node of each kind, of the node that needs most of each part.

    Args:
        stages: the trainer's memory, of every pipeline stage.
    """
    gpus, is_split = config.launch.gpus_per_node, config.placement.mode == "disaggregated"
    fetched, given = _exchanged(config, stages)
    num_engines = 0 if is_split else sum(max(gpus // engine.num_gpus, 1) for engine in engines)
    trainer = HostMemory(
        kind="trainer",
        weights=gpus * max(aligned(stage.weights) for stage in stages),
        optimizer=gpus * max(aligned(stage.optimizer) for stage in stages),
        reference=gpus * max(stage.reference for stage in stages),
        fetched=0 if is_split else fetched,
        given=given,
        genrms=0 if is_split else _sleeping(engines, _genrm_gpus(config)),
        processes=PROCESS_BYTES * (gpus + num_engines),
    )
    if not is_split:
        return [trainer]
    gpus = engine_node_gpus(config)
    engine = HostMemory(
        kind="engine",
        fetched=fetched,
        genrms=_sleeping(engines, gpus) if config.placement.split == "dynamic" else 0,
        processes=PROCESS_BYTES * gpus,
    )
    return [trainer, engine]


def _exchanged(config: RunConfig, stages: Sequence[TrainerMemory]) -> tuple[int, int]:
    """Bytes that a node fetches, and bytes that it gives, at most."""
    placement, section = place(config), config.trainer
    per_stage = placement.world_size // section.pipeline_model_parallel_size
    chains = placement.weight_chains(section.whole_stage, section.pipeline_model_parallel_size)
    fetched, given = Counter[int](), Counter[int]()
    for rank, nodes in chains.items():
        size = aligned(stages[rank // per_stage].weights)
        given[placement.node_of(rank)] += size
        for node in nodes:
            fetched[node] += size
    keeps_former = config.placement.send_changes and config.model.dtype == "bfloat16"
    return max(fetched.values(), default=0), max(given.values(), default=0) if keeps_former else 0


def _genrm_gpus(config: RunConfig) -> int:
    """GPUs of a node on which GenRMs may sleep: all, or those of the GenRMs' slabs if these do not move."""
    place, gpus = config.placement, config.launch.gpus_per_node
    if place.mode == "partial" and place.split == "fixed":
        return min(gpus, place.genrm_slabs * slab_gpus(config))
    return gpus


def _sleeping(engines: Sequence[EngineMemory], gpus: int) -> int:
    """GenRMs keep their weights on the host while they sleep; rollout engines drop theirs."""
    return sum(gpus * engine.weights for engine in engines if engine.role != ROLLOUT)
