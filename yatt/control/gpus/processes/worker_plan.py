"""The plan of one node's worker processes, before any of them is started.

A worker is named after its role and place (``rollout-n0s0``; ``rollout-n0s0e1`` if a slab has several
engines of the role; ``rollout-n0s0r1`` for rank 1 of an engine that spans nodes). Each start of it has a
number of its own, so that a message of an earlier start cannot be taken for one of the new process.
"""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from yatt.adapters.processes.process import Child, ChildStart
from yatt.control.node import Node
from yatt.core.gpus.placement import ROLLOUT, TRAINER, Slab, genrm_of_role

REWARD = "reward"
UPLOADER = "uploader"
MEDIA = "media"
ASYNC = "async"
"""Suffix of the name of the reward process that runs asynchronous functions."""


@dataclass(slots=True)
class WorkerProcess:
    """What is known of a worker's current process."""

    child: Child | None = None
    start: ChildStart | None = None
    """Its start, until it has begun."""

    is_starting: bool = False
    is_unwanted: bool = False
    """Whether the process that is being started is not wanted any more."""

    hello: asyncio.Event = field(default_factory=asyncio.Event)
    hello_bytes: int = 0
    host_bytes: int = 0
    """Host memory that it keeps while it sleeps, beside `hello_bytes`."""

    waits_for: str = ""
    """The error of the checkpoint store that it waits for, as last reported."""

    is_asleep: bool = False
    """Whether it has answered Sleep, and was not woken since."""

    has_computed: bool = False
    """Whether it has done its role's work: an update, or a completion."""


@dataclass(slots=True)
class Worker:
    """One planned worker and its current process. `address` is its name on the workers' socket."""

    name: str
    role: str
    slab: Slab | None
    argv: tuple[str, ...]
    gpus: tuple[int, ...]
    rank: int | None = None
    """Its rank in an engine that spans nodes; None: it is a whole engine, or no engine."""

    starts: int = 0
    work: int = 0
    """The progress of its main loop, as last reported."""

    process: WorkerProcess = field(default_factory=WorkerProcess)

    def begin(self) -> None:
        """Begins one more start."""
        self.starts += 1
        process = self.process
        process.hello.clear()
        process.is_starting, process.is_unwanted, process.is_asleep = True, False, False
        process.waits_for, process.has_computed = "", False

    @property
    def is_engine(self) -> bool:
        """Whether it is an engine, or one rank of an engine."""
        return self.role not in (TRAINER, REWARD, UPLOADER, MEDIA)

    @property
    def takes_requests(self) -> bool:
        """Whether requests of a role go to this process: it is an engine, or rank 0 of one."""
        return self.is_engine and not self.rank

    @property
    def address(self) -> str:
        """Name on the workers' socket; unique to this start."""
        return f"{self.name}.{self.starts}"

    @property
    def is_running(self) -> bool:
        """Whether its process runs or is about to begin."""
        return self.process.child is not None or self.process.is_starting


def planned_workers(node: Node) -> list[Worker]:
    """Returns every worker that this node will ever run; none of them is started."""
    place = ("--attempt", str(node.attempt), "--node", str(node.index), "--endpoint", node.endpoint)
    common = ("--run", str(node.paths.root), *place)
    workers = [
        w
        for slab in node.slabs
        for role in _engine_roles(node, slab)
        for w in _engines(node, role, slab, common)
    ]
    workers += [
        Worker(
            f"trainer-n{node.index}r{gpu}",
            TRAINER,
            slab,
            ("yatt.trainer", *common, "--local-rank", str(gpu)),
            (gpu,),
        )
        for slab in node.slabs
        if TRAINER in node.placement.roles_of(slab)
        for gpu in slab.gpus
    ]
    workers += [
        Worker(f"reward-n{node.index}{name}", REWARD, None, ("yatt.reward", *common), ())
        for name in _reward_processes(node)
    ]
    if node.is_trainer_node and node.config.trains:
        workers.append(Worker(f"uploader-n{node.index}", UPLOADER, None, ("yatt.uploader", *common), ()))
    if _has_media(node):
        argv = ("yatt.media", *common, "--media", str(node.media_folder))
        workers.append(Worker(f"media-n{node.index}", MEDIA, None, argv, ()))
    return workers


def _has_media(node: Node) -> bool:
    """Whether prompts have pictures, which are prepared on each node."""
    return bool(node.config.data.media_store)


def _engine_roles(node: Node, slab: Slab) -> list[str]:
    return [role for role in node.placement.roles_of(slab) if role != TRAINER]


def _engines(node: Node, role: str, slab: Slab, common: tuple[str, ...]) -> Iterator[Worker]:
    """Yields the processes of the role's engines on a slab."""
    genrm, gpus = genrm_of_role(role), node.placement.engines_on(slab, role)
    pictures = ("--media", str(node.media_folder)) if _has_media(node) else ()
    kind, argv = "rollout", ("yatt.rollout", *common, *pictures)
    if role != ROLLOUT:
        kind, argv = f"genrm-{genrm}", ("yatt.genrm", *common, *pictures, "--genrm", genrm)
    nodes = node.placement.nodes_of(slab, role)
    if len(nodes) > 1:
        yield from _ranks(node, Worker(f"{kind}-{slab.name}", role, slab, argv, ()), kind, nodes)
        return
    for index, own in enumerate(gpus):
        name = f"{kind}-{slab.name}"
        yield Worker(f"{name}e{index}" if len(gpus) > 1 else name, role, slab, argv, own)


def _ranks(node: Node, whole: Worker, kind: str, nodes: tuple[int, ...]) -> Iterator[Worker]:
    """Yields this node's ranks of an engine that spans nodes, one process for each GPU."""
    assert whole.slab is not None, "engines live on GPU sets"
    gpus = whole.slab.gpus
    size = len(nodes) * len(gpus)
    argv = (
        *whole.argv,
        "--engine",
        f"{kind}-n{nodes[0]}",
        "--num-ranks",
        str(size),
        "--host",
        node.host,
    )
    for index, gpu in enumerate(gpus):
        rank = nodes.index(node.index) * len(gpus) + index
        name = f"{whole.name}r{rank}"
        yield Worker(name, whole.role, whole.slab, (*argv, "--rank", str(rank)), (gpu,), rank=rank)


def _reward_processes(node: Node) -> list[str]:
    """Returns names of reward processes: one per concurrent synchronous call, one for asynchronous calls."""
    config = node.config
    if not node.is_trainer_node or not (config.rewards or config.genrms):
        return []
    count = config.launch.reward_processes or min(8, os.cpu_count() or 1)
    has_functions = bool(config.rewards) or any(genrm.path for genrm in config.genrms)
    return [*(f"p{number}" for number in range(count)), *([ASYNC] if has_functions else [])]
