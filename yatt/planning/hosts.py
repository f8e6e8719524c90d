"""Bytes of host memory of a node: host copies of trainer ranks, GenRMs that sleep, processes."""

from collections.abc import Sequence
from dataclasses import dataclass

from yatt.adapters.host_segment import aligned
from yatt.config.schema import RunConfig
from yatt.config.sizes import engine_node_gpus, slab_gpus
from yatt.control.gpus.unfit import PROCESS_BYTES
from yatt.core.placement import ROLLOUT
from yatt.planning.engines import EngineMemory
from yatt.planning.trainer import TrainerMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes of one node.

    Args:
        kind: `trainer` or `engine` node; in colocated and partial placement all nodes are trainer nodes.
        weights: host copies of parameters, which engines load; of engine nodes, what they fetch.
        optimizer: host copies of main copies and moments.
        reference: host copies of the reference model.
        genrms: weights of GenRMs that sleep.
        processes: beside these.
    """

    kind: str
    weights: int
    optimizer: int
    reference: int
    genrms: int
    processes: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.optimizer + self.reference + self.genrms + self.processes


def host_memory(
    config: RunConfig, trainer: TrainerMemory, engines: Sequence[EngineMemory]
) -> list[HostMemory]:
    """Memory of a node of each kind, of the node with most GenRMs."""
    gpus, is_split = config.launch.gpus_per_node, config.placement.mode == "disaggregated"
    copies = 2 if is_split and config.placement.send_changes and config.model.dtype == "bfloat16" else 1
    sleeping = 0 if is_split else _sleeping(engines, _genrm_gpus(config))
    num_engines = 0 if is_split else sum(max(gpus // engine.num_gpus, 1) for engine in engines)
    nodes = [
        HostMemory(
            kind="trainer",
            weights=gpus * aligned(trainer.weights) * copies,
            optimizer=gpus * aligned(trainer.optimizer),
            reference=gpus * trainer.reference,
            genrms=sleeping,
            processes=PROCESS_BYTES * (gpus + num_engines),
        )
    ]
    if is_split:
        gpus = engine_node_gpus(config)
        fetched = [engine.model_bytes for engine in engines if engine.role == ROLLOUT]
        nodes.append(
            HostMemory(
                kind="engine",
                weights=sum(fetched),
                optimizer=0,
                reference=0,
                genrms=_sleeping(engines, gpus) if config.placement.split == "dynamic" else 0,
                processes=PROCESS_BYTES * gpus,
            )
        )
    return nodes


def _genrm_gpus(config: RunConfig) -> int:
    """GPUs of a node on which GenRMs may sleep: all, or those of the GenRMs' slabs if these do not move."""
    place, gpus = config.placement, config.launch.gpus_per_node
    if place.mode == "partial" and place.split == "fixed":
        return min(gpus, place.genrm_slabs * slab_gpus(config))
    return gpus


def _sleeping(engines: Sequence[EngineMemory], gpus: int) -> int:
    """GenRMs keep their weights on the host while they sleep; rollout engines drop theirs."""
    return sum(gpus * engine.weights for engine in engines if engine.role != ROLLOUT)
