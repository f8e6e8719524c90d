"""A run that is killed at any moment, by SIGKILL, ends bit-equal to one that never was.

The disturbed run is one run, killed 8 times (20 in `make soak`) at random moments: a controller, a trainer
rank, an engine, the reward process, or everything at once with the launcher. Parameters, optimizer state and
metrics (times aside) are then compared with those of the undisturbed run.
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.runs import RunFile, kill, living, rows, start, wait_for, yatt
from yatt.adapters.files.files import temporary_files
from yatt.obs.metrics import comparable_results

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]

NUM_KILLS = 8 if int(os.environ.get("YATT_KILLS", "3")) <= 3 else 20
ITERATIONS = 10 + 7 * NUM_KILLS
VICTIMS = (
    "yatt.control", "yatt.trainer", "yatt.rollout", "yatt.reward", "yatt.uploader",
    "yatt.adapters.processes.nursery", "everything",
)  # fmt: skip


def final_state(run: RunFile) -> dict[str, str]:
    """Digest of every file of the last checkpoint, and of what the manifest says beside them."""
    manifests = sorted((run.run_dir / "checkpoints" / "manifests").glob("*.json"))
    manifest = json.loads(manifests[-1].read_text())
    files = {
        file["path"].rpartition("/")[2]: hashlib.sha256(
            (run.run_dir / "checkpoints" / file["path"]).read_bytes()
        ).hexdigest()
        for file in (*manifest["files"], *manifest["nodes"])
    }
    return {**files, "common": json.dumps(manifest["common"])}


def metrics(run: RunFile) -> list[dict[str, Any]]:
    return [comparable_results(row) for row in rows(run.run_dir / "metrics.jsonl")]


def strike(run: RunFile, victims: tuple[str, ...], launcher_pid: int, draw: random.Random) -> list[str]:
    """SIGKILL one of the victims that live now; gives what was hit."""
    processes = living(run.run_dir)
    victim = draw.choice([name for name in victims if name == "everything" or name in processes.values()])
    if victim == "everything":
        kill(launcher_pid)
        return [name for pid, name in processes.items() if kill(pid)]
    chosen = [pid for pid, name in processes.items() if name == victim]
    return [processes[pid] for pid in draw.sample(chosen, min(1, len(chosen))) if kill(pid)]


def until_up_or_ended(run: RunFile, process: "subprocess.Popen[str]") -> None:
    def holds() -> bool:
        return process.poll() is not None or "yatt.trainer" in living(run.run_dir).values()

    wait_for(holds, timeout_s=90, what="the run to come up")


def until_the_moment(run: RunFile, process: "subprocess.Popen[str]", after_s: float, iterations: int) -> None:
    """Until so many seconds have passed, or the run has so many iterations behind it (a fast machine would
    end it before its last kill), or has ended."""
    moment_s = time.monotonic() + after_s

    def holds() -> bool:
        has_come = time.monotonic() >= moment_s or len(rows(run.run_dir / "metrics.jsonl")) >= iterations
        return has_come or process.poll() is not None

    wait_for(holds, timeout_s=90, what="the moment of the next kill")


def finish_under_fire(
    run: RunFile, num_kills: int, seed: int, settle_s: tuple[float, float], victims: tuple[str, ...] = VICTIMS
) -> list[str]:
    """Run to the end while killing; starts the command again whenever it has ended."""
    draw, hits = random.Random(seed), []
    iterations_a_kill = run.settings["trainer"]["total_iterations"] // (num_kills + 1)
    file = str(run.write())
    process = start("run", file)
    try:
        while len(hits) < num_kills:
            until_up_or_ended(run, process)
            latest = (len(hits) + 1) * iterations_a_kill
            until_the_moment(run, process, draw.uniform(*settle_s), latest)
            if process.poll() is None:
                hits += strike(run, victims, process.pid, draw)[:1]
                time.sleep(0.3)
            if process.poll() is not None:
                if (run.run_dir / "finished").exists():
                    break
                assert process.returncode in (-signal.SIGKILL, 1, 93), process.stdout.read()
                process.stdout.close()
                process = start("run", file)
        output, _ = process.communicate(timeout=800)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    for _ in range(3):  # a crash loop ends with 93 on purpose; a person types the command again
        if (run.run_dir / "finished").exists():
            break
        done = yatt("run", file, timeout_s=400)
        output += done.stdout
    assert (run.run_dir / "finished").exists(), output[-3000:]
    return hits


ENVIRONMENT = """
def step(text, episode):
    said = "".join(text for role, text in episode.turns if role == "assistant")
    return None if len(said) % 3 == 0 else f" {episode.row['extra_info']['index']} again:"
"""


def with_turns(folder: Path) -> RunFile:
    """A run whose samples have up to three turns."""
    lines = []
    for number in range(64):
        row = {"prompt": f"{number} is", "extra_info": {"index": number}, "data_source": "sum"}
        lines.append(json.dumps(row) + "\n")
    (folder / "train.jsonl").write_text("".join(lines))
    (folder / "environment.py").write_text(ENVIRONMENT)
    return RunFile(
        folder,
        {
            "trainer": {"total_iterations": ITERATIONS},
            "run": {"max_attempts_without_progress": 50},
            "environment": {"path": str(folder / "environment.py"), "max_turns": 3},
            "rollout": {"max_response_tokens": 48},
        },
    )


@pytest.fixture(scope="module")
def scripted_twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFile, RunFile, list[str]]:
    calm = with_turns(tmp_path_factory.mktemp("calm"))
    assert (done := yatt("run", str(calm.write()))).returncode == 0, done.stdout + done.stderr
    disturbed = with_turns(tmp_path_factory.mktemp("disturbed"))
    hits = finish_under_fire(disturbed, NUM_KILLS, seed=1, settle_s=(0.1, 6.0))
    return calm, disturbed, hits


def test_samples_had_several_turns(scripted_twins) -> None:
    seen = [row["num_turns/mean"] for row in rows(scripted_twins[0].run_dir / "metrics.jsonl")]
    assert len(seen) == ITERATIONS and max(seen) > 1.2


def test_kills_change_neither_parameters_nor_optimizer_state(scripted_twins) -> None:
    calm, disturbed, hits = scripted_twins
    assert len(hits) >= NUM_KILLS, f"only {hits}"
    assert final_state(disturbed) == final_state(calm)


def test_kills_change_no_metric(scripted_twins) -> None:
    calm, disturbed, _ = scripted_twins
    assert metrics(disturbed) == metrics(calm)
    assert [row["training/global_step"] for row in metrics(calm)] == list(range(1, ITERATIONS + 1))


def test_nothing_is_left_behind(scripted_twins) -> None:
    _, disturbed, _ = scripted_twins
    assert living(disturbed.run_dir) == {}
    assert disturbed.leftovers() == [], "sockets, journals or weights of dead attempts"
    assert temporary_files(disturbed.run_dir) == [], "files half written"
