"""State of a submitted run's job, from any login node."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from yatt.adapters.processes.process import Identity
from yatt.adapters.run_folder.ledger import (
    ENDED,
    STARTED,
    newest_attempt,
    record_of_attempt,
    run_is_finished,
    started_attempts,
)
from yatt.adapters.slurm.job_note import JobNote, is_same_job, names_run, noted_job
from yatt.adapters.slurm.slurm import LIVING_STATES, Fields, Slurm, merged_state
from yatt.core.figures.goodput import QUEUE, RUN, START_UP, Now
from yatt.errors import EXIT_WILL_CONTINUE, ConfigError, DeadlineExceeded
from yatt.launch.resolve.plan import read_job_plan
from yatt.paths import RunPaths

Jobs = dict[str, list[Fields]]
ACCOUNTS_S = 5.0

# Slurm's reasons why a job waits, and their explanation.
WAITS = {
    "Resources": "waits until enough nodes are free",
    "Priority": "waits behind jobs of higher priority",
    "BeginTime": "was requeued; Slurm lets some time pass before it may start (cred_expire, requeue_delay)",
    "Dependency": "waits for the job that it depends on to end",
    "JobHeldUser": "is held by its user: scontrol release {job}",
    "JobHeldAdmin": "is held by an administrator; ask them, or submit again with `yatt resume`",
    "launch failed requeued held": "could not be started, its node is drained: scontrol release {job}",
    "ReqNodeNotAvail, Reserved for maintenance": "would still run when a maintenance begins: a smaller "
    "time_limit_min may start before it",
    "ReqNodeNotAvail": "requests nodes that are down, drained or reserved",
    "BadConstraints": "requests nodes that do not exist, or excludes too many nodes: "
    "scontrol update jobid={job} ExcNodeList=",
    "PartitionDown": "waits for its partition, which is down",
    "PartitionTimeLimit": "requests more time than its partition allows: lower time_limit_min, submit again",
    "AssocGrpGRES": "waits: the account's share of GPUs is used up",
    "QOSMaxGRESPerUser": "waits: the user's share of GPUs is used up",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """The newest job of a run. `state` is empty if none was submitted, UNKNOWN if Slurm does not answer."""

    job_id: str = ""
    state: str = ""
    components: tuple[str, ...] = ()
    why: str = ""
    restarts: int = 0

    @property
    def is_alive(self) -> bool:
        """Whether the job runs or will run."""
        return self.state in LIVING_STATES


def job_view(paths: RunPaths, slurm: Slurm) -> JobView:
    """Returns the run's newest job: the recorded one, or one that was submitted by hand."""
    noted, root = noted_job(paths), paths.root.absolute()
    found = slurm.show_job(noted.job) if noted else []
    if noted and found is None:
        return JobView(job_id=noted.job, state="UNKNOWN", why="Slurm does not answer")
    if noted and found and not is_same_job(noted, found, root):
        found = []
    view = shown_job(paths, noted.job if noted else "", found or [])
    if view.is_alive or not paths.plan.exists():
        return view
    mine = slurm.queue("--me")
    newest = _by_hand(paths, mine or {})
    shown = slurm.show_job(newest) if newest not in ("", view.job_id) else []
    if mine is None or shown is None:
        return JobView(job_id=view.job_id, state="UNKNOWN", why="Slurm does not answer")
    return shown_job(paths, newest, shown) if shown else view


def _by_hand(paths: RunPaths, mine: Jobs) -> str:
    """Returns the id of the user's newest job of this run, or ''. A job submitted by hand has the name that
    `yatt submit --prepare` printed: newer versions of Slurm do not show a script's arguments."""
    try:
        name = read_job_plan(paths).by_hand
    except ConfigError:
        return ""
    root = paths.root.absolute()
    ours = (
        job
        for job, (leader, *_) in mine.items()
        if names_run(leader["Command"], root) or (name and leader["JobName"] == name)
    )
    return max(ours, key=int, default="")


def shown_job(paths: RunPaths, job_id: str, found: list[Fields]) -> JobView:
    """Returns the view of a job; `found` is empty if Slurm has no record of it."""
    if not job_id:
        return JobView()
    if not found:
        view = JobView(job_id=job_id, state="FORGOTTEN")
        why = _never_began(paths, view) or "Slurm has no record of the job: it ended some time ago"
        return replace(view, why=why)
    state = merged_state(found)
    view = JobView(
        job_id=job_id,
        state=state,
        components=tuple(map(_component, found)),
        why=_why(job_id, state, found[0]),
        restarts=int(found[0].get("Restarts", "0")),
    )
    return view if view.why else replace(view, why=_never_began(paths, view, found[0]))


def queued_views(runs: list[RunPaths], slurm: Slurm, limit_s: float) -> list[JobView]:
    """Returns each run's newest job, with two parallel calls to Slurm for all of them."""
    noted = [_readable_note(paths) for paths in runs]
    ids = ",".join(sorted({each.job for each in noted if each}))
    with ThreadPoolExecutor(max_workers=2) as pool:
        asked = pool.submit(slurm.queue, f"--jobs={ids}", "--states=all", limit_s=limit_s) if ids else None
        mine = slurm.queue("--me", limit_s=limit_s)
        jobs = asked.result() if asked else {}
    return [_queued_view(*each, jobs, mine or {}) for each in zip(runs, noted, strict=True)]


def _readable_note(paths: RunPaths) -> JobNote | None:
    """Returns the recorded job; None also if the file belongs to another user and cannot be read."""
    try:
        return noted_job(paths)
    except OSError:
        return None


