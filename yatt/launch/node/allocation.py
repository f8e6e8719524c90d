"""Slurm's allocation for one start of a job, read from the batch script's environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from yatt.adapters.slurm.slurm import expand_counts, expand_node_list
from yatt.errors import ConfigError
from yatt.launch.resolve.plan import Component


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One start of a job.

    Attributes:
        hosts: Slurm's node names per component, in the order of the run's nodes.
        groups: het group of each component; empty for a plain job.
        cpus: CPUs per node of each component (the minimum over its nodes); a component is missing if Slurm
            does not report its CPUs.
    """

    job_id: str
    restarts: int
    hosts: dict[str, tuple[str, ...]]
    groups: dict[str, int]
    cpus: dict[str, int] = field(default_factory=dict)

    def names_of(self, components: tuple[Component, ...]) -> dict[int, str]:
        """Returns Slurm's name of each of the run's nodes."""
        return {
            index: name
            for part in components
            for index, name in zip(part.indexes, self.hosts[part.name], strict=False)
        }


def allocation_of(env: Mapping[str, str], components: tuple[Component, ...]) -> Allocation:
    """Returns the allocation described by the batch script's environment.

    Raises:
        ConfigError: this is not a batch job, or it does not have the nodes that the run needs.
    """
    if "SLURM_JOB_ID" not in env:
        raise ConfigError("this is not a Slurm job: SLURM_JOB_ID is not set. Use `yatt submit`.")
    size = int(env.get("SLURM_HET_SIZE", "1"))
    job_id, restarts = env["SLURM_JOB_ID"], int(env.get("SLURM_RESTART_COUNT", "0"))
    if size == 1:
        names = tuple(expand_node_list(env.get("SLURM_JOB_NODELIST", "")))
        hosts = {part.name: names[part.first : part.first + part.nodes] for part in components}
        _check(components, hosts, job_id)
        counts = expand_counts(env.get("SLURM_JOB_CPUS_PER_NODE", ""))
        cpus = {part.name: counts[part.first : part.first + part.nodes] for part in components}
        return Allocation(job_id=job_id, restarts=restarts, hosts=hosts, groups={}, cpus=_fewest(cpus))
    if size != len(components):
        wanted = ", ".join(part.name for part in components)
        raise ConfigError(f"job {job_id} has {size} components; the run needs {len(components)} ({wanted}).")
    hosts = {
        part.name: tuple(expand_node_list(env.get(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", "")))
        for group, part in enumerate(components)
    }
    _check(components, hosts, job_id)
    groups = {part.name: group for group, part in enumerate(components)}
    cpus = {
        part.name: expand_counts(env.get(f"SLURM_JOB_CPUS_PER_NODE_HET_GROUP_{group}", ""))[: part.nodes]
        for group, part in enumerate(components)
    }
    return Allocation(job_id=job_id, restarts=restarts, hosts=hosts, groups=groups, cpus=_fewest(cpus))


def _fewest(cpus: dict[str, list[int]]) -> dict[str, int]:
    return {name: min(counts) for name, counts in cpus.items() if counts}


def _check(components: tuple[Component, ...], hosts: dict[str, tuple[str, ...]], job_id: str) -> None:
    for part in components:
        got = len(hosts[part.name])
        if got < part.nodes:
            raise ConfigError(
                f"job {job_id} has {got} nodes for '{part.name}'; the run needs {part.nodes}. Change "
                "--nodes, or launch.nodes and placement.trainer_nodes."
            )
