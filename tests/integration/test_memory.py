"""Resident memory of process groups: real processes, and a look at all of them only when one was started."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs import HANG_S, wait_for
from tests.unit.core.test_placement import config
from yatt.adapters.machine.memory import FRESH_S, ProcessGroups
from yatt.adapters.processes.process import Child
from yatt.control.gpus.memory_check import SlotMemoryCheck
from yatt.control.gpus.processes.supervisor import Supervisor
from yatt.control.node import Node
from yatt.core.gpus.placement import ROLLOUT, TRAINER, placement_of
from yatt.obs.story.events import EventLog
from yatt.paths import RunPaths

MIB = 1 << 20
HOLD = """
import os, sys, time
def fill():
    global held
    held = bytearray(os.urandom(1 << 20) * {mib})
fill()
print("full", flush=True)
for line in sys.stdin:
    if line.strip() == "free":
        held = None
        print("empty", flush=True)
    if line.strip() == "fork" and os.fork() == 0:
        fill()
        print(os.getpid(), flush=True)
        time.sleep(600)
"""


@pytest.fixture
def worker() -> Iterator[subprocess.Popen]:
    """A process in a group of its own that holds 20 MiB, and 20 more in a child when told to fork."""
    argv = [sys.executable, "-c", HOLD.format(mib=20)]
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout.readline() == "full\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=HANG_S)


def fork(worker: subprocess.Popen) -> int:
    """The pid of a new child of the worker, once it holds its memory."""
    worker.stdin.write("fork\n")
    worker.stdin.flush()
    return int(worker.stdout.readline())


def test_the_peak_is_that_of_the_largest_process_and_stays(worker):
    groups = ProcessGroups()
    fork(worker)
    held = groups.resident_bytes([worker.pid], time.monotonic())[worker.pid]
    peak = groups.peak_bytes([worker.pid], time.monotonic())[worker.pid]
    assert held > 40 * MIB and 20 * MIB < peak < held
    worker.stdin.write("free\n")
    worker.stdin.flush()
    assert worker.stdout.readline() == "empty\n"
    assert groups.resident_bytes([worker.pid], time.monotonic())[worker.pid] < held - 15 * MIB
    assert groups.peak_bytes([worker.pid], time.monotonic())[worker.pid] >= peak


def test_a_child_that_was_started_since_is_found(worker: subprocess.Popen) -> None:
    census = ProcessGroups()
    for second in range(3):
        before = census.resident_bytes([worker.pid], second * 0.1)[worker.pid]
    child = fork(worker)
    assert census.members([worker.pid], 0.3) == {worker.pid: worker.pid, child: worker.pid}
    kept = census.resident_bytes([worker.pid], 0.3)[worker.pid]
    assert 20 * MIB <= before < 40 * MIB <= kept < 80 * MIB


def test_memory_that_grows_is_seen_without_a_new_look(worker: subprocess.Popen) -> None:
    count = itertools.chain((1, 2), itertools.repeat(2))
    census = ProcessGroups(lambda: next(count))
    child = fork(worker)
    census.members([worker.pid], 0.0)
    kept = census.resident_bytes([worker.pid], 0.1)[worker.pid]
    os.kill(child, signal.SIGKILL)
    less = lambda: census.resident_bytes([worker.pid], 0.2)[worker.pid] < kept - 15 * MIB  # noqa: E731
    wait_for(less, what="the memory of the child to be free")


def test_a_look_is_used_while_nobody_was_born_and_only_so_long(worker: subprocess.Popen) -> None:
    count = itertools.chain((1, 2), itertools.repeat(2))
    census = ProcessGroups(lambda: next(count))
    for _ in range(2):  # only a count that was seen to move is believed
        census.members([worker.pid], 0.0)
    child = fork(worker)
    assert child not in census.members([worker.pid], FRESH_S)
    assert child in census.members([worker.pid], FRESH_S + 0.1)


@pytest.mark.parametrize("constant", [0, 7])
def test_a_count_that_never_moves_is_not_believed(worker: subprocess.Popen, constant: int) -> None:
    census = ProcessGroups(lambda: constant)
    for _ in range(3):
        census.members([worker.pid], 0.0)
    child = fork(worker)
    assert child in census.members([worker.pid], 0.0)


def test_an_engine_on_cpu_may_keep_what_it_had_when_it_fell_asleep_and_no_more(
    tmp_path: Path, worker: subprocess.Popen
) -> None:
    run = config(1, 1, 0, 0)
    run = replace(run, lease=replace(run.lease, slack_bytes=10 * MIB))
    node = Node(
        config=run, paths=RunPaths(tmp_path), placement=placement_of(run),
        attempt=1, index=0, host="127.0.0.1",
        device="cpu",
    )  # fmt: skip
    supervisor = Supervisor(node, EventLog(attempt=1, node=0, role="controller", sink=print))
    (slab,) = node.slabs
    (engine,) = supervisor.of(ROLLOUT, slab)
    engine.process.child = Child("engine", worker, tmp_path / "log", None)  # type: ignore[arg-type]
    memory_check = SlotMemoryCheck(node, supervisor)
    assert not memory_check.check(slab, TRAINER, slab.gpus).clean, (
        "it said nothing at its Hello, so nothing is allowed to it"
    )
    memory_check.learn(engine)
    assert memory_check.check(slab, TRAINER, slab.gpus).clean
    fork(worker)
    grown = memory_check.check(slab, TRAINER, slab.gpus)
    assert not grown.clean and f"{engine.name} (pid {worker.pid}) keeps" in grown.detail
    assert memory_check.offenders(slab, TRAINER) == [engine]
    memory_check.learn(engine)
    assert memory_check.check(slab, TRAINER, slab.gpus).clean, "anew at each sleep"
