"""How children begin."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import children_of
from tests.runs import HANG_S, environment, until, wait_for
from tests.standing_still import interpreter_that_stands_still
from yatt.adapters.processes import bound
from yatt.adapters.processes.process import END, ChildProgram, ChildStart, Identity, open_log, spawn

SLEEPER = "import time; print('begun', flush=True); time.sleep(60)"


def test_a_child_can_be_ended_also_where_its_parent_was_told_to_ignore_the_signal(tmp_path):
    """As under nohup."""
    before = signal.signal(END, signal.SIG_IGN)
    try:
        child = spawn([sys.executable, "-c", SLEEPER], env={}, log=tmp_path / "log")
    finally:
        signal.signal(END, before)
    wait_for(lambda: (tmp_path / "log").read_text(), what="the program to begin")
    child.send_signal(END)
    try:
        assert child.wait(timeout=HANG_S) == -END
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        raise


def test_a_process_is_told_from_another_of_its_number(tmp_path):
    child = spawn([sys.executable, "-c", "import time; time.sleep(60)"], env={}, log=tmp_path / "log")
    identity = Identity.of(child.pid)
    assert identity is not None and not identity.is_gone()
    assert dataclasses.replace(identity, begun="1").is_gone(), "its number was given again"
    assert not dataclasses.replace(identity, place="elsewhere").is_gone(), "nobody can tell from here"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert identity.is_gone(), "also before its parent has taken note"
    child.wait()
    assert identity.is_gone()


def test_signals_that_python_ignores_are_a_childs_own_again(tmp_path):
    assert (
        spawn(["sh", "-c", "grep SigIgn /proc/self/status"], env=os.environ, log=tmp_path / "log").wait() == 0
    )
    ignored = int((tmp_path / "log").read_text().split()[1], 16)
    assert not ignored & (1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1))


def test_workers_and_what_they_start_do_not_hear_signals_for_controllers(tmp_path):
    env = {**os.environ, bound.MARK: "node/worker"}
    shown = "sh -c 'grep SigIgn /proc/self/status'"
    assert spawn(["sh", "-c", shown], env=env, log=tmp_path / "log").wait() == 0
    ignored = int((tmp_path / "log").read_text().split()[1], 16)
    both = 1 << (signal.SIGUSR1 - 1) | 1 << (signal.SIGUSR2 - 1)
    assert ignored & both == both
    assert spawn(["sh", "-c", shown], env=os.environ, log=tmp_path / "other").wait() == 0
    assert not int((tmp_path / "other").read_text().split()[1], 16) & both


def test_a_program_that_does_not_exist_is_named(tmp_path):
    child = spawn(["/nowhere/srun"], env=os.environ, log=tmp_path / "log")
    assert child.wait(timeout=HANG_S) == bound.NOT_STARTED
    assert "/nowhere/srun cannot be started: No such file or directory" in (tmp_path / "log").read_text()


def started(tmp_path: Path, name: str, code: str) -> ChildStart:
    log = tmp_path / name
    return ChildStart(
        name, ChildProgram([sys.executable, "-c", code], os.environ), output=open_log(log), log=log
    )


def test_a_childs_end_is_heard_also_when_it_has_ended_before_anybody_listens(tmp_path):
    async def both() -> tuple[int, int]:
        child = await started(tmp_path, "short", "raise SystemExit(5)").begun
        await until(lambda: Identity.of(child.pid) is None, "its end")
        other = await started(tmp_path, "killed", SLEEPER).begun
        other.signal_group(signal.SIGKILL)
        return await child.ended, await other.ended

    assert asyncio.run(both()) == (5, -signal.SIGKILL)


PARENT = """
import asyncio, os, sys
from pathlib import Path
from yatt.adapters.processes.process import ChildStart, ChildProgram, open_log

