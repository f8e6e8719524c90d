"""The commands that read a run folder: status, watch."""

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from yatt import clock
from yatt.adapters.files.full_disk import fault_of_room
from yatt.adapters.processes.watched_trial import run_watched
from yatt.adapters.run_folder.run_config import load_run
from yatt.adapters.slurm.slurm import Slurm
from yatt.config.load import resolved_text, without_secrets
from yatt.errors import ConfigError
from yatt.launch.folder.folder import TRUSTED, refuse_strangers_run
from yatt.launch.folder.jobs import JobView, charged_gpu_s, job_view, present_state, state_in_words
from yatt.launch.folder.summary import LIVELY, Summary
from yatt.obs.page.comparison import MOST_RUNS, write_comparison
from yatt.obs.page.report import write_report
from yatt.obs.page.thumbnails import Thumbnail
from yatt.obs.story.account import Account, saves_in_words
from yatt.obs.story.slabs_now import slabs_in_words
from yatt.obs.story.view import RunView, counter_lines
from yatt.obs.story.words import duration_in_words, evaluated_in_words
from yatt.obs.terminal.console import Console
from yatt.obs.terminal.screen import Screen
from yatt.paths import RunPaths
from yatt.printable import printable_lines

REFRESH_S, JOB_S = 0.5, 5.0
OVER = ("finished", "stopped", "failed", "never began")

THUMBNAILS_S = 30.0
"""Longest time in which the process that makes small pictures begins with one."""

WRITES = "without it the run cannot go on"


def open_view(run: Path) -> RunView:
    """Returns the view of a run folder.

    Raises:
        ConfigError: it is not a run folder.
    """
    paths = RunPaths(run)
    paths.check_is_run()
    return RunView(paths, load_run(paths).trainer.total_iterations)


def status(run: Path, *, as_json: bool) -> int:
    """Prints the state of a run."""
    found = Summary(open_view(run).paths)
    no_room = fault_of_room(run) if found.fields["state"] != "finished" else ""
    if as_json:
        print(json.dumps({**found.as_json(), "no_room": no_room}, allow_nan=False))
        return 0
    summary = found.fields
    _say(
        f"{summary['run']}: {summary['state']}"
        + (f", attempt {summary['attempt']}" if summary["attempt"] else "")
    )
    if summary["why"]:
        _say(f"  why         {summary['why']}")
    if no_room:
        waits = "what the run writes waits for it for a while" if summary["state"] in LIVELY else WRITES
        _say(f"  disk        {no_room} in the run folder. Make room, or ask for a larger quota: {waits}.")
    _print_job(found.job)
    if summary["kind"] == "evaluation":
        _print_evaluated(summary)
    else:
        _print_training(found)
    _print_slabs(summary)
    for changed in summary["changes"]:
        _say(f"  changed     after attempt {changed['after']}: {'; '.join(changed['words'])}")
    if summary["unreadable_lines"]:
        _say(f"  unreadable  {summary['unreadable_lines']} damaged lines of events and metrics were skipped")
    _print_failure(summary)
    for worker, does in summary["workers"].items():
        _say(f"  {worker:24} {does}")
    return 0


def report(run: Path, out: Path | None) -> Path:
    """Writes the report of a run; returns its path.

    Raises:
        ConfigError: it is not a run folder, or the page cannot be written.
    """
    view = open_view(run)
    view.refresh()
    state, _ = state_in_words(view.paths, view.summary()["state"], job_view(view.paths, Slurm()))
    now = present_state(state, clock.wall_s())
    thumbnails = partial(_thumbnails, view.paths)
    return write_report(view.paths, out, charged_gpu_s(view.paths), now, thumbnails)


def _thumbnails(paths: RunPaths, names: Sequence[str]) -> dict[str, Thumbnail]:
    """Makes small pictures in a process of its own, since their files are of strangers.

    A run of another user may name any files and services, which would be read with this user's rights.
    """
    try:
        refuse_strangers_run(paths)
    except ConfigError:
        return {name: Thumbnail("", f"is another user's, whom {TRUSTED} does not name") for name in names}
    config = load_run(paths)
    arguments = [resolved_text(without_secrets(config)), list(names)]
    try:
        made = run_watched("yatt.media.thumbnails", arguments, THUMBNAILS_S, "The page has no others.")
    except ConfigError as error:
        return {name: Thumbnail("", str(error)) for name in names}
    return {name: Thumbnail(*json.loads(line)) for name, line in zip(names, made, strict=True)}


def compare(runs: list[Path], out: Path | None) -> Path:
    """Writes one page about several runs; returns its path.

    Raises:
        ConfigError: one is not a run folder, there are too many, or the page cannot be written.
    """
    if len(runs) > MOST_RUNS:
        raise ConfigError(f"a page compares at most {MOST_RUNS} runs, not {len(runs)}.")
    return write_comparison(runs, out or Path("comparison.html"))


