"""Findings about what the accounting database allows this user: limits of associations and of QOS.

A job over such a limit is refused, or waits for ever. These findings are warnings: group limits, partitions'
QOS and what other jobs use are not looked at, and sites have rules of their own.
"""

from collections.abc import Iterator

from yatt.adapters.slurm.slurm import Fields, Slurm, seconds_of
from yatt.config.site import SiteConfig, site_component
from yatt.errors import Finding
from yatt.launch.diagnose.records import Demand, UserLimits, ok, warn
from yatt.launch.diagnose.settings import setting_words, starts_het_jobs

ASSOCIATION = (
    "Cluster",
    "Partition",
    "Account",
    "DefaultQOS",
    "QOS",
    "MaxJobs",
    "MaxSubmit",
    "MaxTRES",
    "MaxWall",
)
QOS = ("Name", "MaxJobsPU", "MaxSubmitPU", "MaxTRES", "MaxTRESPU", "MaxWall")
ENFORCING = {"limits", "safe", "all"}
NORMAL = "normal"
"""The QOS of a job if none is asked for and the association has no default."""

CURE = "Use another QOS or account, or a smaller run."


def ask_limits(slurm: Slurm, user: str) -> UserLimits:
    """Asks the accounting database; only once if it does not answer."""
    show = ("sacctmgr", "-nP", "show")
    associations = slurm.ask(*show, "assoc", f"user={user}", f"format={','.join(ASSOCIATION)}")
    if associations is None:
        return UserLimits()
    qos = slurm.ask(*show, "qos", f"format={','.join(QOS)}")
    return UserLimits(rows_of(ASSOCIATION, associations), rows_of(QOS, qos or ""))


def rows_of(columns: tuple[str, ...], text: str) -> tuple[Fields, ...]:
    """Parses lines of `sacctmgr -nP`; those with another number of columns are skipped."""
    lines = (line.split("|") for line in text.splitlines())
    return tuple(dict(zip(columns, cells, strict=True)) for cells in lines if len(cells) == len(columns))


def limit_findings(
    limits: UserLimits, config: Fields, site: SiteConfig, demands: tuple[Demand, ...]
) -> Iterator[Finding]:
    """Compares a run's components with the limits that apply to them, if the cluster enforces limits.

    What a QOS limits counts instead of the association's limit (Slurm's order: partition QOS, QOS of the job,
    association).
    """
    if not demands or not ENFORCING & set(setting_words(config, "AccountingStorageEnforce")):
        return
    association = _association(limits, config, site)
    if association is None:
        return
    parts = _as_submitted(config, site, demands)
    allowed = _words(association["QOS"])
    default = association["DefaultQOS"] or (allowed[0] if len(allowed) == 1 else NORMAL)
    rows = {row["Name"]: row for row in limits.qos}
    faults: list[Finding] = []
    for name in dict.fromkeys(site_component(site, part.component).qos or default for part in parts):
        if name not in allowed and allowed:
            what = f"the account of this job may not use QOS '{name}'."
            faults.append(warn("limits", what, f"Write qos: one of {', '.join(allowed)}."))
        mine = tuple(p for p in parts if (site_component(site, p.component).qos or default) == name)
        faults += _over(name, rows.get(name, {}), association, site, mine)
    yield from faults
    if not faults and limits.qos:
        yield ok(
            "limits", "no limit of this account and QOS is below the run (group limits were not looked at)."
        )


def _association(limits: UserLimits, config: Fields, site: SiteConfig) -> Fields | None:
    """The association that a job has on this cluster; None if that is not known: of several accounts without
    a chosen one, or of several partitions."""
    mine = [
        row
        for row in limits.associations or ()
        if row["Cluster"] == config.get("ClusterName") and row["Account"] == (site.account or row["Account"])
    ]
    return mine[0] if len(mine) == 1 and not mine[0]["Partition"] else None


def _as_submitted(config: Fields, site: SiteConfig, demands: tuple[Demand, ...]) -> tuple[Demand, ...]:
    """The components as jobs: one for all nodes if the job is flat."""
    if len(demands) == 1 or (site.layout != "flat" and starts_het_jobs(config)):
        return demands
    nodes, gpus = sum(d.nodes for d in demands), max(d.gpus_per_node for d in demands)
    return (Demand(component=demands[0].component, nodes=nodes, gpus_per_node=gpus),)


def _over(
    qos: str, row: Fields, association: Fields, site: SiteConfig, parts: tuple[Demand, ...]
) -> Iterator[Finding]:
    """Yields what is over a limit of a QOS, or of the association where the QOS has none."""

    def limit(of_qos: str, of_association: str) -> tuple[str, str]:
        if text := row.get(of_qos):
            return text, f"QOS '{qos}' ({of_qos})"
        return association.get(of_association, ""), f"account '{association['Account']}' ({of_association})"

    for of_qos, of_association, where in (
        ("MaxSubmitPU", "MaxSubmit", "in the queue"),
        ("MaxJobsPU", "MaxJobs", "running"),
    ):
        most, who = limit(of_qos, of_association)
        if most.isdigit() and int(most) < len(parts):
            what = f"{who} allows a user {most} jobs {where}; the run's job counts as {len(parts)}."
            cure = "Use another QOS or account, layout: flat in the site file, or placement.mode: colocated."
            yield warn("limits", what, cure)
    for part in parts:
        yield from _too_many(*limit("MaxTRES", "MaxTRES"), site, (part,))
    yield from _too_many(row.get("MaxTRESPU", ""), f"QOS '{qos}' (MaxTRESPU)", site, parts)
    longest, who = limit("MaxWall", "MaxWall")
    longest_s = seconds_of(longest) if longest else None
    if longest_s is not None and site.time_limit_min * 60 > longest_s:
        what = f"time_limit_min is {site.time_limit_min}, more than {who} allows ({longest})."
        minutes = int(longest_s // 60)
        yield warn("limits", what, f"Write time_limit_min: {minutes}." if minutes else CURE)


def _too_many(text: str, who: str, site: SiteConfig, parts: tuple[Demand, ...]) -> Iterator[Finding]:
    most = dict(each.partition("=")[::2] for each in _words(text))
    wanted = {"node": sum(part.nodes for part in parts)}
    for part in parts if site.gpus_directive != "none" else ():
        of_type = f"gres/gpu:{site_component(site, part.component).gpu_type}"
        for kind in ("gres/gpu", of_type):
            wanted[kind] = wanted.get(kind, 0) + part.nodes * part.gpus_per_node
    names = " and ".join(part.component for part in parts)
    for kind, number in wanted.items():
        limit, what = most.get(kind, ""), "nodes" if kind == "node" else "GPUs"
        if limit.isdigit() and number > int(limit):
            yield warn("limits", f"{who} allows {limit} {what}; {names} of the run need {number}.", CURE)


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]
