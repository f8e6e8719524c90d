"""Everything that can go wrong, all the time: the run never ends by itself, and its results do not change.

Two kinds of fault. Those of the data are a function of the sample: functions that hang, crash and print a
megabyte, verdicts that cannot be read, groups without an advantage. Those of the machines are drawn: killed
engines and reward processes, controllers that stand still, one engine node lost, a run folder that stands
still or fails. A calm run has only the former; in deterministic mode a stormy one must end bit-equal.

Some minutes with a seed of its own each time; as long as `YATT_SOAK_ITERATIONS` says, and in as many storms
as `YATT_SOAK_STORMS` says (`make soak`). `YATT_SOAK_SEED` repeats what the first one drew.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_resume_exact import final_state, metrics
from tests.runs import ROOT, RunFile, command, environment, kill, living, rows
from tests.seeds import seed_of
from tests.tiny_models import make_scripted_model
from yatt.adapters.inputs.tokenizer import Tokenizer

STORMS = int(os.environ.get("YATT_SOAK_STORMS", "1"))
ITERATIONS = int(os.environ.get("YATT_SOAK_ITERATIONS", "30"))
SEED = seed_of("YATT_SOAK_SEED")
pytestmark = [pytest.mark.faults, pytest.mark.timeout(900 + 30 * ITERATIONS * STORMS)]

REWARD = """
import hashlib, os, time


def draw(*parts):
    return int.from_bytes(hashlib.sha256("|".join(map(str, parts)).encode()).digest()[:4], "big")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    fate = draw("fate", ground_truth, solution_str) % 1000
    if fate < 1:
        time.sleep(1000)
    if fate < 2:
        os._exit(3)
    if fate < 10:
        print("x" * (1 << 20))
    if draw("flat", ground_truth) % 10 >= 3:
        return 0.5
    return sum(c in "abcdefghijklm" for c in solution_str) / 8
