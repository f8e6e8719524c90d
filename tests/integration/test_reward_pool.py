"""Whole runs whose reward functions hang, crash, flood or fail: the call is lost, and nothing else."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.runs import RunFile, kill, living, rows, start, wait_for, yatt
from yatt.errors import EXIT_WILL_CONTINUE
from yatt.obs.metrics import comparable_results

BAD_REWARD = '''
import ctypes, os, re, sys, zlib

def fate(text):
    return zlib.crc32(text.encode()) % 100

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """A function of the sample: one in a hundred hangs in C code, one crashes, one floods."""
    number = fate(solution_str)
    if number == 7:
        re.match(r"(a+)+$", "a" * 64 + "b")  # holds the interpreter lock, for ages
    if number == 8:
        ctypes.string_at(0)
    if number == 9:
        os._exit(3)
    if number < 5:
        sys.stdout.write("x" * 1_000_000)
    return sum(c in "abcdefghijklm" for c in solution_str) / 8
'''


def run_file(folder: Path, reward: str, **settings: Any) -> RunFile:
    run = RunFile(folder, settings)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(reward)
    section = {"name": "digits", "path": str(folder / "reward.py"), "timeout_s": 1.5}
    run.settings = {"rewards": [section], **settings}
    return run


def drops(run: RunFile) -> list[str]:
    events = rows(run.run_dir / "events.jsonl")
    return [event["reason"] for event in events if event["kind"] == "rollout.group.drop"]


@pytest.mark.slow
def test_calls_that_hang_or_crash_cost_their_own_groups_and_no_other(tmp_path: Path) -> None:
    run = run_file(tmp_path, BAD_REWARD, trainer={"total_iterations": 6}, launch={"reward_processes": 2})
    done = yatt("run", str(run.write()), timeout_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = drops(run)
    hung = [reason for reason in found if "took longer than 4 times its timeout_s 1.5" in reason]
    crashed = [reason for reason in found if "ended its process each time" in reason]
    assert hung and crashed and len(hung) + len(crashed) == len(found), found
    events = rows(run.run_dir / "events.jsonl")
    assert len([e for e in events if e["kind"] == "reward.kill"]) >= len(hung)
    metrics = rows(run.run_dir / "metrics.jsonl")
    assert sum(row.get("rollout/failed_groups", 0) for row in metrics) <= len(set(found))
    assert [row["training/global_step"] for row in metrics] == list(range(1, 7))


SLOW_REWARD = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.2)
    return sum(c in "abcdefghijklm" for c in solution_str) / 8
"""


def age_s(pid: int) -> float:
    """Since a process was started; 0 if it is gone."""
    try:
        began = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()[19])
    except OSError:
        return 0.0
    return float(Path("/proc/uptime").read_text().split()[0]) - began / os.sysconf("SC_CLK_TCK")


def has_opened(events: Path) -> bool:
    return any(event["kind"] == "rollout.group.open" for event in rows(events))


@pytest.mark.faults
@pytest.mark.slow
def test_reward_processes_killed_with_calls_in_flight_change_no_result(tmp_path: Path) -> None:
    settings = {"trainer": {"total_iterations": 6}, "launch": {"reward_processes": 2}}
    calm = run_file(tmp_path / "calm", SLOW_REWARD, **settings)
    assert yatt("run", str(calm.write())).returncode == 0
    killed = run_file(tmp_path / "killed", SLOW_REWARD, **settings)
    process = start("run", str(killed.write()))
    hits = 0
    try:
        events = killed.run_dir / "events.jsonl"
        wait_for(lambda: has_opened(events), timeout_s=60, what="completions to be scored")
        # Scoring takes seconds, and two calls of 0.2 s a node are under way all through it. Only processes
        # that take calls by now: one that is killed again and again while it starts ends the run.
        while hits < 6 and process.poll() is None:
            victims = [pid for pid, name in living(killed.run_dir).items() if name == "yatt.reward"]
            hits += sum(kill(pid) for pid in [pid for pid in victims if age_s(pid) > 1.5][:1])
            time.sleep(0.15)
        output, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0, output
    assert hits >= 4
    assert drops(killed) == []
    ended = [e for e in rows(killed.run_dir / "events.jsonl") if e["kind"] == "worker.end"]
    assert len([e for e in ended if "SIGKILL" in e["how"]]) >= 4
    assert [comparable_results(row) for row in rows(killed.run_dir / "metrics.jsonl")] == [
        comparable_results(row) for row in rows(calm.run_dir / "metrics.jsonl")
    ]