def _queued_view(paths: RunPaths, noted: JobNote | None, jobs: Jobs | None, mine: Jobs) -> JobView:
    root, view = paths.root.absolute(), JobView()
    if noted is not None and jobs is None:
        return JobView(job_id=noted.job, state="UNKNOWN", why="Slurm does not answer")
    if noted is not None:
        found = (jobs or {}).get(noted.job, [])
        view = shown_job(paths, noted.job, found if is_same_job(noted, found, root) else [])
    newest = "" if view.is_alive else _by_hand(paths, mine)
    return shown_job(paths, newest, mine[newest]) if newest else view


def charged_gpu_s(paths: RunPaths) -> float | None:
    """GPU seconds of the run's jobs by Slurm's accounting; None if there is none, or no answer soon."""
    jobs = {str(job) for attempt in started_attempts(paths) if (job := attempt.started.get("job"))}
    return Slurm().charged_gpu_s(jobs, ACCOUNTS_S)


def state_in_words(paths: RunPaths, seen: str, job: JobView) -> tuple[str, str]:
    """Returns the state of a run, and the reason; combines its folder with the state of its job.

    Args:
        seen: state by the run's events: running, stopped, failed or finished.
    """
    attempt = newest_attempt(paths)
    ended = record_of_attempt(paths, attempt, ENDED)
    if run_is_finished(paths):
        return "finished", ""
    if job.is_alive:
        return _living(job, attempt, is_between=bool(ended) or seen != "running"), job.why
    if attempt and (why := _never_began(paths, job)):
        return "stopped", job.why or why
    if ended:
        is_stopped = ended.get("exit_code") == EXIT_WILL_CONTINUE
        return "stopped" if is_stopped else "failed", str(ended.get("reason", ""))
    if not job.job_id and is_cut_off(paths, attempt):
        return (
            "cut off: its process is gone",
            "the process was killed, or the machine went down; `yatt resume` resumes",
        )
    if not job.job_id or job.state == "UNKNOWN":
        return seen if attempt else "not begun", job.why
    return (f"cut off: job {job.job_id} is {job.state}" if attempt else "never began"), job.why


def present_state(state: str, at_s: float) -> Now | None:
    """Returns what a run in this state does now, for its account; None if it is over.

    Args:
        state: from `state_in_words`.
        at_s: wall seconds.
    """
    doing = {"running": RUN, "starting": RUN, "waiting": QUEUE, "between attempts": START_UP}.get(state)
    return None if doing is None else Now(at_s=at_s, doing=doing)


def is_cut_off(paths: RunPaths, attempt: int) -> bool:
    """Whether this attempt was started on this machine, without Slurm, and its launcher was killed."""
    launcher: dict[str, Any] = record_of_attempt(paths, attempt, STARTED).get("launcher", {})
    return bool(launcher) and not record_of_attempt(paths, attempt, ENDED) and Identity(**launcher).is_gone()


def _living(job: JobView, attempt: int, *, is_between: bool) -> str:
    if job.state not in ("RUNNING", "COMPLETING"):
        return "waiting"
    if not attempt:
        return "starting"
    return "between attempts" if is_between else "running"


def _component(fields: Fields) -> str:
    nodes = fields.get("NodeList", "")
    wanted = fields.get("NumNodes", "?").partition("-")[0]
    where = nodes if nodes not in ("", "(null)") else f"{wanted} nodes wanted"
    return f"{fields.get('JobState', '?')} in {fields.get('Partition', '?')}: {where}"


def _why(job_id: str, state: str, leader: Fields) -> str:
    if state == "SUSPENDED":
        return f"Slurm has suspended the job; whoever did so lets it go on (scontrol resume {job_id})"
    if state != "PENDING" and state != "REQUEUE_HOLD":
        return ""
    reason = leader.get("Reason", "").replace("_", " ").removeprefix("None")
    for name, text in WAITS.items():
        if reason == name or name in reason:
            return f"{reason}: {text.format(job=job_id)}"
    return reason


def _never_began(paths: RunPaths, job: JobView, leader: Fields | None = None) -> str:
    """Explains a job that ended before an attempt of it began, for example on a node without the run folder,
    or because its script does not fit; empty for all others.

    Args:
        leader: its first component, as Slurm shows it.
    """
    if job.is_alive or job.state in ("", "CANCELLED", "UNKNOWN") or not _is_newer(job.job_id, paths):
        return ""
    ended = (
        f"job {job.job_id} ended before {'an attempt of it' if newest_attempt(paths) else 'the run'} began"
    )
    log = paths.submitit / f"{job.job_id}_0_log.out"
    if log.exists():
        return f"{ended}; see its log {log}"
    if leader is None:
        return f"{ended}, without a log in {paths.submitit}"
    where = leader.get("BatchHost") or leader.get("NodeList", "")
    return f"{ended}, without a log: probably {where} does not see {paths.root}"


def _is_newer(job_id: str, paths: RunPaths) -> bool:
    """Whether a job was submitted after the one of the newest attempt."""
    attempt = newest_attempt(paths)
    before = str(record_of_attempt(paths, attempt, STARTED).get("job", "")) if attempt else "0"
    return job_id.isdigit() and before.isdigit() and int(job_id) > int(before)


def job_to_wait_for(text: str, slurm: Slurm) -> str:
    """Returns the job id for `--after`: the given one, or a run's newest job; '' if that has ended.

    Raises:
        ConfigError: the text is neither a job id nor a run folder.
        DeadlineExceeded: Slurm does not answer.
    """
    if not text or text.isdigit():
        return text
    paths = RunPaths(Path(text).absolute())
    if not paths.config.exists():
        raise ConfigError(f"--after {text}: this is neither a job id nor a run folder.")
    view = job_view(paths, slurm)
    if view.state == "UNKNOWN":
        raise DeadlineExceeded(f"--after {text}: Slurm does not answer; try again.")
    return view.job_id if view.is_alive else ""
