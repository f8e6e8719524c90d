"""How children begin."""

import signal
import subprocess
import sys

from yatt.adapters.process import END, spawn


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
