"""A submitted run seen from any login node: its job's state in words, and ending it."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yatt import clock
from yatt.adapters.job_note import JobNote, is_same_job, names_run, noted_job
from yatt.adapters.ledger import (
    ENDED,
    STARTED,
    STOP,
    attempts,
    newest_attempt,
    note,
    record,
    run_is_finished,
)
from yatt.adapters.process import Identity
from yatt.adapters.slurm import LIVING_STATES, Fields, Slurm, merged_state
from yatt.core.outcome import CANCEL
from yatt.errors import EXIT_FINISHED, EXIT_WILL_CONTINUE, ConfigError, DeadlineExceeded
from yatt.launch.plan import read_plan
from yatt.paths import RunPaths

Jobs = dict[str, list[Fields]]
POLL_S, LOOK_S = 0.5, 5.0
ACCOUNTS_S = 5.0
CANCEL_LIMIT_S, OVER_LIMIT_S = 600.0, 60.0

# Slurm's own words for why a job waits, and what they mean for a run.
WAITS = {
    "Resources": "waits until enough nodes are free",
    "Priority": "waits behind jobs of higher priority",
    "BeginTime": "was requeued; Slurm lets some time pass before it may start (cred_expire, requeue_delay)",
    "Dependency": "waits for the job before it to end",
    "JobHeldUser": "is held by its user: scontrol release {job}",
    "JobHeldAdmin": "is held by an administrator; ask them, or submit again with `yatt resume`",
    "launch failed requeued held": "could not be started: scontrol release {job}; its node is drained",
    "ReqNodeNotAvail": "asks for nodes that are down, drained or reserved",
    "BadConstraints": "asks for nodes that are not there, or is kept off too many: "
    "scontrol update jobid={job} ExcNodeList=",
    "PartitionDown": "waits for its partition, which is down",
    "PartitionTimeLimit": "asks for more time than its partition gives: change time_limit_min, submit again",
    "AssocGrpGRES": "waits: the account's share of GPUs is used up",
    "QOSMaxGRESPerUser": "waits: the user's share of GPUs is used up",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A run's newest job. `state` is empty if the run was never submitted, UNKNOWN if Slurm does not say."""

    job_id: str = ""
    state: str = ""
    components: tuple[str, ...] = ()
    why: str = ""
    restarts: int = 0

    @property
    def is_alive(self) -> bool:
        """Whether it runs, or will."""
        return self.state in LIVING_STATES


def job_view(paths: RunPaths, slurm: Slurm) -> JobView:
    """What Slurm says of the run's newest job: the noted one, or one that was submitted by hand."""
    noted, root = noted_job(paths), paths.root.absolute()
    found = slurm.show_job(noted.job) if noted else []
    if noted and found is None:
        return JobView(job_id=noted.job, state="UNKNOWN", why="Slurm does not answer")
    if noted and found and not is_same_job(noted, found, root):
        found = []
    view = view_of(paths, noted.job if noted else "", found or [])
    if view.is_alive or not paths.plan.exists():
        return view
    mine = slurm.queue("--me")
    newest = _by_hand(paths, mine or {})
    shown = slurm.show_job(newest) if newest not in ("", view.job_id) else []
    if mine is None or shown is None:
        return JobView(job_id=view.job_id, state="UNKNOWN", why="Slurm does not answer")
    return view_of(paths, newest, shown) if shown else view


def _by_hand(paths: RunPaths, mine: Jobs) -> str:
    """The newest of my jobs that is the run's; empty if none is. One that was submitted by hand has the name
    that `yatt submit --prepare` printed: a script's arguments newer versions of Slurm do not show."""
    try:
        name = read_plan(paths).by_hand
    except ConfigError:
        return ""
    root = paths.root.absolute()
    ours = (
        job
        for job, (leader, *_) in mine.items()
        if names_run(leader["Command"], root) or (name and leader["JobName"] == name)
    )
    return max(ours, key=int, default="")


