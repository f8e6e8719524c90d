"""The srun lines of one attempt: one a component, one controller a node. Pure."""

import sys
from dataclasses import dataclass

from yatt.config.site import ContainerSection, SiteConfig
from yatt.launch.allocation import Allocation
from yatt.launch.plan import Component
from yatt.paths import RunPaths

BLIND = "does not see the run folder"
"""What a node says that can leave no record; the launcher looks for it in srun's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrder:
    """One srun: its command line and the run's nodes it starts."""

    component: str
    indexes: tuple[int, ...]
    argv: tuple[str, ...]


def step_orders(
    components: tuple[Component, ...], site: SiteConfig, allocation: Allocation | None,
    paths: RunPaths, *, epoch: int, absent: frozenset[int] = frozenset(),
) -> list[StepOrder]:  # fmt: skip
    """The attempt's steps.

    Args:
        allocation: None to show what a job would run, before there is one.
        absent: nodes that take no part; a component with none left has no step.
    """
    orders = []
    for number, part in enumerate(components):
        indexes = tuple(index for index in part.indexes if index not in absent)
        if indexes:
            argv = (
                *_srun(part, number, len(indexes), len(components) > 1, site),
                *_hosts(part, allocation, absent),
                *_inside(site.container),
                *_controller(indexes, paths, site, epoch, absent),
            )
            orders.append(StepOrder(component=part.name, indexes=indexes, argv=argv))
    return orders


def _srun(part: Component, group: int, nodes: int, is_het: bool, site: SiteConfig) -> tuple[str, ...]:
    """Every count is given: a step inherits component 0's from the environment otherwise."""
    gpus = (f"--gpus-per-node={part.gpus_per_node}",) if part.gpus_per_node else ()
    return (
        "srun", "--overlap", *((f"--het-group={group}",) if is_het else ()), f"--nodes={nodes}",
        f"--ntasks={nodes}", "--ntasks-per-node=1", *gpus, "--no-kill", "--kill-on-bad-exit=0", "--wait=0",
        "--unbuffered", "--input=none", *_container(site.container), *site.srun_args,
    )  # fmt: skip


def _hosts(part: Component, allocation: Allocation | None, absent: frozenset[int]) -> tuple[str, ...]:
    """Names only where some nodes are left out, or a flat job's nodes are divided."""
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
    return (f"--container-image={container.image}", *mounts)


def _inside(container: ContainerSection) -> tuple[str, ...]:
    if container.runtime != "apptainer":
        return ()
    binds = tuple(word for mount in container.mounts for word in ("--bind", mount))
    return ("apptainer", "exec", "--nv", *binds, container.image)


def _controller(
    indexes: tuple[int, ...], paths: RunPaths, site: SiteConfig, epoch: int, absent: frozenset[int]
) -> tuple[str, ...]:
    """In a container it is that one's Python."""
    python = sys.executable if site.container.runtime == "none" else "python3"
    return (
        python, "-P", "-m", "yatt.launch.step", "--run", str(paths.root), "--epoch", str(epoch),
        "--indexes", ",".join(map(str, indexes)), "--absent", ",".join(map(str, sorted(absent))),
    )  # fmt: skip
