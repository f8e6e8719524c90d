"""What a controller knows from the start: its run, its node, its addresses."""

from dataclasses import dataclass, field
from pathlib import Path

from yatt.adapters.local_folder import new_name
from yatt.adapters.requeue import Requeue
from yatt.config.schema import RunConfig
from yatt.core.placement import Placement, Slab
from yatt.paths import HUB, RunPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One controller's fixed facts. `host` is what other nodes dial.

    `devices` are its GPUs' names in CUDA_VISIBLE_DEVICES, by local index, none without GPUs; `cpus` are the
    CPUs near each of them, none if workers are not bound. `absent` are the nodes that take no part in this
    attempt. `requeue` is there on Slurm only.
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
    config_hash: str = ""
    """Of the config as the run folder has it; `config` may name copies on this node's disk."""

    local_name: str = field(default_factory=new_name)
    """Of its node-local folders; nobody can guess it."""

    @property
    def name(self) -> str:
        """In messages and in logs."""
        return f"node{self.index}"

    @property
    def is_leader(self) -> bool:
        """Whether this controller drives the iterations."""
        return self.index == 0

    @property
    def is_trainer_node(self) -> bool:
        """Whether this node trains, and so owns prompts and state."""
        return self.index in self.placement.trainer_nodes

    @property
    def present(self) -> frozenset[int]:
        """Every node that takes part from the start."""
        return frozenset(range(self.config.launch.nodes)) - self.absent

    @property
    def slabs(self) -> tuple[Slab, ...]:
        """This node's own."""
        return self.placement.slabs_by_node[self.index]

    @property
    def scratch(self) -> Path:
        """Node-local folder of this attempt: sockets."""
        return Path(self.config.launch.scratch_dir) / self.local_name

    @property
    def endpoint(self) -> str:
        """Where this node's workers find the controller."""
        return f"ipc://{self.scratch}/{HUB}"

    @property
    def weights_root(self) -> Path:
        """Node-local memory folder through which weights pass."""
        return Path(self.config.launch.shm_dir) / f"{self.local_name}-weights"

    def weights_folder(self, policy_version: int) -> Path:
        """Folder of one published policy version."""
        return self.weights_root / f"v{policy_version}"
