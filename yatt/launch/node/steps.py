"""The srun commands of one attempt: one srun per component, one controller per node. Pure."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from yatt.config.site import ContainerSection, SiteConfig, keeps_job, site_component
from yatt.launch.node.allocation import Allocation
from yatt.launch.resolve.plan import Component
from yatt.paths import RunPaths

BLIND = "does not see the run folder"
"""Printed by a node that cannot write to the run folder; the launcher searches srun's output for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrder:
    """One srun: its command line and the indexes of the nodes that it starts."""

    component: str
    indexes: tuple[int, ...]
    argv: tuple[str, ...]


def step_orders(
    components: tuple[Component, ...],
    site: SiteConfig,
    allocation: Allocation | None,
    paths: RunPaths,
    *,
    attempt: int,
    absent: frozenset[int] = frozenset(),
) -> list[StepOrder]:
    """Returns the attempt's steps.

    Args:
        allocation: None for a dry run, when there is no job yet.
        absent: nodes to leave out; a component without nodes has no step.
    """
    return [
        StepOrder(
            component=part.name,
            indexes=indexes,
            argv=(
                *srun_line(components, number, site, allocation, absent),
                *_controller(indexes, paths, site, attempt, absent),
            ),
        )
        for number, part in enumerate(components)
        if (indexes := tuple(index for index in part.indexes if index not in absent))
    ]


def tidying_steps(
    components: tuple[Component, ...],
    site: SiteConfig,
    allocation: Allocation,
    indexes: frozenset[int],
    folders: Sequence[str],
) -> list[tuple[str, ...]]:
    """Returns commands that remove what dead processes left in these folders of these nodes."""
    every = frozenset(index for part in components for index in part.indexes)
    program = (python_of(site), "-P", "-m", "yatt.launch.node.tidy", *dict.fromkeys(folders))
    return [
        (*srun_line(components, number, site, allocation, every - indexes), *program)
        for number, part in enumerate(components)
        if set(part.indexes) & indexes
    ]


def guest_step(
    part: Component, host: str, site: SiteConfig, allocation: Allocation, place: Sequence[str]
) -> tuple[str, ...]:
    """Returns the command of a step on one node of a joining job.

    Args:
        part: the job's nodes.
        place: the step's arguments about the place that it takes (`yatt.launch.node.step`).
    """
    one = replace(part, nodes=1)
    only = replace(allocation, hosts={part.name: (host,)}, groups={})
    program = (python_of(site), "-P", "-m", "yatt.launch.node.step", *place, "--guest")
    return (*srun_line((one,), 0, site, only), *program)


def srun_line(
    components: tuple[Component, ...],
    number: int,
    site: SiteConfig,
    allocation: Allocation | None,
    absent: frozenset[int] = frozenset(),
) -> tuple[str, ...]:
    """Returns the srun part of one component's step: one task per node, with all resources of the job there.

    Args:
        number: index in `components`.
        allocation, absent: as in `step_orders`.
    """
    part = components[number]
    nodes = len(set(part.indexes) - absent)
    return (
        *_srun(part, number, nodes, len(components) > 1, site),
        *_cpus(part, site, allocation),
        *_container(site.container),
        *site.srun_args,
        *_hosts(part, allocation, absent),
        *_inside(site.container),
    )


def _srun(part: Component, group: int, nodes: int, is_het: bool, site: SiteConfig) -> tuple[str, ...]:
    """srun options. Every count is explicit, because a step inherits component 0's from the environment. The
    environment is always exported; MPI is not used."""
    gpus = (f"--gpus-per-node={part.gpus_per_node}",) if part.gpus_per_node else ()
    no_kill = ("--no-kill",) if keeps_job(site) else ()
    return (
        "srun",
        "--overlap",
        *((f"--het-group={group}",) if is_het else ()),
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        *gpus,
        *no_kill,
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--unbuffered",
        "--input=none",
        "--export=ALL",
        "--mpi=none",
    )


def _cpus(part: Component, site: SiteConfig, allocation: Allocation | None) -> tuple[str, ...]:
    """Requests all CPUs of the job on a node. Since Slurm 22.05 a step does not inherit them; where tasks are
    bound to cores, a step without a request gets one core for all workers."""
    count = allocation.cpus.get(part.name, 0) if allocation else site_component(site, part.name).cpus_per_node
    return (f"--cpus-per-task={count}", "--cpu-bind=cores") if count else ()


def _hosts(part: Component, allocation: Allocation | None, absent: frozenset[int]) -> tuple[str, ...]:
    """Names the nodes only if some are left out, or if a flat job's nodes are divided."""
    if allocation is None:
        return ()
    names = allocation.hosts[part.name]
    there = [name for index, name in zip(part.indexes, names, strict=False) if index not in absent]
    if allocation.groups and len(there) == len(names):
        return ()
    return (f"--nodelist={','.join(there)}",)


def _container(container: ContainerSection) -> tuple[str, ...]:
    if container.runtime != "pyxis":
        return ()
    mounts = (f"--container-mounts={','.join(container.mounts)}",) if container.mounts else ()
    return (f"--container-image={container.image}", *mounts, *container.args)


def _inside(container: ContainerSection) -> tuple[str, ...]:
    if container.runtime != "apptainer":
        return ()
    binds = tuple(word for mount in container.mounts for word in ("--bind", mount))
    return (*container.command, *binds, *container.args, container.image)


def python_of(site: SiteConfig) -> str:
    """Python interpreter of a step; in a container, the container's."""
    if site.container.runtime != "none":
        return site.container.python
    return site.python or sys.executable


def _controller(
    indexes: tuple[int, ...], paths: RunPaths, site: SiteConfig, attempt: int, absent: frozenset[int]
) -> tuple[str, ...]:
    return (
        python_of(site),
        "-P",
        "-m",
        "yatt.launch.node.step",
        "--run",
        str(paths.root),
        "--attempt",
        str(attempt),
        "--indexes",
        ",".join(map(str, indexes)),
        "--absent",
        ",".join(map(str, sorted(absent))),
    )
