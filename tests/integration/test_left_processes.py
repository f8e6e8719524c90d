"""Processes that a worker has started in sessions of their own end with it, and nothing else does."""

import json
import subprocess
import sys

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
from yatt.adapters.orphans import MARK, adopt_orphans
from yatt.control.orphans import OrphanWatch

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
watch.look(has_ended=False)
seen = {"all": [lives(pid) for pid in of_first + of_second]}
first.kill(), first.wait()
del living[first.pid]
watch.look(has_ended=True)
time.sleep(0.3)
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
        [sys.executable, "-c", CONTROLLER, WORKER], capture_output=True, text=True, timeout=60, check=False
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