STARVED_REWARD = """
import asyncio, time, zlib
from pathlib import Path

STALLS = Path(__file__).parent / "stalls"

def stands_still(solution_str):  # the machine, under this call, once
    number = zlib.crc32(solution_str.encode())
    mark = STALLS / str(number)
    if STALLS.is_dir() and number % 25 == 0 and not mark.exists():
        mark.touch()
        return True
    return False

def score(solution_str):
    return sum(c in "abcdefghijklm" for c in solution_str) / 8
"""

STARVED_SYNC = (
    STARVED_REWARD
    + """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if stands_still(solution_str):
        time.sleep(1000)
    return score(solution_str)
"""
)

STARVED_ASYNC = (
    STARVED_REWARD
    + """
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if stands_still(solution_str):
        await asyncio.sleep(1000)
    return score(solution_str)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("reward", [STARVED_SYNC, STARVED_ASYNC], ids=["sync", "async"])
def test_a_call_that_the_machine_was_too_slow_for_changes_no_deterministic_result(
    tmp_path: Path, reward: str
) -> None:
    settings = {"trainer": {"total_iterations": 4}, "launch": {"nodes": 1, "reward_processes": 2}}
    calm = run_file(tmp_path / "calm", reward, **settings)
    assert yatt("run", str(calm.write())).returncode == 0
    starved = run_file(tmp_path / "starved", reward, **settings)
    (tmp_path / "starved" / "stalls").mkdir()
    done = yatt("run", str(starved.write()), timeout_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    events = rows(starved.run_dir / "events.jsonl")
    stalls = list((tmp_path / "starved" / "stalls").iterdir())
    kills = [event for event in events if event["kind"] == "reward.kill"]
    assert stalls and len(kills) == (len(stalls) if reward is STARVED_SYNC else 0)
    assert drops(starved) == []
    assert [comparable_results(row) for row in rows(starved.run_dir / "metrics.jsonl")] == [
        comparable_results(row) for row in rows(calm.run_dir / "metrics.jsonl")
    ]


ONE_NODE = {"launch": {"nodes": 1}, "trainer": {"train_batch_size": 32, "mini_batch_size": 32}}


def test_a_function_that_always_fails_ends_the_run_after_a_handful_of_groups(tmp_path: Path) -> None:
    reward = (
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1 / 0\n"
    )
    run = run_file(tmp_path, reward, **ONE_NODE)
    done = yatt("run", str(run.write()))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the first 8 prompt groups all failed" in done.stdout
    assert "ZeroDivisionError" in done.stdout
    assert len(drops(run)) == 8, "what was under way beside them says nothing more"


def test_a_ground_truth_that_no_row_has_is_refused_and_a_partial_one_is_told(tmp_path: Path) -> None:
    run = RunFile(tmp_path, {"data": {"ground_truth_key": "answer"}, "trainer": {"total_iterations": 1}})
    done = yatt("run", str(run.write()))
    assert done.returncode == 2
    assert "data.ground_truth_key: no row of" in done.stderr and "'answer'" in done.stderr
    data = tmp_path / "train.jsonl"
    lines = data.read_text().splitlines()
    data.write_text("\n".join([json.dumps({**json.loads(lines[0]), "answer": [1, 2]}), *lines[1:]]) + "\n")
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stderr
    assert f"{len(lines) - 1} of {len(lines)} rows" in done.stderr


HANGS_ITS_LOOP = """
import asyncio, time, zlib

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    if zlib.crc32(solution_str.encode()) % 40 == 7:
        time.sleep(1000)
    return sum(c in "abcdefghijklm" for c in solution_str) / 8
"""


@pytest.mark.slow
def test_an_asynchronous_function_that_hangs_on_a_sample_costs_its_group_and_no_attempt(
    tmp_path: Path,
) -> None:
    run = run_file(tmp_path, HANGS_ITS_LOOP, trainer={"total_iterations": 4}, launch={"nodes": 1})
    done = yatt("run", str(run.write()), timeout_s=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = drops(run)
    assert found and all("ended its process each time" in reason for reason in found), found
    starts = {e["attempt"] for e in rows(run.run_dir / "events.jsonl") if e["kind"] == "attempt.start"}
    assert len(starts) == 1


IS_DEAF = """
import asyncio, zlib

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.05)
    while zlib.crc32(solution_str.encode()) % 10 == 7:
        try:
            await asyncio.sleep(1)
        except BaseException:
            pass
    return sum(c in "abcdefghijklm" for c in solution_str) / 8
