"""Whole runs for tests: a run file, the command as a user types it, and looking at what came of it."""

import asyncio
import atexit
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from tests.forked.lots import as_remembered, stem
from tests.forked.popen import ForkingPopen
from tests.tiny_models import make_qwen3

ROOT = Path(__file__).resolve().parent.parent
NUM_PROMPTS = 64
LOADED = 6
"""How many times as long everything may take as on a machine with nothing else to do."""
HANG_S = 60.0 * LOADED
"""Bound of a wait that only a hang reaches: how fast a machine is must not decide."""

HAS_NURSERIES = os.environ.get("YATT_NURSERIES", "1") != "0"
"""Whether runs have nurseries, unless a test says so itself."""


@dataclass
class RunFile:
    """A small run; `settings` are section -> key -> value, laid over the defaults below."""

    trainer: ClassVar[str] = "megatron"
    """`model.trainer` of runs with scripted engines, unless their settings name one."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def scratch(self) -> Path:
        """Short, since the path of a socket is: folders of tests are long."""
        folder = (
            Path(tempfile.gettempdir()) / f"yt-{hashlib.sha256(str(self.folder).encode()).hexdigest()[:10]}"
        )
        if not folder.exists():
            folder.mkdir(mode=0o700)
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder

    @property
    def shm(self) -> Path:
        """In memory, as weights' folders must be."""
        folder = Path("/dev/shm") / self.scratch.name
        if not folder.exists():
            folder.mkdir(mode=0o700)
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def leftovers(self) -> list[str]:
        """Sockets or weights of attempts, on this machine."""
        return [p.name for folder in (self.shm, self.scratch) for p in folder.glob("yatt-*")]

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def write(self) -> Path:
        """Make model, data and run file; gives the run file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        policy = self.folder / "policy"
        if not policy.exists():
            make_qwen3(policy, tied=True, seed=0)
        data = self.folder / "train.jsonl"
        if not data.exists():
            rows = [
                {"prompt": f"{i} plus {i % 7} is", "data_source": "sum", "extra_info": {"index": i}}
                for i in range(NUM_PROMPTS)
            ]
            data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        reward = self.folder / "reward.py"
        if not reward.exists():
            reward.write_text(REWARD)
        path = self.folder / "run.yaml"
        path.write_text(yaml.safe_dump(self._config(policy, data, reward)))
        return path

    def _config(self, policy: Path, data: Path, reward: Path) -> dict[str, Any]:
        config: dict[str, Any] = {
            "run": {"dir": str(self.run_dir), "deterministic": True},
            "launch": {
                "nodes": 2, "device": "cpu", "reward_processes": 1,
                "start_timeout_s": 120, "phase_timeout_s": 120,
                "scratch_dir": str(self.scratch), "shm_dir": str(self.shm), "nurseries": HAS_NURSERIES,
            },
            "data": {"train_files": [str(data)], "max_prompt_tokens": 32, "ground_truth_key": ""},
            "model": {"path": str(policy), "dtype": "float32"},
            "rollout": {"n": 4, "max_response_tokens": 8, "engine": "scripted"},
            "rewards": [{"name": "digits", "path": str(reward)}],
            "optimizer": {"lr": 1.0e-3},
            "trainer": {
                "total_iterations": 4, "train_batch_size": 4, "mini_batch_size": 2,
                "max_tokens_per_micro_batch": 128,
            },
            "checkpoint": {"save_every": 1, "keep": 2},
            "sync": {"probe_prompts": 0},
        }  # fmt: skip
        for section, values in self.settings.items():
            if isinstance(values, dict):
                config.setdefault(section, {}).update(values)
            else:
                config[section] = values
        for section in (*config["rewards"], *([config["environment"]] if "environment" in config else [])):
            section.setdefault("trial", False)  # functions of tests count calls, wait for events, kill
        if config["rollout"]["engine"] == "scripted":
            config["model"].setdefault("trainer", self.trainer)
        return config


REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """How many letters of the first half of the alphabet."""
    return sum(c in "abcdefghijklm" for c in solution_str) / 8
'''


HELD = """
import os, time

