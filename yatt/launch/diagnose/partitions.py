"""Findings about a job's partitions: limits, permissions, preemption and its notice."""

from collections.abc import Iterator

from yatt.adapters.slurm.slurm import Fields, seconds_of
from yatt.config.site import ComponentSection, SiteConfig, site_component
from yatt.errors import Finding
from yatt.launch.diagnose.records import fail, ok, warn
from yatt.launch.diagnose.settings import duration_s, setting_words

PREEMPTION_CLASS = ("PreemptMode", "PriorityTier", "GraceTime")


def partition_of(site: SiteConfig, name: str, partitions: dict[str, Fields]) -> str:
    """Partition of component `name`, the first if there are several; "" if there is no default."""
    default = next((key for key, p in partitions.items() if p.get("Default") == "YES"), "")
    return site_component(site, name).partition.split(",")[0] or default


def partition_findings(
    config: Fields, partitions: dict[str, Fields], site: SiteConfig, components: list[str]
) -> Iterator[Finding]:
    """Checks each partition once, and whether the partitions fit together."""
    wanted: dict[str, list[ComponentSection]] = {}
    for name in components:
        wanted.setdefault(partition_of(site, name, partitions), []).append(site_component(site, name))
    for partition, sections in wanted.items():
        if partition not in partitions:
            what = f"there is no partition '{partition}'." if partition else "there is no default partition."
            yield fail(
                "partition", what, f"Write partition: one of {', '.join(partitions) or '(none visible)'}."
            )
            continue
        yield from _limits(partitions[partition], site)
        yield from _who(partitions[partition], site.account, {section.qos for section in sections})
        yield from _preemption(config, partitions[partition], site)
    yield from _same_class([partitions[name] for name in wanted if name in partitions])


def preempt_mode(config: Fields, partition: Fields) -> str:
    """Returns what happens to a preempted job of this partition: OFF, REQUEUE, CANCEL or SUSPEND."""
    if config.get("PreemptType", "preempt/none") == "preempt/none":
        return "OFF"
    modes = [mode for mode in setting_words(partition, "PreemptMode") if mode not in ("GANG", "WITHIN", "")]
    return modes[0] if modes else "OFF"


def has_user_signal(config: Fields) -> bool:
    """Whether a preempted job gets the signal that it requested, not only SIGTERM."""
    old, new = setting_words(config, "SlurmctldParameters"), setting_words(config, "PreemptParameters")
    return "preempt_send_user_signal" in old or "send_user_signal" in new


def _limits(partition: Fields, site: SiteConfig) -> Iterator[Finding]:
    name = partition["PartitionName"]
    if partition.get("State") != "UP":
        yield fail(name, f"the partition is {partition.get('State')}.", "Wait, or use another partition.")
    longest = partition.get("MaxTime", "UNLIMITED")
    longest_s = seconds_of(longest)
    if longest_s is not None and site.time_limit_min * 60 > longest_s:
        what = f"time_limit_min is {site.time_limit_min}, more than {name} allows ({longest})."
        yield fail(name, what, f"Write time_limit_min: {int(longest_s // 60)}.")
    else:
        yield ok(name, f"up; allows {longest}.")


def _who(partition: Fields, account: str, qos: set[str]) -> Iterator[Finding]:
    name = partition["PartitionName"]
    for key, field, mine in (("account", "AllowAccounts", {account}), ("qos", "AllowQos", qos)):
        allowed = setting_words(partition, field)
        for request in sorted(mine - {""}):
            if allowed != ["ALL"] and request not in allowed:
                yield fail(
                    name, f"does not accept {key} '{request}'.", f"Write {key}: one of {', '.join(allowed)}."
                )


def _preemption(config: Fields, partition: Fields, site: SiteConfig) -> Iterator[Finding]:
    name, mode = partition["PartitionName"], preempt_mode(config, partition)
    if config.get("PreemptType") == "preempt/qos":
        what = "preemption depends on the QOS (preempt/qos), which the controller does not show."
        yield warn(name, what, "See: sacctmgr show qos format=name,preempt,preemptmode,gracetime")
        return
    if mode == "OFF":
        yield ok(name, "its jobs are not preempted.")
        return
    if mode == "SUSPEND":
        what = "suspends preempted jobs: they keep their GPU memory, and their leases expire."
        yield warn(name, what, "Use another partition if possible.")
        return
    if mode == "CANCEL" and not duration_s(partition, "GraceTime"):
        what = "cancels preempted jobs without notice (GraceTime=0): nothing can be saved, and the run ends."
        yield warn(
            name, what, "Use slurm/resume-chain.sh, which queues successors, or run `yatt resume` by hand."
        )
    elif mode == "CANCEL":
        yield ok(name, "cancels preempted jobs after a notice; a yatt job then saves and requeues itself.")
    else:
        yield ok(name, f"its jobs are preempted by {mode}.")
    yield from _notice(config, partition, site)


def _notice(config: Fields, partition: Fields, site: SiteConfig) -> Iterator[Finding]:
    name, grace_s = partition["PartitionName"], duration_s(partition, "GraceTime")
    what = f"{grace_s:g} s from the notice of preemption to SIGTERM (GraceTime)"
    if grace_s < site.signal_lead_s:
        cure = "A slower checkpoint is lost: lower checkpoint.save_every. Administrators: raise GraceTime."
        yield warn(name, f"{what}; signal_lead_s is {site.signal_lead_s}.", cure)
    else:
        yield ok(name, f"{what}.")
    if has_user_signal(config):
        yield ok("notice", "a preempted job gets the signal that it requested.")
    else:
        cure = (
            "Administrators: set PreemptParameters=send_user_signal (older: SlurmctldParameters=preempt_...)."
        )
        yield warn(
            "notice",
            "only the tasks of a preempted job get a signal: SIGTERM, not the one it requested.",
            cure,
        )


def _same_class(partitions: list[Fields]) -> Iterator[Finding]:
    classes = {tuple(p.get(key, "") for key in PREEMPTION_CLASS): p["PartitionName"] for p in partitions}
    if len(classes) > 1:
        names = " and ".join(classes.values())
        what = f"{names} are preempted differently: Slurm would preempt one component only."
        yield fail("components", what, f"Use partitions with equal {', '.join(PREEMPTION_CLASS)}.")
