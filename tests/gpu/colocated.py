"""Whole colocated runs on this machine's one device, with real memory checks and real engines.

    python -m tests.gpu.colocated [--toy] [--only CASE ...] --out FOLDER

kill    one slab that the engine and the trainer share; the engine is killed after some iterations, and a
        checkpoint is saved on the way. Medians of every timer, and what the leases saw.
judge   the same with a GenRM of the policy's size on the same slab, whose engine keeps its weights asleep.
resume  deterministic; once undisturbed, once with every process killed on the way and started again: metrics
        and the last checkpoint must be equal to the bit.

FOLDER/CASE has each run's metrics and events, and FOLDER/CASE-memory.jsonl the device's memory all the time.
"""

import collections
import os
import shutil
import statistics
import string
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.faults.test_resume_exact import final_state, metrics
from tests.gpu.cases import Benchmark, Case, Place, Row
from tests.gpu.device_memory import MemoryRecorder
from tests.runs import RunFile, command, environment, kill, living, popen, rows, wait_for
from yatt.engine.environment import choose_device

RUN_S = 160.0
"""Limit of a run on a machine with nothing else to do; `wait_for` allows a multiple of it."""
CPU_KV_CACHE_BYTES = 64 << 20
KEPT = ("metrics.jsonl", "events.jsonl")
TOLD = ("lease.grant", "lease.not_free", "lease.expire", "worker.end", "engine.expire", "weights.check")
NUM_CAUSES = 10
JUDGE = {
    "name": "judge", "template": "{prompt}{completion}?", "max_tokens": 8, "on_unparsable": "score",
    "verdict": {"pattern": "([a-z])", "scores": {x: i / 25 for i, x in enumerate(string.ascii_lowercase)}},
}  # fmt: skip