calls = 0

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global calls
    calls += 1
    if os.path.exists({hold!r}):
        time.sleep({pause_s})
    while calls > {after} and os.path.exists({hold!r}):
        time.sleep(0.03)
    return sum(c in "abcdefghijklm" for c in solution_str) / 8
"""


def held_after(folder: Path, calls: int, *, pause_s: float = 0.03) -> Path:
    """Writes the reward function of a run that stands still after so many calls in a process, while the
    returned file is there, and takes its time before. Iterations take 35 ms without it, and events are
    written some time later: a run is at its end before a test that has seen an event can do anything."""
    hold = folder / "hold"
    hold.touch()
    (folder / "reward.py").write_text(HELD.format(hold=str(hold), after=calls, pause_s=pause_s))
    return hold


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "yatt.cli.main", *arguments]


def environment() -> dict[str, str]:
    return {
        **as_remembered(os.environ), "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "COLUMNS": "200",
    }  # fmt: skip


def yatt(
    *arguments: str, timeout_s: float = 180, cwd: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run the command to its end."""
    return run_to_end(command(*arguments), env=environment(), cwd=cwd, timeout_s=timeout_s * LOADED)


def start(*arguments: str) -> "subprocess.Popen[str]":
    """Start the command."""
    return popen(
        command(*arguments), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def popen(words: list[str], *, env: dict[str, str], **how: Any) -> "subprocess.Popen[Any]":
    """As `subprocess.Popen`; a process of yatt is forked, if the test's lot says so."""
    return ForkingPopen(words, stem(env), env=env, **how)


def run_to_end(
    words: list[str],
    *,
    env: dict[str, str],
    timeout_s: float,
    cwd: Path | None = None,
    typed: str | None = None,
) -> "subprocess.CompletedProcess[str]":
    """As `subprocess.run`, likewise. `typed`: its standard input, instead of an inherited one."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if typed is not None:
        pipes["stdin"] = subprocess.PIPE
    with popen(words, env=env, cwd=cwd, text=True, **pipes) as process:
        try:
            output, errors = process.communicate(typed, timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


def killed_when(run: "RunFile", holds: Callable[[], Any], what: str) -> None:
    """Starts the run, and kills all its processes when `holds()` is true."""
    process = start("run", str(run.write()))
    try:
        wait_for(holds, timeout_s=120, what=what)
    finally:
        process.kill()
        for pid in living(run.run_dir):
            kill(pid)
        process.communicate()
    wait_for(lambda: not living(run.run_dir), what="all to be gone")


def rows(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a JSONL file."""
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines() if line]


def wait_for(holds: Callable[[], Any], *, timeout_s: float = HANG_S / LOADED, what: str) -> Any:
    """Until `holds()` is true; gives its value. `timeout_s` is for a machine with nothing else to do. What is
    asked of Slurm starts a process each time: the pauses are a few times as long as the question took."""
    timeout_s *= LOADED
    until = time.monotonic() + timeout_s
    while (asked := time.monotonic()) < until:
        if value := holds():
            return value
        time.sleep(min(max(5 * (time.monotonic() - asked), 0.02), 0.2))
    raise AssertionError(f"waited {timeout_s:g} s for {what}")


async def until(holds: Callable[[], Any], what: str) -> Any:
    """As `wait_for`, within an event loop."""
    try:
        async with asyncio.timeout(HANG_S):
            while not (value := holds()):
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"waited {HANG_S:g} s for {what}") from None
    return value


async def turns(number: int = 50) -> None:
    """Lets the event loop go on so often: what would happen at once has happened then."""
    for _ in range(number):
        await asyncio.sleep(0)


def living(run_dir: Path) -> dict[int, str]:
    """Processes of a run that are alive, by their command line."""
    found = {}
    for path in (Path("/proc", name, "cmdline") for name in filter(str.isdigit, os.listdir("/proc"))):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
            state = (path.parent / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if str(run_dir) in words and state != "Z":
            module = next((w for w in words if w.startswith("yatt.")), "")
            found[int(path.parent.name)] = module
    return found


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Signal one process; False if it was gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
