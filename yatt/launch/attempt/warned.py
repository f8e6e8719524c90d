"""What Slurm's times of a job say after a warning: why it came, and how long the job has."""

from datetime import datetime

from yatt.adapters.slurm.slurm import Fields, seconds_of
from yatt.config.site import WARNING_SLACK_S, SiteConfig
from yatt.core.attempts.outcome import BY_HAND

BUDGET_S = 3600.0
"""Time that is assumed if Slurm says none."""


def is_preempted(shown: list[Fields] | None) -> bool:
    """Whether Slurm has begun to preempt the job, by its answer about it."""
    return _is_set((shown or [{}])[0].get("PreemptTime", ""))


def _is_set(slurm_time: str) -> bool:
    return slurm_time not in ("", "None", "Unknown", "N/A", "(null)")


def why_warned(job: Fields, site: SiteConfig) -> str:
    """Distinguishes a warning by Slurm from a signal sent by a user, by Slurm's times of the job."""
    if not job:
        return "warned by Slurm"
    if _is_set(job.get("PreemptTime", "")):
        return "preempted"
    limit_s, run_s = seconds_of(job.get("TimeLimit", "")), seconds_of(job.get("RunTime", ""))
    early_s = site.signal_lead_s + 2 * WARNING_SLACK_S
    is_near = limit_s is not None and run_s is not None and limit_s - run_s <= early_s
    return "the time limit is near" if is_near else BY_HAND


def budget_s(job: Fields, site: SiteConfig) -> float:
    """Returns the seconds from Slurm's warning to its kill, comparing only times of Slurm's clock."""
    end, preempt = job.get("EndTime", ""), job.get("PreemptTime", "")
    if not _is_set(preempt):
        return float(site.signal_lead_s)
    try:
        return (datetime.fromisoformat(end) - datetime.fromisoformat(preempt)).total_seconds()
    except ValueError:
        return BUDGET_S
