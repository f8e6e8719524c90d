"""A terminal that goes away under `yatt run`."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import termios
import time
from pathlib import Path

from tests.runs import HANG_S, RunFile, command, environment, living, rows, wait_for
from yatt.errors import EXIT_WILL_CONTINUE

LONG = {"trainer": {"total_iterations": 400}, "checkpoint": {"save_every": 100}, "launch": {"nodes": 1}}


def iterations(run: RunFile) -> int:
    return len(rows(run.run_dir / "metrics.jsonl"))


def start_on_a_terminal(run: RunFile) -> "tuple[subprocess.Popen[bytes], int]":
    """The command with a terminal of its own, and the descriptor whose closing closes that terminal."""
    ours, theirs = pty.openpty()

    def prepare() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup themselves

    process = subprocess.Popen(
        command("run", str(run.write())), env={**environment(), "TERM": "xterm"},
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=prepare,
    )  # fmt: skip
    os.close(theirs)
    return process, ours


def read_until(terminal: int, run: RunFile, count: int) -> None:
    """Read what is shown, as a terminal does, until so many iterations are done."""
    until_s = time.monotonic() + HANG_S
    while iterations(run) < count:
        assert time.monotonic() < until_s, f"no {count} iterations within {HANG_S:g} s"
        if select.select([terminal], [], [], 0.1)[0]:
            os.read(terminal, 1 << 16)


def test_a_terminal_that_is_closed_stops_the_run_with_everything_saved(tmp_path: Path) -> None:
    run = RunFile(tmp_path, LONG)
    process, terminal = start_on_a_terminal(run)
    try:
        read_until(terminal, run, 2)
        os.close(terminal)
        with contextlib.suppress(ProcessLookupError):  # a shell that ends tells its jobs once more
            process.send_signal(signal.SIGHUP)
        code = process.wait(timeout=300)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert code == EXIT_WILL_CONTINUE
    assert list((run.run_dir / "checkpoints" / "manifests").iterdir()), "saved before the first 100"
    assert not living(run.run_dir) and not run.leftovers()


def test_a_run_under_nohup_takes_no_notice_of_a_closed_terminal(tmp_path: Path) -> None:
    run = RunFile(tmp_path, LONG)
    process = subprocess.Popen(
        ["nohup", *command("run", str(run.write()))], env=environment(),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        wait_for(lambda: iterations(run) >= 1, timeout_s=90, what="the first iteration")
        process.send_signal(signal.SIGHUP)
        known = iterations(run)
        wait_for(lambda: iterations(run) >= known + 2, timeout_s=60, what="going on")
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == EXIT_WILL_CONTINUE
    assert said.decode().count("stopping: the work is saved first; a second signal") == 1
