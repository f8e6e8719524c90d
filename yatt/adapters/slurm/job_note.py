"""The Slurm job of a run (`RUN/job`), and the lock that is held while a job is submitted.

A job is identified by its id and its command. Slurm reuses ids, and other clusters have the same ones; users
and sites change names and comments. The command of a job does not change, and ours is a script in the run
folder with a unique name.
"""

import contextlib
import errno
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from yatt import clock
from yatt.adapters.files.files import create_exclusively, read_or_none, write_atomically
from yatt.adapters.processes.process import Identity
from yatt.adapters.slurm.slurm import Fields
from yatt.errors import DeadlineExceeded
from yatt.paths import RunPaths

WAIT_S = 60.0
"""Longest wait for another submitter of the same run."""

POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class JobNote:
    """The run's newest job. `command`: as Slurm shows it; empty if Slurm did not answer."""

    job: str
    command: str = ""


def noted_job(paths: RunPaths) -> JobNote | None:
    """Returns the recorded job; None if the run was never submitted, or if the record is not valid.

    Raises:
        OSError: the record exists but cannot be read.
    """
    text = (read_or_none(paths.job) or b"").decode(errors="replace").strip()
    try:
        content = json.loads(text or "{}")
        note = JobNote(**content) if isinstance(content, dict) and content else JobNote(text)
    except (ValueError, TypeError):
        return None
    is_id = isinstance(note.job, str) and note.job.isdigit() and isinstance(note.command, str)
    return note if is_id else None


def note_job(paths: RunPaths, job: str, shown: list[Fields] | None) -> None:
    """Records the run's newest job. `shown`: its components as Slurm shows them, None without an answer."""
    command = shown[0].get("Command", "") if shown else ""
    write_atomically(paths.job, (json.dumps(asdict(JobNote(job, command))) + "\n").encode())


def names_run(command: str, root: Path) -> bool:
    """Whether `yatt submit` has submitted a job with this command for the run in `root`, absolute."""
    return command.startswith(f"{RunPaths(root).submitit}/")


def is_same_job(noted: JobNote, shown: list[Fields], root: Path) -> bool:
    """Whether the job that Slurm shows under the recorded id is the recorded one. Ids are reused, so the
    command is compared, or the comment if the command is not known."""
    if not shown:
        return False
    command = shown[0].get("Command", "")
    if names_run(command, root) or (noted.command and command == noted.command):
        return True
    return not noted.command and shown[0].get("Comment", str(root)) == str(root)


@contextlib.contextmanager
def only_submitter(paths: RunPaths) -> Iterator[None]:
    """Context manager: only one process on any machine checks for a job of this run and submits one.

    Raises:
        DeadlineExceeded: another process submits, or was killed on another machine while it did.
        OSError: the run folder cannot be written.
    """
    place = paths.root / "submitting"
    until_s = clock.monotonic_s() + WAIT_S
    here = Identity.of(os.getpid())
    mine = json.dumps({**(asdict(here) if here else {}), "host": socket.gethostname()}).encode()
    with _only_here(paths.root, until_s):
        while not create_exclusively(place, mine):
            # We hold this machine's lock, so another claim of this machine is that of a dead process.
            if (holder := _holder(place)) is not None and holder.is_gone():
                place.unlink(missing_ok=True)
            elif clock.monotonic_s() > until_s:
                raise DeadlineExceeded(
                    f"another `yatt submit` of this run is active on another machine, or was killed there; "
                    f"nothing was queued. If it is not running, remove {place} and try again."
                )
            time.sleep(POLL_S)
        try:
            yield
        finally:
            if read_or_none(place) == mine:  # not another process's, if the folder was recreated
                place.unlink(missing_ok=True)


def _holder(place: Path) -> Identity | None:
    try:
        found = json.loads(read_or_none(place) or b"{}")
        return Identity(int(found["pid"]), str(found["begun"]), str(found["place"]))
    except (ValueError, TypeError, KeyError):
        return None


@contextlib.contextmanager
def _only_here(root: Path, until_s: float) -> Iterator[None]:
    """Lock for the processes of this machine: an abstract socket address, which the kernel frees when the
    process ends. Not every shared filesystem has file locks."""
    name = hashlib.sha256(os.fsencode(root.absolute())).hexdigest()[:32]
    with socket.socket(socket.AF_UNIX) as lock:
        while not _is_bound(lock, f"\0yatt-submit-{os.getuid()}-{name}"):
            if clock.monotonic_s() > until_s:
                raise DeadlineExceeded("another `yatt submit` of this run is active; nothing was queued.")
            time.sleep(POLL_S)
        yield


def _is_bound(lock: socket.socket, address: str) -> bool:
    try:
        lock.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True
