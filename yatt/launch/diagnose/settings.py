"""What the cluster's own settings, the same for every partition, mean for a job of ours."""

from collections.abc import Iterator

from yatt.adapters.slurm import Fields, keeps_accounts, seconds_of
from yatt.config.site import SiteConfig
from yatt.launch.diagnose.records import Finding, Snapshot, fail, ok, warn

OLDEST, OLDEST_TRIED = (20, 11), (22, 5)
SHORT_KILL_S = 10.0
"""Less than this between SIGTERM and SIGKILL is little for processes that must free a GPU."""

DETECTION_S = 20.0
"""Controllers notice a dead node within this, and must be faster than Slurm to keep a job together."""

LONG_DELAY_S = 300.0
OUR_EXIT_CODES = {"2": "a mistake of the user's", "75": "will continue", "93": "do not restart"}


def settings_findings(snapshot: Snapshot, config: Fields, site: SiteConfig) -> Iterator[Finding]:
    """Version, environment, accounting, containers, components, requeue, dead nodes and exit codes."""
    yield _version(config)
    if snapshot.overriding:
        names = " ".join(snapshot.overriding)
        what = f"{names}: set here, and yatt does not hand it on: the site file holds."
        cure = "To have it, write it in the site file or --set it. sbatch by hand obeys it: unset it there."
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
    """How long a requeued job waits at least: a setting of newer versions, else its credential's life."""
    for key, name in (("SchedulerParameters", "requeue_delay"), ("AuthInfo", "cred_expire")):
        for word in words(config, key):
            if word.startswith(f"{name}="):
                return seconds_of(word.partition("=")[2]) or 0.0
    return 120.0


def words(fields: Fields, key: str) -> list[str]:
    """A setting that is a list apart by commas."""
    return [word.strip() for word in fields.get(key, "").split(",")]


def duration_s(fields: Fields, key: str) -> float:
    """A setting that is a time; 0 if it is not set."""
    return seconds_of(fields.get(key, "0")) or 0.0


def _version(config: Fields) -> Finding:
    text = config.get("SLURM_VERSION", "0")
    number = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    if number < OLDEST:
        return fail("version", f"Slurm {text} lacks srun --overlap.", "Slurm 20.11 or newer is needed.")
    if number < OLDEST_TRIED:
        return warn("version", f"Slurm {text}; the oldest that was tried is 22.05.", "Try a small run first.")
    return ok("version", f"Slurm {text}.")


def _account(snapshot: Snapshot, site: SiteConfig, config: Fields) -> Finding:
    if not keeps_accounts(config):
        return ok("account", "no accounting; how jobs ended is asked of the controller.")
    if snapshot.accounts is None:
        what = "the accounting database does not answer; whom the job is charged to is not known."
        return warn("account", what, "Try again later.")
    if site.account and site.account not in snapshot.accounts:
        known = ", ".join(snapshot.accounts) or "none"
        return fail("account", f"you may not charge '{site.account}'.", f"account: one of {known}.")
    if not snapshot.accounts and "associations" in words(config, "AccountingStorageEnforce"):
        what = "this cluster runs jobs of known accounts only, and you have none."
        return fail("account", what, "Ask the cluster's administrators.")
    return ok("account", f"charged to {site.account or 'your default account'}.")


def _container(snapshot: Snapshot, runtime: str) -> Finding:
    if runtime in snapshot.container_runtimes:
        return ok("container", f"{runtime} is here.")
    seen = {"pyxis": "srun has no --container-image", "apptainer": "apptainer is not on the PATH"}
    cure = "If the nodes have it and this machine has not, go on; else correct container.runtime."
    return warn("container", f"{seen[runtime]} here.", cure)


def _components(config: Fields, site: SiteConfig) -> Finding:
    if config.get("SchedulerType") != "sched/backfill":
        what = f"{config.get('SchedulerType')} does not start heterogeneous jobs; sched/backfill does."
        return (fail if site.layout == "het" else warn)("components", what, "layout: flat.")
    if "disable_hetjob_steps" in words(config, "SchedulerParameters"):
        return ok("components", "no job step may span components; none of ours does.")
    return ok("components", "heterogeneous jobs can run.")


def _requeue(config: Fields) -> Iterator[Finding]:
    delay_s = requeue_delay_s(config)
    what = f"a requeued job waits at least {delay_s:g} s before it starts again."
    cure = "Administrators: cred_expire in AuthInfo, or requeue_delay in SchedulerParameters."
    yield warn("requeue", what, cure) if delay_s > LONG_DELAY_S else ok("requeue", what)
    if config.get("JobRequeue") == "0":
        yield ok("requeue", "off unless asked for (JobRequeue=0); our jobs ask for it with --requeue.")


def _dead_nodes(config: Fields) -> Finding:
    timeout_s = duration_s(config, "SlurmdTimeout")
    if timeout_s == 0:
        what = "Slurm never calls a silent node down (SlurmdTimeout=0): it may give it to the next job."
        return warn("dead nodes", what, "Administrators: SlurmdTimeout=300.")
    if timeout_s < DETECTION_S:
        what = f"Slurm calls a node down after {timeout_s:g} s, perhaps before we do, and ends its job."
        return warn("dead nodes", what, f"Administrators: SlurmdTimeout of {DETECTION_S:g} or more.")
    return ok(
        "dead nodes", f"Slurm calls a node down after {timeout_s:g} s (SlurmdTimeout); we notice sooner."
    )


def _kill(config: Fields) -> Finding:
    kill_s = duration_s(config, "KillWait")
    what = f"{kill_s:g} s between SIGTERM and SIGKILL (KillWait)."
    if kill_s < SHORT_KILL_S:
        return warn("kill", what, "Little for processes that hold a GPU. Administrators: KillWait=30.")
    return ok("kill", what)


def _exit_codes(config: Fields) -> Iterator[Finding]:
    for key, says in (("RequeueExit", "requeues"), ("RequeueExitHold", "requeues and holds")):
        for code in sorted(set(words(config, key)) & set(OUR_EXIT_CODES)):
            what = f"Slurm {says} jobs that end with {code}; of us it means: {OUR_EXIT_CODES[code]}."
            yield warn("exit codes", what, f"Administrators: take {code} out of {key}.")
