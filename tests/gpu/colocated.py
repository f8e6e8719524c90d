"""A whole colocated run on this machine's device: leases with real proofs, and one engine killed on the way.

    python -m tests.gpu.colocated [--toy] [--shapes qwen3-1.7b] [--out FOLDER]

Gives the median seconds of each phase and timer of an iteration, and what the leases saw. On a GPU every
hand-over is proved by NVML; on CPU by the processes' memory.
"""

import statistics
import tempfile
from pathlib import Path

from tests.gpu.shapes import SHAPES, arguments, make_model, show
from tests.runs import RunFile, kill, living, rows, start, wait_for
from yatt.engine.environment import choose_device

ITERATIONS, KILL_AFTER = 6, 2
LIMIT_S = 540.0
TOLD = (
    "lease.grant",
    "lease.release",
    "lease.expire",
    "lease.not_free",
    "engine.expire",
    "worker.end",
    "weights.check",
)


def run_file(folder: Path, shape_name: str, *, toy: bool) -> RunFile:
    """Of one node with one slab."""
    make_model(SHAPES[shape_name], folder / "policy")
    prompt, response, n = (32, 16, 4) if toy else (256, 1024, 8)
    is_cuda = choose_device("auto") == "cuda"
    return RunFile(folder, {
        "run": {"deterministic": False},
        "launch": {
            "nodes": 1, "device": "auto", "start_timeout_s": 300, "phase_timeout_s": 600,
            "threads_per_worker": 1,
        },
        "data": {"max_prompt_tokens": prompt},
        "model": {"dtype": "bfloat16" if is_cuda else "float32"},
        "rollout": {"n": n, "max_response_tokens": response, "engine": "transformers" if toy else "auto"},
        "trainer": {
            "total_iterations": ITERATIONS, "train_batch_size": 4 if toy else 32,
            "mini_batch_size": 4 if toy else 32, "max_tokens_per_micro_batch": 512 if toy else 16384,
        },
        "checkpoint": {"save_every": 0, "export_final": False},
        "sync": {"probe_prompts": 2},
    })  # fmt: skip


def finish(run: RunFile) -> str:
    """The run, with the engine killed after some iterations; gives what it said."""
    process = start("run", str(run.write()))
    try:

        def far_enough() -> bool:
            return process.poll() is not None or len(rows(run.run_dir / "metrics.jsonl")) >= KILL_AFTER

        wait_for(far_enough, timeout_s=LIMIT_S, what=f"{KILL_AFTER} iterations")
        engines = [pid for pid, name in living(run.run_dir).items() if name == "yatt.rollout"]
        killed = [pid for pid in engines if kill(pid)]
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=120)
    if process.returncode or not killed:
        raise SystemExit(f"exit code {process.returncode}, killed {killed}:\n{output[-4000:]}")
    return output


def figures(run: RunFile) -> dict:
    """Medians over iterations, and counts of what was told of leases."""
    metrics, events = rows(run.run_dir / "metrics.jsonl"), rows(run.run_dir / "events.jsonl")
    assert [row["training/global_step"] for row in metrics] == list(range(1, ITERATIONS + 1))
    names = sorted({name for row in metrics for name in row if name.startswith(("timing_s/", "perf/"))})
    row = {
        name: round(statistics.median(each[name] for each in metrics if name in each), 5) for name in names
    }
    kinds = [event["kind"] for event in events]
    checks = [event for event in events if event["kind"] == "weights.check"]
    row |= {kind: kinds.count(kind) for kind in TOLD}
    row["difference_of_allowed"] = round(max(each["difference"] / each["allowed"] for each in checks), 4)
    attempts = {event["attempt"] for event in events if event["kind"] == "attempt.start"}
    assert len(attempts) == 1, "a killed engine costs its requests, not the attempt"
    assert kinds.count("lease.not_free") <= 1, "the killed engine's memory at most"
    return row


def main() -> None:
    given = arguments(__doc__.split("\n")[0])
    found = []
    for name in given.shapes:
        with tempfile.TemporaryDirectory() as folder:
            run = run_file(Path(folder), name, toy=given.toy)
            finish(run)
            found.append({"shape": name, **figures(run)})
    show("colocated", found, given.out)


if __name__ == "__main__":
    main()
