"""The fixed data of a controller: its run, its node, its addresses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from yatt.adapters.node_local.local_folder import new_name
from yatt.adapters.slurm.requeue import Requeue
from yatt.config.schema import RunConfig
from yatt.core.gpus.placement import Placement, Slab
from yatt.core.requests.peer_name import peer_name
from yatt.paths import LOCAL_SOCKET, RunPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One controller's fixed data. `host` is the address that other nodes connect to.

    `devices` are its GPUs' names in CUDA_VISIBLE_DEVICES, by local index, empty without GPUs; `cpus` are the
    CPUs near each of them, empty if workers are not bound. `absent` are the nodes that take no part in this
    attempt. `requeue` is set only on Slurm.
    """

    config: RunConfig
    paths: RunPaths
    placement: Placement
    attempt: int
    index: int
    host: str
    device: str
    devices: tuple[str, ...] = ()
    cpus: tuple[frozenset[int], ...] = ()
    absent: frozenset[int] = frozenset()
    requeue: Requeue | None = None
    life: int = 1
    """Counts the processes of this node's controller in this attempt."""

    config_hash: str = ""
    """Hash of the config in the run folder; `config` may name copies on this node's disk."""

    samples_hash: str = ""
    """The same of its parts that decide about samples and scores (`yatt.config.load.samples_hash`)."""

    inputs: Mapping[str, str] = field(default_factory=dict)
    """Digests of the run's inputs at the start of this attempt (`yatt.core.attempts.inputs`)."""

    local_name: str = field(default_factory=new_name)
    """Name of its node-local folders; random, so that other users cannot guess it."""

    @property
    def name(self) -> str:
        """The node's name in logs, and in messages to its workers."""
        return f"node{self.index}"

    @property
    def identity(self) -> str:
        """The name of this process in messages between controllers."""
        return peer_name(self.index, self.life)

    @property
    def is_newcomer(self) -> bool:
        """Whether this process joins an attempt that has begun."""
        return self.life > 1

    @property
    def is_leader(self) -> bool:
        """Whether this controller drives the iterations."""
        return self.index == 0

    @property
    def is_trainer_node(self) -> bool:
        """Whether this node has trainer ranks, and so a data shard and a part of the state."""
        return self.index in self.placement.trainer_nodes

    @property
    def present(self) -> frozenset[int]:
        """Every node that takes part from the start."""
        return frozenset(range(self.config.launch.nodes)) - self.absent

    @property
    def slabs(self) -> tuple[Slab, ...]:
        """This node's slabs."""
        return self.placement.slabs_by_node[self.index]

    @property
    def scratch(self) -> Path:
        """Node-local folder of this attempt, for sockets."""
        return Path(self.config.launch.scratch_dir) / self.local_name

    @property
    def endpoint(self) -> str:
        """Address of the controller for this node's workers."""
        return f"ipc://{self.scratch}/{LOCAL_SOCKET}"

    @property
    def weights_root(self) -> Path:
        """Node-local memory folder for published weights."""
        return Path(self.config.launch.shm_dir) / f"{self.local_name}-weights"

    @property
    def media_folder(self) -> Path:
        """Node-local memory folder for prepared media."""
        return self.weights_root / "media"

    def weights_folder(self, policy_version: int) -> Path:
        """Returns the folder of one published policy version."""
        return self.weights_root / f"v{policy_version}"