def view_of(paths: RunPaths, job_id: str, found: list[Fields]) -> JobView:
    """The view of a job as Slurm shows it; of one that it does not know, if `found` is empty."""
    if not job_id:
        return JobView()
    if not found:
        return JobView(
            job_id=job_id, state="FORGOTTEN", why="Slurm has forgotten the job: it ended some time ago"
        )
    state = merged_state(found)
    why = _why(job_id, state, found[0]) or _never_began(paths, job_id, state, found[0])
    return JobView(
        job_id=job_id, state=state, components=tuple(map(_component, found)), why=why,
        restarts=int(found[0].get("Restarts", "0")),
    )  # fmt: skip


def queued_views(runs: list[RunPaths], slurm: Slurm, limit_s: float) -> list[JobView]:
    """What Slurm says of each run's newest job, all by two calls beside each other."""
    noted = [_readable_note(paths) for paths in runs]
    ids = ",".join(sorted({each.job for each in noted if each}))
    with ThreadPoolExecutor(max_workers=2) as pool:
        asked = pool.submit(slurm.queue, f"--jobs={ids}", "--states=all", limit_s=limit_s) if ids else None
        mine = slurm.queue("--me", limit_s=limit_s)
        jobs = asked.result() if asked else {}
    return [_queued_view(*each, jobs, mine or {}) for each in zip(runs, noted, strict=True)]


def _readable_note(paths: RunPaths) -> JobNote | None:
    """None also where it is another person's and cannot be read."""
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
        view = view_of(paths, noted.job, found if is_same_job(noted, found, root) else [])
    newest = "" if view.is_alive else _by_hand(paths, mine)
    return view_of(paths, newest, mine[newest]) if newest else view


def charged_gpu_s(paths: RunPaths) -> float | None:
    """GPU seconds of the run's jobs as Slurm counted them; None where it has not, or does not say soon."""
    jobs = {str(job) for attempt in attempts(paths) if (job := attempt.started.get("job"))}
    return Slurm().charged_gpu_s(jobs, ACCOUNTS_S)


def state_in_words(paths: RunPaths, seen: str, job: JobView) -> tuple[str, str]:
    """What a run is doing, and why; its folder alone cannot know of a job that waits or is gone.

    Args:
        seen: what the run's events say: running, stopped, failed or finished.
    """
    attempt = newest_attempt(paths)
    ended = record(paths, attempt, ENDED)
    if run_is_finished(paths):
        return "finished", ""
    if job.is_alive:
        return _living(job, attempt, is_between=bool(ended) or seen != "running"), job.why
    if ended:
        is_stopped = ended.get("exit_code") == EXIT_WILL_CONTINUE
        return "stopped" if is_stopped else "failed", str(ended.get("reason", ""))
    if not job.job_id and is_cut_off(paths, attempt):
        return "cut off: its process is gone", "killed, or the machine was; `yatt resume` goes on"
    if not job.job_id or job.state == "UNKNOWN":
        return seen if attempt else "not begun", job.why
    return (f"cut off: job {job.job_id} is {job.state}" if attempt else "never began"), job.why


def is_cut_off(paths: RunPaths, attempt: int) -> bool:
    """Whether this attempt was started on this machine, not by Slurm, and its launcher died in silence."""
    launcher: dict[str, Any] = record(paths, attempt, STARTED).get("launcher", {})
    return bool(launcher) and not record(paths, attempt, ENDED) and Identity(**launcher).is_gone()


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
    if state != "PENDING" and state != "REQUEUE_HOLD":
        return ""
    reason = leader.get("Reason", "").replace("_", " ").removeprefix("None")
    for name, text in WAITS.items():
        if reason == name or name in reason:
            return f"{reason}: {text.format(job=job_id)}"
    return reason


def _never_began(paths: RunPaths, job_id: str, state: str, leader: Fields) -> str:
    """A job whose node does not see the run folder ends without a word."""
    if state in LIVING_STATES or state == "CANCELLED" or newest_attempt(paths):
        return ""
    log = paths.submitit / f"{job_id}_0_log.out"
    if log.exists():
        return f"the job ended before the run began; its log is {log}"
    where = leader.get("BatchHost") or leader.get("NodeList", "")
    return f"the job ended before the run began, without a log: probably {where} does not see {paths.root}"