"""


@pytest.mark.slow
def test_calls_that_catch_their_cancellation_cost_their_own_groups_and_no_other(tmp_path: Path) -> None:
    settings = {"run": {"deterministic": False}, "trainer": {"total_iterations": 6}, "launch": {"nodes": 1}}
    run = run_file(tmp_path, IS_DEAF, **settings)
    done = yatt("run", str(run.write()), timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = drops(run)
    assert found and all("goes on after it was cancelled" in reason for reason in found), found
    events = rows(run.run_dir / "events.jsonl")
    assert len({e["attempt"] for e in events if e["kind"] == "attempt.start"}) == 1
    kills = [e for e in events if e["kind"] == "reward.kill"]
    assert kills, "with many such calls in it, the process was replaced"


STARTS_OTHERS = """
import subprocess, time, zlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    subprocess.Popen(["sleep", "SECONDS"], start_new_session=True, env={})
    if zlib.crc32(solution_str.encode()) % 16 == 7:
        time.sleep(1000)
    return sum(c in "abcdefghijklm" for c in solution_str) / 8
"""


def sleepers(seconds: str) -> list[int]:
    """Processes that sleep so long."""
    found = []
    for path in (Path("/proc", name, "cmdline") for name in filter(str.isdigit, os.listdir("/proc"))):
        try:
            if path.read_bytes().split(b"\0")[:2] == [b"sleep", seconds.encode()]:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("is_killed", [False, True], ids=["to the end", "controller killed"])
def test_what_functions_start_in_sessions_of_their_own_ends_with_the_run(
    tmp_path: Path, is_killed: bool
) -> None:
    seconds = f"600.{os.getpid()}{int(is_killed)}"
    settings = {"trainer": {"total_iterations": 100_000 if is_killed else 3}, "launch": {"nodes": 1}}
    run = run_file(tmp_path, STARTS_OTHERS.replace("SECONDS", seconds), **settings)
    process = start("run", str(run.write()))
    try:
        wait_for(lambda: sleepers(seconds), timeout_s=60, what="something to be started")
        if is_killed:
            wait_for(lambda: rows(run.run_dir / "metrics.jsonl"), timeout_s=60, what="an iteration")
            (controller,) = [pid for pid, name in living(run.run_dir).items() if name == "yatt.control"]
            kill(controller)
            process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
        left = sleepers(seconds)
        for pid in left:
            kill(pid)
    assert process.returncode == (EXIT_WILL_CONTINUE if is_killed else 0), output
    assert not left


TAKES_LONG = """
import asyncio

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["index"] == 1:
        await asyncio.sleep(5.5)
    return sum(c in "abcdefghijklm" for c in solution_str) / 8
"""


@pytest.mark.slow
def test_a_call_that_is_asked_again_may_take_longer_in_all_than_nothing_may_get_on(tmp_path: Path) -> None:
    """1.5 + 3 + 6 seconds: each limit that it meets counts as progress."""
    run = run_file(
        tmp_path, TAKES_LONG, run={"deterministic": True}, trainer={"total_iterations": 1},
        launch={"nodes": 1, "phase_timeout_s": 9}, data={"shuffle": False},
    )  # fmt: skip
    done = yatt("run", str(run.write()), timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    events = rows(run.run_dir / "events.jsonl")
    assert len({e["attempt"] for e in events if e["kind"] == "attempt.start"}) == 1
    assert drops(run) == []