async def main():
    argv = [sys.argv[1], "-c", sys.argv[3]]
    sys.executable = sys.argv[1]
    log = Path(sys.argv[2])
    start = ChildStart("child", ChildProgram(argv, os.environ), output=open_log(log), log=log)
    if sys.argv[4] == "begun":
        await start.begun
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@contextlib.contextmanager
def parent_of(python: str, log: Path, code: str, until: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that starts the code and says that it has; `until` "begun" or "started"."""
    argv = [sys.executable, "-c", PARENT, python, str(log), code, until]
    with subprocess.Popen(argv, env=environment(), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        try:
            yield parent
        finally:
            parent.kill()


def test_a_child_dies_with_its_parent(tmp_path):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with parent_of(sys.executable, tmp_path / "log", code, "begun"):
        pid = int(wait_for((tmp_path / "log").read_text, what="the child's number"))
    wait_for(lambda: Identity.of(pid) is None, what="the child to end")


def test_a_child_that_begins_after_its_parent_has_ended_does_nothing(tmp_path):
    """Its program stood still meanwhile."""
    with interpreter_that_stands_still(tmp_path / "venv/bin/python") as lease:
        python, log = str(tmp_path / "venv/bin/python"), tmp_path / "log"
        with parent_of(python, log, "print('it runs')", "started") as parent:
            (child,) = wait_for(lambda: children_of(parent.pid), what="a child")
            waits = Path(f"/proc/{child}/wchan")
            wait_for(lambda: "lease" in waits.read_text(), what="it to wait for its program")
        assert Identity.of(child) is not None
        lease.release()
        wait_for(lambda: Identity.of(child) is None, what="the child to end")
    assert log.read_text() == ""


def test_a_program_that_stands_still_holds_nobody_up_and_can_be_given_up(tmp_path, monkeypatch):
    before = children_of(os.getpid())

    async def main() -> None:
        start = started(tmp_path, "still", "print('it runs')")
        for _ in range(50):
            await asyncio.sleep(0.01)
        assert not start.begun.done()
        await until(lambda: children_of(os.getpid()) - before, "a child")
        assert children_of(os.getpid()) - before
        start.give_up()
        await start.over
        assert children_of(os.getpid()) <= before
        assert start.begun.cancelled()

    with interpreter_that_stands_still(tmp_path / "venv/bin/python"):
        monkeypatch.setattr(sys, "executable", str(tmp_path / "venv/bin/python"))
        asyncio.run(asyncio.wait_for(main(), HANG_S))
    assert (tmp_path / "still").read_text() == ""


def test_a_child_that_has_begun_meanwhile_is_given_up_too(tmp_path):
    async def main() -> None:
        start = started(tmp_path, "child", SLEEPER)
        child = await start.begun
        start.give_up()
        assert await child.ended == -signal.SIGKILL

    asyncio.run(asyncio.wait_for(main(), HANG_S))


ORPHANED = """
import asyncio, os, sys
from pathlib import Path
from tests.unit.adapters.test_process import started
from yatt.adapters.processes.orphans import MARK, adopt_orphans
from yatt.control.gpus.processes.supervisor import OrphanWatch

async def main(folder):
    adopt_orphans()
    living = {}
    watch, codes = OrphanWatch(lambda: living), []

    async def look():
        while True:
            watch.worker_ended()
            await watch.look()

    looking = asyncio.create_task(look())
    for number in range(int(sys.argv[2])):
        child = await started(folder, str(number), "raise SystemExit(5)").begun
        codes.append(await child.ended)
    looking.cancel()
    print(set(codes))

os.environ[MARK] = "node/another.1"
asyncio.run(main(Path(sys.argv[1])))
"""


def test_a_child_that_is_being_started_is_no_orphan(tmp_path):
    """Nobody knows its number yet while orphans are looked for without a pause."""
    done = subprocess.run(
        [sys.executable, "-c", ORPHANED, str(tmp_path), "40"],
        env=environment(), capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.stdout == "{5}\n", done.stderr


def test_a_program_that_cannot_be_executed_for_a_while_is_waited_for(tmp_path):
    """It is being written: ETXTBSY, as good as what a filesystem says that fails for a moment."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho it runs\n")
    program.chmod(0o755)
    with program.open("a"):
        child = spawn([str(program)], env=os.environ, log=tmp_path / "log")
        time.sleep(0.5)
        assert child.poll() is None and (tmp_path / "log").read_text() == ""
    assert child.wait(timeout=HANG_S) == 0
    assert (tmp_path / "log").read_text() == "it runs\n"


def test_a_start_that_cannot_even_be_tried_has_failed(tmp_path):
    async def main() -> str:
        log = tmp_path / "log"
        start = ChildStart("child", ChildProgram(["x"], {"A": "\0"}), output=open_log(log), log=log)
        with pytest.raises(OSError, match="null byte") as caught:
            await start.begun
        await start.over
        return str(caught.value)

    assert asyncio.run(asyncio.wait_for(main(), HANG_S))