def cases(is_toy: bool) -> list[Case]:
    """One case for each promise."""
    shape, iterations = ("toy", 3) if is_toy else ("qwen3-0.6b", 20)
    return [
        Case("kill", {"kind": "kill", "shape": shape, "iterations": iterations}, shape, 540),
        Case("judge", {"kind": "judge", "shape": shape, "iterations": max(2, iterations // 2)}, shape, 540),
        Case("resume", {"kind": "resume", "shape": "toy", "iterations": 4}, "toy", 540),
    ]


def measure(settings: Row, place: Place) -> Row:
    """Measures one case."""
    kinds = {"kill": measure_killed, "judge": measure_judged, "resume": measure_resumed}
    with MemoryRecorder(place.out / f"{settings['kind']}-memory.jsonl", is_cuda=is_cuda()):
        return kinds[settings["kind"]](settings, place)


def measure_killed(settings: Row, place: Place) -> Row:
    """A run that loses its engine once: the engine is built again, and the attempt goes on."""
    run = run_file(settings, place, "kill", checkpoint={"save_every": max(2, settings["iterations"] // 2)})
    killed = list[int]()

    def kill_engine(_: int) -> bool:
        if num_iterations(run) >= max(1, settings["iterations"] // 3):
            killed.extend(
                pid for pid, name in living(run.run_dir).items() if name == "yatt.rollout" and kill(pid)
            )
        return bool(killed)

    said = finish(run, kill_engine)
    row = {"killed": len(killed), **figures(run)}
    keep(run, place.out / "kill")
    if said or not killed or row["attempts"] != 1 or row["iterations"] != settings["iterations"]:
        row["failed"] = f"the killed engine cost more than its requests: {said}"
    return row


def measure_judged(settings: Row, place: Place) -> Row:
    """A run whose completions a GenRM on the same slab judges; its engine sleeps with its weights."""
    judge = {**JUDGE, "model": str(place.model(settings["shape"])), "dtype": dtype(), **engine_settings()}
    run = run_file(settings, place, "judge", genrms=[judge], rewards=[])
    said = finish(run)
    row = figures(run)
    keep(run, place.out / "judge")
    if said or row["restarted"] or row["iterations"] != settings["iterations"]:
        row["failed"] = f"workers were ended, for example because sleep took too long: {said}"
    return row


def measure_resumed(settings: Row, place: Place) -> Row:
    """Two equal runs, of which one is killed with all its processes on the way and started again."""
    more = {
        "run": {"deterministic": True}, "checkpoint": {"save_every": 1, "keep": 2},
        "rollout": {"enforce_eager": True}, "trainer": {"mini_batch_size": 2},
    }  # fmt: skip
    whole = run_file(settings, place, "whole", **more)
    cut = run_file(settings, place, "cut", **more)

    def kill_all(launcher_pid: int) -> bool:
        if num_iterations(cut) < settings["iterations"] // 2:
            return False
        return all([kill(pid) for pid in (launcher_pid, *living(cut.run_dir))])

    said = finish(whole) + finish(cut, kill_all, ends_whole=False) + finish(cut)
    pair = list(zip(metrics(whole), metrics(cut), strict=False))
    states = [final_state(run) for run in (whole, cut)]
    for run, name in ((whole, "whole"), (cut, "cut")):
        keep(run, place.out / "resume" / name)
    names = {name for a, b in pair for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
    row: Row = {
        "iterations": len(pair),
        "files": len(states[0]),
        "attempts": figures(cut)["attempts"],
        "unequal_metrics": sorted(names),
        "unequal_files": sorted(name for name in states[0] if states[0][name] != states[1].get(name)),
    }
    is_equal = (
        row["iterations"] == settings["iterations"] and not row["unequal_metrics"] + row["unequal_files"]
    )
    if said or not is_equal:
        row["failed"] = f"not equal to the bit: {said}"
    return row


def is_cuda() -> bool:
    """Whether runs use a GPU; without torch."""
    return choose_device("auto") == "cuda"


def dtype() -> str:
    """Type of all weights."""
    return "bfloat16" if is_cuda() else "float32"


def engine_settings() -> Row:
    """Memory of an engine: one of two engines on a GPU, or little on CPU."""
    return {"gpu_memory_utilization": 0.4} if is_cuda() else {"kv_cache_bytes": CPU_KV_CACHE_BYTES}


def run_file(settings: Row, place: Place, name: str, **more: object) -> RunFile:
    """One node with one slab; every completion has all its tokens."""
    is_small = settings["shape"] == "toy"
    prompts, group, new = (4, 4, 16) if is_small else (16, 8, 256)
    found: dict = {
        "run": {"deterministic": False},
        "launch": {
            "nodes": 1, "device": "auto", "start_timeout_s": 300, "phase_timeout_s": 300,
            "threads_per_worker": 1,
        },
        "data": {"max_prompt_tokens": 32},
        "model": {"path": str(place.model(settings["shape"])), "dtype": dtype()},
        "rollout": {
            "n": group, "max_response_tokens": new, "ignore_eos": True, "engine": "vllm", **engine_settings(),
        },
        "trainer": {
            "total_iterations": settings["iterations"], "train_batch_size": prompts,
            "mini_batch_size": prompts, "max_tokens_per_micro_batch": 512 if is_small else 16384,
        },
        "checkpoint": {"save_every": 0, "export_final": False},
        "sync": {"probe_prompts": 2},
    }  # fmt: skip
    for section, values in more.items():
        is_section = isinstance(values, dict)
        found[section] = {**found.get(section, {}), **values} if is_section else values
    run = RunFile(place.work / name, found)
    run.folder.mkdir()
    os.symlink(place.model(settings["shape"]), run.folder / "policy")
    return run


def finish(run: RunFile, strike: Callable[[int], bool] | None = None, *, ends_whole: bool = True) -> str:
    """Runs to the end. Calls `strike` with the launcher's pid, again and again until it is true. Returns what
    was said if the run ends in another way than it should."""
    log = run.folder / "said.log"
    with log.open("ab") as said:
        process = popen(
            command("run", str(run.write())), env=environment(), stdout=said, stderr=subprocess.STDOUT
        )
        try:
            if strike is not None:
                wait_for(
                    lambda: process.poll() is not None or strike(process.pid),
                    timeout_s=RUN_S, what="the moment to kill",
                )  # fmt: skip
            wait_for(lambda: process.poll() is not None, timeout_s=RUN_S, what="the end of the run")
        finally:
            process.terminate()
            process.wait(60)
    wait_for(lambda: not living(run.run_dir), timeout_s=30, what="all processes to end")
    is_right = (process.returncode == 0) == ends_whole
    return "" if is_right else f"exit code {process.returncode}: {log.read_text(errors='replace')[-2000:]}"


def num_iterations(run: RunFile) -> int:
    """Iterations that are finished."""
    return len(rows(run.run_dir / "metrics.jsonl"))


def events(run: RunFile) -> list[Row]:
    """All events of a run."""
    return rows(run.run_dir / "events.jsonl")


def figures(run: RunFile) -> Row:
    """Medians over iterations but the first, and what the leases and the checks of weights saw."""
    found, told = rows(run.run_dir / "metrics.jsonl"), events(run)
    steady = found[1:] or found
    names = sorted({x for row in steady for x in row if x.startswith(("timing_s/", "perf/", "memory/"))})
    kinds = collections.Counter(event["kind"] for event in told)
    checks = [event for event in told if event["kind"] == "weights.check" and event.get("allowed")]
    causes = [event["cause"] for event in told if event["kind"] == "lease.not_free"]
    return {
        "iterations": len(found),
        "attempts": len({event["attempt"] for event in told if event["kind"] == "attempt.start"}),
        **{kind: kinds[kind] for kind in TOLD},
        "restarted": [x["worker"] for x in told if x["kind"] == "worker.start" and x["worker"][-2:] != ".1"],
        "not_free_causes": list(dict.fromkeys(causes))[:NUM_CAUSES],
        "difference_of_allowed": max((x["difference"] / x["allowed"] for x in checks), default=None),
        "median": {x: round(statistics.median(row[x] for row in steady if x in row), 5) for x in names},
    }


def keep(run: RunFile, folder: Path) -> None:
    """Copies the run's metrics and events, and what it said."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (*(run.run_dir / name for name in KEPT), run.folder / "said.log"):
        if file.exists():
            shutil.copy(file, folder)


if __name__ == "__main__":
    Benchmark("colocated", __doc__, cases, measure).main()
