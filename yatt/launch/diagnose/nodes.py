"""Findings about nodes: whether the cluster has those that a run needs, and whether they are up."""

import re
from collections.abc import Iterator

from yatt.adapters.slurm.slurm import Fields, expand_node_list, is_up, node_gpus_by_type
from yatt.config.site import ComponentSection, SiteConfig, site_component
from yatt.errors import Finding
from yatt.launch.diagnose.partitions import partition_of
from yatt.launch.diagnose.records import Demand, fail, ok, warn


def node_findings(
    nodes: dict[str, Fields], partitions: dict[str, Fields], site: SiteConfig, demands: tuple[Demand, ...]
) -> Iterator[Finding]:
    """Checks each component, and the components that share a partition: two components never share a node."""
    sums: dict[str, int] = {}
    for demand in demands:
        name = partition_of(site, demand.component, partitions)
        if name not in partitions:
            continue  # reported already
        there = {key: node for key, node in nodes.items() if name in node.get("Partitions", "").split(",")}
        asked = site_component(site, demand.component)
        if absent := [key for key in expand_node_list(asked.nodelist) if key not in there]:
            what = f"nodelist {asked.nodelist}: partition {name} has no {', '.join(absent)}."
            yield fail(demand.component, what, f"Its nodes are {partitions[name].get('Nodes', 'unknown')}.")
        yield from _fit(there, asked, site, demand)
        sums[name] = sums.get(name, 0) + demand.nodes
        if sums[name] > len(there):
            what = f"{sums[name]} nodes are needed in partition {name}, which has {len(there)}."
            yield fail(demand.component, what, "Use fewer nodes, or another partition.")
        limit = partitions[name].get("MaxNodes", "UNLIMITED")
        if limit.isdigit() and demand.nodes > int(limit):
            what = f"{demand.nodes} nodes are needed; partition {name} allows {limit} per job (MaxNodes)."
            yield fail(demand.component, what, "Use fewer nodes, or another partition.")


def _fit(
    there: dict[str, Fields], asked: ComponentSection, site: SiteConfig, demand: Demand
) -> Iterator[Finding]:
    about = demand.component
    yield from _gpu_request(there, asked, site, demand)
    good = {name: node for name, node in there.items() if _has(node, asked, site, demand)}
    request = _in_words(asked, demand)
    if len(good) < demand.nodes:
        largest = _in_words(
            _largest(there), demand, gpus=max((_count(n, "") for n in there.values()), default=0)
        )
        what = f"{demand.nodes} nodes with {request} are needed; {len(good)} of {len(there)} have that."
        yield fail(about, what, f"The largest have {largest}.")
        return
    up = [name for name, node in good.items() if is_up(node)]
    if len(up) < demand.nodes:
        what = f"{demand.nodes} nodes with {request} are needed; {len(up)} of {len(good)} are up now."
        yield warn(about, what, "The job will wait until enough are up.")
    else:
        yield ok(about, f"{demand.nodes} nodes with {request}: there are {len(good)}, {len(up)} of them up.")


def _gpu_request(
    there: dict[str, Fields], asked: ComponentSection, site: SiteConfig, demand: Demand
) -> Iterator[Finding]:
    kinds = {kind for node in there.values() for kind in node_gpus_by_type(node)}
    if asked.gpu_type and asked.gpu_type not in kinds:
        known = ", ".join(sorted(kinds - {""})) or "no types"
        yield fail(
            demand.component, f"no node has a GPU of type '{asked.gpu_type}'.", f"Write gpu_type: {known}."
        )
    if site.gpus_directive == "none" and demand.gpus_per_node and kinds:
        what = "Slurm allocates the nodes' GPUs, but gpus_directive is none: the job gets no GPUs."
        yield warn(demand.component, what, "Write gpus_directive: gpus_per_node.")


def _has(node: Fields, asked: ComponentSection, site: SiteConfig, demand: Demand) -> bool:
    wants_gpus = demand.gpus_per_node if site.gpus_directive != "none" else 0
    features = node.get("AvailableFeatures", "").split(",")
    is_plain = re.fullmatch(r"[\w.-]+", asked.constraint)  # only Slurm can evaluate an expression
    return (
        _count(node, asked.gpu_type) >= wants_gpus
        and int(node.get("CPUTot", "0")) >= asked.cpus_per_node
        and int(node.get("RealMemory", "0")) >= asked.mem_gb << 10
        and (not is_plain or asked.constraint in features)
    )


def _count(node: Fields, kind: str) -> int:
    gpus = node_gpus_by_type(node)
    return gpus.get(kind, 0) if kind else sum(gpus.values())


def _largest(there: dict[str, Fields]) -> ComponentSection:
    return ComponentSection(
        cpus_per_node=max((int(node.get("CPUTot", "0")) for node in there.values()), default=0),
        mem_gb=max((int(node.get("RealMemory", "0")) for node in there.values()), default=0) >> 10,
    )


def _in_words(asked: ComponentSection, demand: Demand, gpus: int | None = None) -> str:
    kind = f" {asked.gpu_type}" if asked.gpu_type else ""
    parts = [f"{demand.gpus_per_node if gpus is None else gpus}{kind} GPUs"]
    parts += [f"{asked.cpus_per_node} CPUs"] if asked.cpus_per_node else []
    parts += [f"{asked.mem_gb} GiB"] if asked.mem_gb else []
    parts += [f"feature {asked.constraint}"] if asked.constraint else []
    return ", ".join(parts)
