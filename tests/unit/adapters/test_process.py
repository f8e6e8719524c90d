"""How children begin."""

import dataclasses
import os
import signal
import subprocess
import sys

from yatt.adapters.process import END, Identity, describe_exit, spawn


def test_a_child_can_be_ended_also_where_its_parent_was_told_to_ignore_the_signal(tmp_path):
    """As under nohup."""
    before = signal.signal(END, signal.SIG_IGN)
    try:
        child = spawn([sys.executable, "-c", "import time; time.sleep(60)"], env={}, log=tmp_path / "log")
    finally:
        signal.signal(END, before)
    child.send_signal(END)
    try:
        assert child.wait(timeout=10) == -END
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


def test_every_end_has_words():
    assert [describe_exit(code) for code in (0, 3, -9, -40)] == [
        "exit code 0", "exit code 3", "killed by SIGKILL", "killed by signal 40",
    ]  # fmt: skip
