"""Findings about the cluster's settings that are the same for every partition."""

from collections.abc import Iterator

from yatt.adapters.slurm.slurm import Fields, keeps_accounts, seconds_of
from yatt.config.site import SiteConfig
from yatt.errors import Finding
from yatt.launch.diagnose.records import Snapshot, fail, ok, warn

OLDEST, OLDEST_TRIED = (20, 11), (22, 5)
SHORT_KILL_S = 10.0
"""Shortest time between SIGTERM and SIGKILL in which processes can free a GPU."""

DETECTION_S = 20.0
"""Time in which controllers detect a dead node; they must be faster than Slurm to keep a job together."""

LONG_DELAY_S = 300.0
OUR_EXIT_CODES = {"2": "a user error", "75": "will continue", "93": "do not restart"}


def settings_findings(snapshot: Snapshot, config: Fields, site: SiteConfig) -> Iterator[Finding]:
    """Checks version, environment, accounting, containers, components, requeue, dead nodes and exit codes."""
    yield _version(config)
    if snapshot.overriding:
        names = " ".join(snapshot.overriding)
        what = f"{names}: set in this environment, but not passed on by yatt: the site file applies."
        cure = "To use it, write it in the site file or use --set. Unset it before you run sbatch by hand."
        yield warn("environment", what, cure)
    yield _account(snapshot, site, config)
    if site.container.runtime != "none":
        yield _container(snapshot, site.container.runtime)
    yield _components(config, site)
    yield from _requeue(config)
    yield _dead_nodes(config)
    yield _kill(config)
    yield from _exit_codes(config)


def requeue_delay_s(config: Fields) -> float:
    """Returns the shortest wait of a requeued job: requeue_delay in newer versions, else cred_expire."""
    for key, name in (("SchedulerParameters", "requeue_delay"), ("AuthInfo", "cred_expire")):
        for word in setting_words(config, key):
            if word.startswith(f"{name}="):
                return seconds_of(word.partition("=")[2]) or 0.0
    return 120.0


def starts_het_jobs(config: Fields) -> bool:
    """Whether the cluster's scheduler starts heterogeneous jobs."""
    return config.get("SchedulerType") == "sched/backfill"


def setting_words(fields: Fields, key: str) -> list[str]:
    """Returns a setting that is a comma-separated list."""
    return [word.strip() for word in fields.get(key, "").split(",")]


def duration_s(fields: Fields, key: str) -> float:
    """Returns a setting that is a time; 0 if it is not set."""
    return seconds_of(fields.get(key, "0")) or 0.0


def _version(config: Fields) -> Finding:
    text = config.get("SLURM_VERSION", "0")
    number = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    if number < OLDEST:
        return fail("version", f"Slurm {text} lacks srun --overlap.", "Slurm 20.11 or newer is required.")
    if number < OLDEST_TRIED:
        return warn("version", f"Slurm {text}; the oldest tested version is 22.05.", "Try a small run first.")
    return ok("version", f"Slurm {text}.")


def _account(snapshot: Snapshot, site: SiteConfig, config: Fields) -> Finding:
    if not keeps_accounts(config):
        return ok("account", "no accounting database; the state of ended jobs is read from the controller.")
    accounts = snapshot.limits.accounts
    if accounts is None:
        what = "the accounting database does not answer; the job's account is not known."
        return warn("account", what, "Try again later.")
    if site.account and site.account not in accounts:
        known = ", ".join(accounts) or "none"
        return fail("account", f"you may not charge '{site.account}'.", f"Write account: one of {known}.")
    if not accounts and "associations" in setting_words(config, "AccountingStorageEnforce"):
        what = "this cluster requires an account, and you have none."
        return fail("account", what, "Ask the cluster's administrators.")
    return ok("account", f"charged to {site.account or 'your default account'}.")


def _container(snapshot: Snapshot, runtime: str) -> Finding:
    if runtime in snapshot.container_runtimes:
        return ok("container", f"{runtime} is available.")
    seen = {"pyxis": "srun has no --container-image", "apptainer": "apptainer is not on the PATH"}
    cure = "Ignore this if the nodes have it; else correct container.runtime."
    return warn("container", f"{seen[runtime]} on this machine.", cure)


def _components(config: Fields, site: SiteConfig) -> Finding:
    if not starts_het_jobs(config):
        what = f"{config.get('SchedulerType')} does not start heterogeneous jobs; sched/backfill does."
        return (fail if site.layout == "het" else warn)("components", what, "Write layout: flat.")
    if "disable_hetjob_steps" in setting_words(config, "SchedulerParameters"):
        return ok("components", "job steps may not span components; yatt's steps do not.")
    return ok("components", "heterogeneous jobs can run.")


def _requeue(config: Fields) -> Iterator[Finding]:
    delay_s = requeue_delay_s(config)
    what = f"a requeued job waits at least {delay_s:g} s before it starts again."
    cure = "Administrators: lower cred_expire in AuthInfo, or requeue_delay in SchedulerParameters."
    yield warn("requeue", what, cure) if delay_s > LONG_DELAY_S else ok("requeue", what)
    if config.get("JobRequeue") == "0":
        yield ok("requeue", "off by default (JobRequeue=0); yatt's jobs use --requeue.")


def _dead_nodes(config: Fields) -> Finding:
    timeout_s = duration_s(config, "SlurmdTimeout")
    if timeout_s == 0:
        what = "Slurm never marks a silent node down (SlurmdTimeout=0): the next job may get it."
        return warn("dead nodes", what, "Administrators: set SlurmdTimeout=300.")
    if timeout_s < DETECTION_S:
        what = f"Slurm marks a node down after {timeout_s:g} s, maybe before yatt does, and ends its job."
        return warn("dead nodes", what, f"Administrators: set SlurmdTimeout to {DETECTION_S:g} or more.")
    return ok(
        "dead nodes",
        f"Slurm marks a node down after {timeout_s:g} s (SlurmdTimeout); yatt detects it sooner.",
    )


def _kill(config: Fields) -> Finding:
    kill_s = duration_s(config, "KillWait")
    what = f"{kill_s:g} s between SIGTERM and SIGKILL (KillWait)."
    if kill_s < SHORT_KILL_S:
        return warn("kill", what, "Too short for processes that hold a GPU. Administrators: set KillWait=30.")
    return ok("kill", what)


def _exit_codes(config: Fields) -> Iterator[Finding]:
    for key, says in (("RequeueExit", "requeues"), ("RequeueExitHold", "requeues and holds")):
        for code in sorted(set(setting_words(config, key)) & set(OUR_EXIT_CODES)):
            what = f"Slurm {says} jobs that end with {code}; yatt uses it for: {OUR_EXIT_CODES[code]}."
            yield warn("exit codes", what, f"Administrators: remove {code} from {key}.")