def cancel(paths: RunPaths, slurm: Slurm, *, now: bool) -> str:
    """End a run: cleanly, with a checkpoint, or at once; gives what was done.

    Raises:
        ConfigError: nothing of it runs or waits.
        DeadlineExceeded: it did not end.
    """
    view, attempt = job_view(paths, slurm), newest_attempt(paths)
    is_running = bool(record(paths, attempt, STARTED)) and not record(paths, attempt, ENDED)
    is_running = is_running and not is_cut_off(paths, attempt)
    _check_can_cancel(paths, view)
    if view.job_id and (now or view.state != "RUNNING" or not is_running):
        reply = slurm.call("scancel", view.job_id)
        if reply.code != 0:
            raise DeadlineExceeded(f"scancel {view.job_id}: {reply.says}")
        _wait_until_over(paths, slurm)
        return f"job {view.job_id} cancelled; the run goes on from its newest checkpoint with `yatt resume`"
    if not is_running:
        raise ConfigError(f"nothing of {paths.root} is running.")
    return _stop(paths, attempt, slurm)


def _check_can_cancel(paths: RunPaths, view: JobView) -> None:
    if run_is_finished(paths) and not view.is_alive:
        raise ConfigError(f"{paths.root} is finished: there is nothing to cancel.")
    if view.state == "UNKNOWN":
        raise DeadlineExceeded(f"Slurm does not answer, so job {view.job_id} cannot be cancelled; try again.")
    if view.job_id and not view.is_alive:
        raise ConfigError(f"job {view.job_id} is over ({view.state}): there is nothing to cancel.")


def _stop(paths: RunPaths, attempt: int, slurm: Slurm) -> str:
    """Tell the leader through the run folder, and wait until the attempt has ended."""
    note(paths, attempt, STOP, {"reason": CANCEL})
    sys.stdout.write(f"attempt {attempt} saves and stops; waiting for it (Ctrl-C leaves it to do so)\n")
    sys.stdout.flush()
    until_s = clock.monotonic_s() + CANCEL_LIMIT_S
    looked_s = clock.monotonic_s()
    while not record(paths, attempt, ENDED):
        if clock.monotonic_s() > until_s:
            raise DeadlineExceeded(
                f"attempt {attempt} did not end in {CANCEL_LIMIT_S:g} s; --now ends it at once"
            )
        if clock.monotonic_s() > looked_s + LOOK_S:
            looked_s = clock.monotonic_s()
            _check_is_there(paths, attempt, slurm)
        time.sleep(POLL_S)
    _wait_until_over(paths, slurm)
    ended = record(paths, attempt, ENDED)
    if ended.get("exit_code") == EXIT_FINISHED:
        return "it finished before it could be stopped"
    return f"stopped after iteration {ended.get('committed')}, which is saved; `yatt resume` goes on"


def _wait_until_over(paths: RunPaths, slurm: Slurm) -> None:
    """So that what a person types next, `yatt resume` say, finds the job gone; Slurm needs its KillWait."""
    until_s = clock.monotonic_s() + OVER_LIMIT_S
    while job_view(paths, slurm).is_alive and clock.monotonic_s() < until_s:
        time.sleep(POLL_S)


def _check_is_there(paths: RunPaths, attempt: int, slurm: Slurm) -> None:
    view = job_view(paths, slurm)
    if is_cut_off(paths, attempt):
        over = "its process is gone"
    elif view.job_id and not view.is_alive and view.state != "UNKNOWN":
        over = f"job {view.job_id} is {view.state}"
    else:
        return
    raise DeadlineExceeded(
        f"{over} and attempt {attempt} did not save; `yatt resume` goes on from the newest checkpoint"
    )


def job_to_wait_for(text: str, slurm: Slurm) -> str:
    """The id that `--after` means: a job's, or that of a run's newest job; empty if that is over.

    Raises:
        ConfigError: it is neither.
        DeadlineExceeded: Slurm does not answer.
    """
    if not text or text.isdigit():
        return text
    paths = RunPaths(Path(text).absolute())
    if not paths.config.exists():
        raise ConfigError(f"--after {text}: neither a job's id nor a run folder.")
    view = job_view(paths, slurm)
    if view.state == "UNKNOWN":
        raise DeadlineExceeded(f"--after {text}: Slurm does not answer; try again.")
    return view.job_id if view.is_alive else ""
