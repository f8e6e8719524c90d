"""Findings about what the accounting database allows this user: limits of associations and of QOS.

A job over such a limit is refused, or waits for ever. Each component of a heterogeneous job counts as a job.
"""

from collections.abc import Iterator

from yatt.adapters.slurm import Fields, Slurm, seconds_of
from yatt.config.site import SiteConfig, component
from yatt.launch.diagnose.records import Demand, Finding, UserLimits, fail, ok
from yatt.launch.diagnose.settings import words

ASSOCIATION = ("Account", "DefaultQOS", "QOS", "MaxJobs", "MaxSubmit", "MaxTRES", "MaxWall")
QOS = ("Name", "MaxJobsPU", "MaxSubmitPU", "MaxTRES", "MaxTRESPU", "MaxWall")
ENFORCING = {"limits", "safe", "all"}
GPUS = ("gres/gpu", "gpu")
NORMAL = "normal"
"""The QOS of a job if none is asked for and the association has no default."""


def ask_limits(slurm: Slurm, user: str) -> UserLimits:
    """Asks the accounting database."""
    show = ("sacctmgr", "-nP", "show")
    associations = slurm.ask(*show, "assoc", f"user={user}", f"format={','.join(ASSOCIATION)}")
    qos = slurm.ask(*show, "qos", f"format={','.join(QOS)}")
    found = None if associations is None else rows_of(ASSOCIATION, associations)
    return UserLimits(found, rows_of(QOS, qos or ""))


def rows_of(columns: tuple[str, ...], text: str) -> tuple[Fields, ...]:
    """Parses lines of `sacctmgr -nP`; those with another number of columns are skipped."""
    lines = (line.split("|") for line in text.splitlines())
    return tuple(dict(zip(columns, cells, strict=True)) for cells in lines if len(cells) == len(columns))


def limit_findings(
    limits: UserLimits, config: Fields, site: SiteConfig, demands: tuple[Demand, ...]
) -> Iterator[Finding]:
    """Compares a run's components with the limits of the association and of each QOS that they have, if the
    cluster enforces limits."""
    if not ENFORCING & set(words(config, "AccountingStorageEnforce")):
        return
    association = _association(limits.associations or (), site.account)
    if not demands or (association is None and not limits.qos):
        return
    faults = list(_forbidden(association, site, demands)) if association else []
    if association:
        faults += _over(f"account '{association['Account']}'", association, "", site, demands)
    default = (association and association["DefaultQOS"]) or NORMAL
    for row in limits.qos:
        mine = tuple(d for d in demands if (component(site, d.component).qos or default) == row["Name"])
        faults += _over(f"QOS '{row['Name']}'", row, "PU", site, mine) if mine else ()
    yield from dict.fromkeys(faults)
    if not faults:
        yield ok("limits", "associations and QOS allow the run's jobs, nodes, GPUs and time.")


def _forbidden(association: Fields, site: SiteConfig, demands: tuple[Demand, ...]) -> Iterator[Finding]:
    allowed = _words(association["QOS"])
    for wanted in {component(site, demand.component).qos for demand in demands} - {"", *allowed}:
        if allowed:
            what = f"the account of this job may not use QOS '{wanted}'."
            yield fail("limits", what, f"Write qos: one of {', '.join(allowed)}.")


def _association(rows: tuple[Fields, ...], account: str) -> Fields | None:
    """The association that a job has: its account's, or the only one."""
    mine = [row for row in rows if row["Account"] == account] if account else list(rows)
    return mine[0] if len({row["Account"] for row in mine}) == 1 else None


def _over(
    who: str, row: Fields, suffix: str, site: SiteConfig, demands: tuple[Demand, ...]
) -> Iterator[Finding]:
    """Yields what is over a limit in a row; the numbers of jobs of a user have a suffix in those of QOS."""
    for key, does in ((f"MaxSubmit{suffix}", "have in the queue"), (f"MaxJobs{suffix}", "run")):
        most = row[key]
        if most.isdigit() and int(most) < len(demands):
            what = f"{who} lets a user {does} {most} jobs ({key}); the run's job counts as {len(demands)}."
            cure = "Use another QOS or account, or a run whose nodes are alike: placement.mode colocated."
            yield fail("limits", what, cure)
    for demand in demands:
        yield from _too_many(who, "MaxTRES", row["MaxTRES"], (demand,))
    yield from _too_many(who, "MaxTRESPU", row.get("MaxTRESPU", ""), demands)
    longest_s = seconds_of(row["MaxWall"]) if row["MaxWall"] else None
    if longest_s is not None and site.time_limit_min * 60 > longest_s:
        what = f"time_limit_min is {site.time_limit_min}, more than {who} allows ({row['MaxWall']})."
        yield fail("limits", what, f"Write time_limit_min: {int(longest_s // 60)}.")


def _too_many(who: str, key: str, text: str, demands: tuple[Demand, ...]) -> Iterator[Finding]:
    most = dict(each.partition("=")[::2] for each in _words(text))
    nodes, gpus = sum(d.nodes for d in demands), sum(d.nodes * d.gpus_per_node for d in demands)
    names = " and ".join(d.component for d in demands)
    for what, wanted, limit in (
        ("nodes", nodes, most.get("node", "")),
        ("GPUs", gpus, next((most[name] for name in GPUS if name in most), "")),
    ):
        if limit.isdigit() and wanted > int(limit):
            about = f"{who} allows {limit} {what} ({key}); {names} of the run need {wanted}."
            yield fail("limits", about, "Use another QOS or account, or a smaller run.")


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]
