"""`yatt stack`: stacks of running processes, also of one that hangs; no process is harmed."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs import ROOT, RunFile, environment, kill, living, start, wait_for, yatt
from yatt.adapters.processes.stack_dump import MOST_BYTES, REQUEST, run_mark, stacks_here
from yatt.core.attempts.exits import describe_exit

pytestmark = pytest.mark.slow

HANGS = """
import ctypes, os
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    Path({mark!r}).touch()
    hang_in_c()
    return 1.0

def hang_in_c():
    ctypes.PyDLL(None).sleep(600)  # holds the GIL
"""

PREPARED = """
import os, sys, threading, time
from yatt.adapters.processes.stack_dump import answer_stack_requests
answer_stack_requests(sys.argv[1], "worker.1", 3)
def deep():
    print("ready", flush=True)
    time.sleep(600)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
deep()
"""

NAMED_ONLY = """
import os, sys, time
file = os.memfd_create(f"yatt-stack:{sys.argv[1]}:1:x")
print("ready", flush=True)
time.sleep(600)
"""

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    made: list[subprocess.Popen[str]] = []

    def child(code: str, *arguments: str) -> "subprocess.Popen[str]":
        argv = [sys.executable, "-c", code, *arguments]
        process = subprocess.Popen(argv, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
        made.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    yield child
    for process in made:
        process.kill()
        process.communicate()


def test_a_process_writes_the_stacks_of_all_its_threads_as_often_as_it_is_asked(
    spawn: Spawn, tmp_path: Path
) -> None:
    process = spawn(PREPARED, str(tmp_path))
    for _ in range(3):
        (dump,) = stacks_here(tmp_path, 20)
        assert (dump.name, dump.attempt, dump.pid) == ("worker.1", 3, process.pid)
        assert dump.text.count("most recent call first") == 2 and "in deep" in dump.text
    assert process.poll() is None
    assert stacks_here(tmp_path / "other", 1) == []


def test_a_kernel_without_pidfds_is_enough(spawn: Spawn, tmp_path: Path, monkeypatch) -> None:
    def not_there(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    spawn(PREPARED, str(tmp_path))
    monkeypatch.setattr(os, "pidfd_open", not_there)
    assert "in deep" in stacks_here(tmp_path, 20)[0].text


def test_what_was_written_is_removed_before_it_is_large(spawn: Spawn, tmp_path: Path, monkeypatch) -> None:
    process = spawn(PREPARED, str(tmp_path))
    monkeypatch.setattr("yatt.adapters.processes.stack_dump.MOST_BYTES", 1000)
    assert MOST_BYTES > 1000
    texts = [stacks_here(tmp_path, 20)[0].text for _ in range(8)]
    assert all(text.count("most recent call first") == 2 for text in texts)
    (file,) = [f for f in Path(f"/proc/{process.pid}/fd").iterdir() if "yatt-stack" in os.readlink(f)]
    assert os.stat(file).st_size <= 1000 + len(texts[0])


def test_a_process_without_a_handler_gets_no_signal_and_would_ignore_it(spawn: Spawn, tmp_path: Path) -> None:
    process = spawn(NAMED_ONLY, run_mark(tmp_path))
    assert stacks_here(tmp_path, 1) == []
    os.kill(process.pid, REQUEST)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)


def test_a_stopped_process_is_named_as_one_that_did_not_answer(spawn: Spawn, tmp_path: Path) -> None:
    process = spawn(PREPARED, str(tmp_path))
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: stacks_here(tmp_path, 0.3)[0].state.startswith("T"), what="the stop")
    assert stacks_here(tmp_path, 0.5)[0].text == ""
    process.send_signal(signal.SIGCONT)
    assert "in deep" in stacks_here(tmp_path, 20)[0].text


def stacks(run: RunFile, *arguments: str) -> dict[str, dict[str, Any]]:
    done = yatt("stack", str(run.run_dir), "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return {each["name"]: each for each in json.loads(done.stdout)["processes"]}


def test_every_process_of_a_run_shows_its_stack_also_one_that_hangs_and_holds_the_gil(tmp_path: Path) -> None:
    run, mark = RunFile(tmp_path), tmp_path / "mark"
    run.write()
    (tmp_path / "reward.py").write_text(HANGS.format(mark=str(mark)))
    process = start("run", str(run.write()))
    try:
        wait_for(mark.exists, timeout_s=120, what="the hanging call")
        before = living(run.run_dir)
        found = stacks(run)
        kinds = {re.split(r"[-.\d]", name)[0] for name in found}
        assert kinds == {"launcher", "node", "trainer", "rollout", "reward", "uploader", "nursery"}
        assert {each["pid"] for each in found.values()} >= before.keys() - {process.pid}
        assert all("most recent call first" in each["text"] for each in found.values()), found
        assert any("in hang_in_c" in each["text"] for each in found.values())
        assert "run_forever" in found["node0"]["text"] and found["node0"]["attempt"] == 1
        shown = yatt("stack", str(run.run_dir), "--role", "reward").stdout
        assert "== reward-n" in shown and "hang_in_c" in shown and "== node" not in shown
        assert living(run.run_dir) == before, "none was harmed"
    finally:
        process.kill()
        for pid in living(run.run_dir):
            kill(pid)
        process.communicate()
    wait_for(lambda: not living(run.run_dir), what="all to be gone")
    assert "no process of" in yatt("stack", str(run.run_dir)).stderr


def test_requests_do_not_disturb_a_run(tmp_path: Path) -> None:
    run = RunFile(tmp_path, {"trainer": {"total_iterations": 8}})
    process, asked = start("run", str(run.write())), 0
    while process.poll() is None:
        asked += len(stacks_here(run.run_dir, 0.2))
    out, _ = process.communicate()
    assert process.returncode == 0, f"{describe_exit(process.returncode)}: {out}"
    assert asked > 50