"""


class Soak:
    """One run, with or without a storm."""

    def __init__(self, folder: Path) -> None:
        judge = Path(make_scripted_model(folder / "judge"))
        words = [Tokenizer(str(judge)).encode(text) for text in ["good"] * 25 + ["bad"] * 24 + ["hm"]]
        (judge / "scripted.json").write_text(json.dumps({"answers": [list(ids) for ids in words]}))
        (judge / "model.safetensors").write_bytes(b"")
        self.file = RunFile(folder, {
            "launch": {
                "nodes": 4, "reward_processes": 3, "node_silence_s": 9, "start_timeout_s": 120,
                "phase_timeout_s": 300,
            },
            "data": {"ground_truth_key": "truth"},
            "rewards": [{"name": "digits", "path": str(folder / "reward.py"), "timeout_s": 2}],
            "genrms": [{
                "name": "judge", "model": str(judge), "template": "{completion}", "engine": "scripted",
                # All verdicts are worth the same, and make no group differ; an unreadable one drops it.
                "verdict": {"pattern": "(good|bad)", "scores": {"good": 1.0, "bad": 1.0}}, "weight": 0.5,
                "retries": 0, "max_tokens": 16, "max_model_tokens": 256,
            }],
            "placement": {"mode": "disaggregated", "trainer_nodes": 1, "genrm_gpu_sets": 1},
            "algorithm": {"filter_groups": True},
            "trainer": {"total_iterations": ITERATIONS},
            "checkpoint": {"save_every": 5},
        })  # fmt: skip
        (folder / "reward.py").write_text(REWARD)
        lines = [json.dumps({"prompt": f"prompt {i} is", "truth": i}) for i in range(4000)]
        (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
        self.weather = folder / "weather"

    def start(self) -> "subprocess.Popen[bytes]":
        shim = Path(__file__).parent / "weather"
        env = environment() | {
            "PYTHONPATH": f"{shim}{os.pathsep}{ROOT}",
            "YATT_SOAK_RUN": str(self.file.run_dir),
            "YATT_SOAK_WEATHER": str(self.weather),
        }
        with (self.file.folder / "out").open("wb") as out:
            return subprocess.Popen(command("run", str(self.file.write())), env=env, stdout=out, stderr=out)

    def finish(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.wait() == 0, (self.file.folder / "out").read_text()[-4000:]
        assert living(self.file.run_dir) == {}

    def pids(self, module: str) -> list[int]:
        return [pid for pid, name in living(self.file.run_dir).items() if name == module]

    def controller(self, node: int) -> list[int]:
        """Of a node: the number is an argument of its command line."""
        found = []
        for pid in self.pids("yatt.control"):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if words[words.index("--node") + 1] == str(node):
                    found.append(pid)
        return found


class Storm:
    """Faults of machines, drawn from a seed, until the run has ended."""

    def __init__(self, soak: Soak, process: "subprocess.Popen[bytes]", seed: int) -> None:
        self.soak, self.process, self.draw = soak, process, random.Random(seed)
        self.told: list[str] = []

    def run(self) -> None:
        events = self.soak.file.run_dir / "events.jsonl"
        while self.process.poll() is None and not rows(events):
            time.sleep(0.1)
        lost_at = self.draw.randrange(3, 8)
        for turn in range(1_000_000):
            self._pause(self.draw.uniform(1, 5))
            if self.process.poll() is not None:
                return
            if turn == lost_at:
                self._stand_still(2, 15)
            else:
                self.draw.choice((self._kill, self._kill, self._still, self._stall, self._fail))()

    def _pause(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def _kill(self) -> None:
        module = self.draw.choice(("yatt.rollout", "yatt.genrm", "yatt.reward"))
        if pids := self.soak.pids(module):
            pid = self.draw.choice(sorted(pids))
            self.told.append(f"kill {module} {pid}: {kill(pid)}")

    def _still(self) -> None:
        self._stand_still(self.draw.randrange(4), 5)

    def _stand_still(self, node: int, seconds: float) -> None:
        for pid in self.soak.controller(node):
            self.told.append(f"controller of node{node} stands still for {seconds} s")
            if kill(pid, signal.SIGSTOP):
                self._pause(seconds)
                kill(pid, signal.SIGCONT)

    def _stall(self) -> None:
        self._be("stall", 15)

    def _fail(self) -> None:
        self._be("error", 1)

    def _be(self, weather: str, seconds: float) -> None:
        self.told.append(f"run folder: {weather} for {seconds} s")
        partial = self.soak.weather.with_suffix(".new")
        partial.write_text(weather)
        partial.replace(self.soak.weather)
        self._pause(seconds)
        self.soak.weather.unlink()


@contextlib.contextmanager
def stormy(soak: Soak, seed: int) -> Iterator[Storm]:
    process = soak.start()
    storm = Storm(soak, process, seed)
    thread = threading.Thread(target=storm.run)
    thread.start()
    try:
        soak.finish(process)
        yield storm
    finally:
        process.kill()
        thread.join()


def counted(soak: Soak) -> dict[str, Any]:
    written = rows(soak.file.run_dir / "metrics.jsonl")
    return {
        "flat": sum(row.get("rollout/dropped_groups", 0) for row in written),
        "failed": sum(row.get("rollout/failed_groups", 0) for row in written),
        "unreadable": sum(row.get("genrm/judge/unparsable", 0) for row in written),
        "groups": sum(row["rollout/groups"] for row in written),
    }


def test_a_storm_of_faults_changes_nothing_and_ends_nothing(tmp_path: Path) -> None:
    calm = Soak(tmp_path / "calm")
    calm.finish(calm.start())
    seen = counted(calm)
    assert seen["flat"] > seen["groups"], seen
    assert seen["failed"] > 0, seen
    assert seen["unreadable"] > 0, seen
    for seed in range(SEED, SEED + STORMS):
        _weather_it(Soak(tmp_path / f"storm{seed}"), seed, calm)


def _weather_it(soak: Soak, seed: int, calm: Soak) -> None:
    """Run it in a storm; what it ends with is what the calm one, and so every other storm, ended with."""
    with stormy(soak, seed) as storm:
        told = f"seed {seed}, {len(storm.told)} faults: " + "; ".join(storm.told)
        assert len(storm.told) > min(5, ITERATIONS // 30), told
        starts = [e for e in rows(storm.soak.file.run_dir / "events.jsonl") if e["kind"] == "attempt.start"]
        assert len({event["attempt"] for event in starts}) == 1, f"the run ended by itself; {told}"
        assert metrics(storm.soak.file) == metrics(calm.file), told
        assert final_state(storm.soak.file) == final_state(calm.file), told