def _print_slabs(summary: dict[str, Any]) -> None:
    for name, text in slabs_in_words(summary):
        _say(f"  {name:11} {text}")
    for slab, holder in summary["holders"].items():
        _say(f"  GPUs {slab:6} {holder}")


def _print_account(account: Account) -> None:
    if words := account.in_words():
        _say(f"  useful time {words}")
    if account.saves is not None and account.saves.is_founded and account.saves.is_far:
        _say(f"  saves       {saves_in_words(account.saves)}")


def _print_job(job: JobView) -> None:
    if job.job_id:
        again = f", started again {job.restarts} times" if job.restarts > 1 else ", started again once"
        _say(f"  job         {job.job_id}: {job.state}{again if job.restarts else ''}")
    for number, component in enumerate(job.components):
        _say(f"  component {number} {component}")


def _print_failure(summary: dict[str, Any]) -> None:
    waits = "waits " if summary["state"] in LIVELY else "waited"
    for alarm in summary["alarms"]:
        _say(f"  ALARM       {alarm['name']}: {alarm['message']}")
    for who, error in list(summary["waits"].items())[:1]:
        others = f" and {len(summary['waits']) - 1} more" if len(summary["waits"]) > 1 else ""
        _say(f"  {waits}      {who}{others} for the checkpoint store: {error}")
    for who, error in summary["silent_judges"].items():
        _say(f"  {waits}      for {who}: {error}")
    if dropped := summary["dropped_groups"]:
        why = summary["dropped_why"] or "see metrics.jsonl and events.jsonl for the reason"
        _say(f"  dropped     {dropped} prompt groups; {why}")
    for sentence in counter_lines(
        summary["late_writes"], summary["lost_lines"], summary["killed_reward_calls"]
    ):
        _say(f"  counted     {sentence}")


def _print_training(found: Summary) -> None:
    _print_progress(found.fields)
    if found.limit is not None:
        _say(f"  limit       {found.limit.in_words()}")
    _print_account(found.account)


def _print_evaluated(summary: dict[str, Any]) -> None:
    """Prints what is done of an evaluation, which has neither iterations nor checkpoints."""
    if summary["state"] in LIVELY:
        _say(f"  at          {summary['phase']}")
    for genrms, (done, total) in summary["evaluated"].items():
        _say(f"  prompts     {done} of {total} {evaluated_in_words(genrms)}")


def _print_progress(summary: dict[str, Any]) -> None:
    doing = f", {summary['phase']}" if summary["state"] in LIVELY else ""
    _say(f"  at          iteration {summary['iteration']}/{summary['total_iterations']}{doing}")
    if summary["reward"] is not None:
        _say(f"  reward      {summary['reward']:.4f}")
    if summary["throughput"] is not None and summary["step_s"] is not None:
        _say(f"  throughput  {summary['throughput']:.0f} tokens/s per GPU, step {summary['step_s']:.1f} s")
    if summary["eta_s"]:
        _say(f"  left        {duration_in_words(summary['eta_s'])}")
    uploading = f"; {summary['uploading']} is being uploaded" if summary["uploading"] else ""
    kept = f"; {summary['kept_locally']} is on the nodes' disks only" if summary["kept_locally"] else ""
    _say(f"  checkpoint  {summary['committed'] or 'none yet'}{uploading}{kept}")
    if failed := summary["failed_saves"]:
        saves = "save" if failed == 1 else f"{failed} saves"
        _say(f"  ALARM       the last {saves} failed: {summary['save_error']}")


def _say(text: str) -> None:
    """Prints lines. Control characters from a run's files are escaped, so they cannot affect the terminal."""
    print(printable_lines(text))


def watch(run: Path) -> int:
    """Follows a run until it ends, or until Ctrl-C. Waits for one that is not there yet.

    Raises:
        ConfigError: it is no run folder.
    """
    try:
        _wait_for_run(run)
        return _follow(open_view(run))
    except KeyboardInterrupt:
        return 0


def _wait_for_run(run: Path) -> None:
    """Waits for a run folder that is missing: it is made by the start. One that is there is not waited for,
    nor one whose parent is missing."""
    if run.exists() or not run.absolute().parent.is_dir():
        return
    _say(f"there is no folder {run.absolute()} yet: waiting for the run to start (Ctrl-C to end)")
    while not RunPaths(run).config.exists():
        time.sleep(REFRESH_S)


def _follow(view: RunView) -> int:
    console = Screen(view) if sys.stdout.isatty() else Console(view)
    asked_s, said = -JOB_S, ""
    try:
        while True:
            console.update()
            if clock.monotonic_s() - asked_s > JOB_S or view.is_finished:
                asked_s = clock.monotonic_s()
                job = job_view(view.paths, Slurm())
                state, why = state_in_words(view.paths, view.story.ended or "running", job)
                if state not in LIVELY and (text := f"{state}: {why}" if why else state) != said:
                    console.say(text)
                    said = text
                if state in OVER or state.startswith("cut off"):
                    return 0
            time.sleep(REFRESH_S)
    finally:
        console.close()
