"""Processes that a worker has started in sessions of their own end with it, and nothing else does."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import HANG_S, RunFile, command, environment

WORKER = """
import os, subprocess, sys, time

def sleeper(**how):
    return subprocess.Popen(["sleep", "120"], start_new_session=True, **how).pid

pids = [sleeper(), sleeper(env={})]
if sys.argv[1] == "with a daemon":
    shell = "setsid sleep 120 >/dev/null 2>&1 & echo $!"
    pids.append(int(subprocess.run(["sh", "-c", shell], capture_output=True, text=True).stdout))
print(*pids, flush=True)
time.sleep(120)
"""
CONTROLLER = """
import asyncio, json, os, subprocess, sys, time
from yatt.adapters.processes.orphans import MARK, adopt_orphans
from yatt.control.gpus.processes.supervisor import OrphanWatch

def lives(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

def start(name, how):
    worker = subprocess.Popen([sys.executable, "-c", WORKER, how], stdout=subprocess.PIPE, text=True,
                              start_new_session=True, env={**os.environ, MARK: name})
    return worker, [int(pid) for pid in worker.stdout.readline().split()]

WORKER = sys.argv[1]
adopt_orphans()
first, of_first = start("node/first.1", "plain")
second, of_second = start("node/second.1", "with a daemon")
own = subprocess.Popen(["sh", "-c", "sleep 3; exit 7"])
living = {first.pid: "node/first.1", second.pid: "node/second.1"}
watch = OrphanWatch(lambda: living)
asyncio.run(watch.look())
seen = {"all": [lives(pid) for pid in of_first + of_second]}
first.kill(), first.wait()
del living[first.pid]
watch.worker_ended()
asyncio.run(watch.look())
while any(lives(pid) for pid in of_first):
    time.sleep(0.01)
seen["first"], seen["second"] = [lives(pid) for pid in of_first], [lives(pid) for pid in of_second]
second.kill(), second.wait()
living.clear()
asyncio.run(watch.close())
seen["end"] = [lives(pid) for pid in of_first + of_second]
seen["zombies"] = [os.path.exists(f"/proc/{pid}") for pid in of_first + of_second]
seen["own"] = own.wait()
print(json.dumps(seen))
"""


def test_what_a_worker_left_ends_with_it_and_all_else_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CONTROLLER, WORKER],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "all": [True] * 5,
        "first": [False, False],
        "second": [True] * 3,  # one of them a daemon: an orphan whose worker lives
        "end": [False] * 5,
        "zombies": [False] * 5,
        "own": 7,
    }


LAUNCHER = """
import json, os, subprocess, sys, time
from yatt.adapters.processes.orphans import MARK, adopt_orphans, end_orphans

adopt_orphans()
pids = []
for program, marks in (("sleep", {MARK: "node/reward-p0.1"}), (sys.argv[1], {MARK: "x"}), ("sleep", {})):
    shell = "setsid $0 120 >/dev/null 2>&1 & echo $!"
    env = {**os.environ, **marks}
    pids.append(int(subprocess.run(["sh", "-c", shell, program], capture_output=True, env=env).stdout))
for pid in pids:
    while open(f"/proc/{pid}/cmdline", "rb").read().split(b"\\0")[1:] != [b"120", b""]:
        time.sleep(0.01)  # it is the shell still, or setsid
is_done = end_orphans((), 5.0, only_marked=True)
print(json.dumps([is_done, pids[2], [os.path.exists(f"/proc/{pid}") for pid in pids]]))
"""


def test_a_launcher_ends_what_workers_have_left_and_nothing_of_anybody_else(tmp_path: Path) -> None:
    """Also a program whose name the kernel cuts within a character."""
    program = tmp_path / "сервисданных"
    program.symlink_to(shutil.which("sleep") or "")
    argv = [sys.executable, "-c", LAUNCHER, str(program)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    is_done, strangers, live = json.loads(done.stdout)
    os.kill(strangers, signal.SIGKILL)
    assert (is_done, live) == (True, [False, False, True])


@pytest.mark.slow
def test_children_that_the_launcher_was_given_by_exec_live_on(tmp_path: Path) -> None:
    run = RunFile(tmp_path, {"trainer": {"total_iterations": 1}, "launch": {"nodes": 1}})
    line = shlex.join(command("run", str(run.write())))
    shell = f"setsid sleep 300 >/dev/null 2>&1 & echo $! >{tmp_path}/pid; sleep 0.3; exec {line}"
    done = subprocess.run(
        ["sh", "-c", shell], env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # raises if it is gone


WITHOUT_DESCRIPTORS = """
import asyncio, os, resource, subprocess, sys
from yatt.adapters.processes.orphans import MARK, adopt_orphans
from yatt.control.gpus.processes.supervisor import OrphanWatch

async def main():
    adopt_orphans()
    watch = OrphanWatch(lambda: {})
    running = asyncio.create_task(watch.run())
    await asyncio.sleep(0.2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    await asyncio.sleep(1.5)
    for number in taken:
        os.close(number)
    shell = "setsid sleep 120 >/dev/null 2>&1 & echo $!"
    env = {MARK: "gone/p.1"}
    pid = int(subprocess.run(["sh", "-c", shell], capture_output=True, env=env).stdout)
    while os.path.exists(f"/proc/{pid}"):
        await asyncio.sleep(0.1)
    print(running.done(), os.path.exists(f"/proc/{pid}"))

asyncio.run(main())
"""


def test_a_watch_without_descriptors_goes_on_when_there_are_some_again() -> None:
    argv = [sys.executable, "-c", WITHOUT_DESCRIPTORS]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.stdout.split() == ["False", "False"], done.stderr
