"""Processes and nodes that die, or stand still, while one batch is sampled and another one is trained.

One trainer node and two engine nodes, one batch ahead, with oversampling. Afterwards every prompt was
trained on once, or is left for the next iteration.
"""

import os
import random
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.bench.overlap import BATCH, run_of
from tests.faults.test_lost_nodes import controller, events, lost, workers
from tests.faults.test_nodes_that_return import lose_and_wait
from tests.runs import RunFile, kill, living, rows, start, wait_for
from tests.tiny_models import make_scripted_model
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.store.store import FolderStore
from yatt.control.rollouts.groups.carried import read_state

pytestmark = pytest.mark.faults
ITERATIONS = 12
SILENCE_S = 10.0


def placed(folder: Path) -> RunFile:
    run = run_of(folder, 1, ITERATIONS, seconds_per_step=0.02, tokens=24)
    run.settings["launch"] = {"nodes": 3, "node_silence_s": SILENCE_S}
    run.settings["rollout"] |= {"max_policy_age": 2, "oversample": 1.25}
    run.settings["checkpoint"] = {"save_every": 2}
    return run


def both_at_work(run: RunFile, after: int = 0) -> int:
    """Waits until the newest attempt samples a batch while it trains an iteration after `after`."""

    def found() -> int:
        newest = max((e["attempt"] for e in events(run, "attempt.start")), default=0)
        batches = [e for e in events(run, "batch.begin") if e["attempt"] == newest]
        trains = [
            e for e in events(run, "phase.begin")
            if e["attempt"] == newest and e["phase"] == "train" and e["iteration"] > after
        ]  # fmt: skip
        is_sampled = trains and batches and batches[-1]["iteration"] > trains[-1]["iteration"]
        return int(trains[-1]["iteration"]) if is_sampled else 0

    return int(wait_for(found, timeout_s=90, what="both tracks at work"))


def check_prompts(run: RunFile, iterations: int = ITERATIONS) -> None:
    metrics = [row for row in rows(run.run_dir / "metrics.jsonl") if row["training/global_step"]]
    assert [row["training/global_step"] for row in metrics] == list(range(1, iterations + 1))
    assert all(row["rollout/groups"] == BATCH for row in metrics)
    assert all(row["training/policy_age_max"] <= 2 for row in metrics)
    store = FolderStore(run.run_dir / "checkpoints")
    manifest = Checkpoints(store, 0).newest().manifest
    assert manifest is not None
    state = read_state(store, manifest.nodes, shard=0, num_shards=1)
    left = {group.number for group in (*state.accepted, *state.unfinished)}
    assert state.next_number - len(left) == BATCH * iterations, "each prompt once"
    accepted = Counter((e["attempt"], e["number"]) for e in events(run, "rollout.group.accept"))
    assert max(accepted.values()) == 1
    assert left <= set(range(state.next_number))


def finished(run: RunFile, process: "subprocess.Popen[str]") -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert living(run.run_dir) == {}
    assert run.leftovers() == []
    return output


def test_engines_and_their_nodes_are_lost_while_both_tracks_are_at_work(tmp_path: Path) -> None:
    run = placed(tmp_path)
    process = start("run", str(run.write()))
    try:
        at = both_at_work(run)
        assert kill(workers(run, 1)[0]), "an engine"
        at = both_at_work(run, at + 1)
        paused = workers(run, 2)[0]
        assert kill(paused, signal.SIGSTOP), "an engine that stands still"
        at = both_at_work(run, at + 1)
        kill(paused, signal.SIGCONT)
        for pid in [controller(run, 2), *workers(run, 2)]:
            kill(pid)
        lost(run, 2)
        finished(run, process)
    finally:
        process.kill()
        process.communicate()
    assert len({event["attempt"] for event in events(run, "attempt.start")}) == 1, "nothing began anew"
    check_prompts(run)


VICTIMS: dict[str, Any] = {
    "a trainer rank": lambda run: [e["pid"] for e in events(run, "worker.start") if "trainer" in e["worker"]][
        -1
    ],
    "the leader": lambda run: controller(run, 0),
}
"""In the order in which they are killed."""


def test_the_next_attempt_goes_on_from_a_cut_over_both_tracks(tmp_path: Path) -> None:
    """Twice in one run: a rank's end is a controller's report, the leader's is the launcher's."""
    run = placed(tmp_path)
    process = start("run", str(run.write()))
    killed_at: list[int] = []
    try:
        wait_for(lambda: events(run, "ckpt.commit"), timeout_s=90, what="a commit")
        for attempt, victim in enumerate(VICTIMS.values(), 1):
            killed_at.append(both_at_work(run, killed_at[-1] if killed_at else 3))
            assert kill(victim(run))
            wait_for(
                lambda attempt=attempt: attempt + 1 in {e["attempt"] for e in events(run, "attempt.resume")},
                timeout_s=60, what="the next attempt",
            )  # fmt: skip
        finished(run, process)
    finally:
        process.kill()
        process.communicate()
    resumed = {e["attempt"]: e["iteration"] for e in events(run, "attempt.resume")}
    assert set(resumed) == {1, 2, 3}
    assert 2 <= resumed[2] <= killed_at[0] and resumed[2] <= resumed[3] <= killed_at[1]
    check_prompts(run)


# ---- with judges, again and again ---------------------------------------------------------------

SEED = int(os.environ.get("YATT_FUZZ_SEED", "0")) or int(os.environ.get("YATT_AHEAD_SEED", "11"))
NUM_FAULTS = 7
STORM_ITERATIONS = 40
ENGINE_NODES = (1, 2, 3, 4)  # the first two sample, the others judge


def judged(folder: Path) -> RunFile:
    run = placed(folder)
    judge = make_scripted_model(folder / "judge", mean_tokens=3, steps_per_token=50)
    (Path(judge) / "model.safetensors").write_bytes(b"")
    section = {"name": "judge", "model": judge, "template": "{prompt}{completion}", "engine": "scripted",
               "verdict": {"pattern": "([a-m])", "scores": {}}, "max_model_tokens": 128,
               "on_unparsable": "score", "unparsable_score": 0.5}  # fmt: skip
    run.settings["genrms"] = [section]
    run.settings["launch"]["nodes"] = 5
    run.settings["placement"] |= {"genrm_gpu_sets": 2}
    run.settings["trainer"]["total_iterations"] = STORM_ITERATIONS
    return run


def strike(run: RunFile, draw: random.Random) -> str:
    """One fault at a process of an engine node; a node whose controller dies is back before this returns."""
    node, fault = draw.choice(ENGINE_NODES), draw.choice(("kill", "stop", "lose"))
    if fault == "lose":
        lose_and_wait(run, node)
    elif pids := workers(run, node):
        kill(
            pids[0], signal.SIGKILL if fault == "kill" else signal.SIGSTOP
        )  # the lease of a stopped one expires
    return f"{fault} node{node}"


def test_faults_of_engines_judges_and_their_nodes_cost_one_attempt_nothing(tmp_path: Path) -> None:
    run, draw = judged(tmp_path), random.Random(SEED)
    process = start("run", str(run.write()))
    done: list[str] = []
    at = 0
    try:
        for _ in range(NUM_FAULTS):
            at = both_at_work(run, at + 1)
            done.append(strike(run, draw))
        finished(run, process)
    finally:
        process.kill()
        process.communicate()
    said = f"seed {SEED}: {done}"
    assert {event["attempt"] for event in events(run, "attempt.start")} == {1}, said
    check_prompts(run, STORM_ITERATIONS)
