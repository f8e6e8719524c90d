"""Engine nodes whose controllers end come back within the attempt, time after time, and change no bit.

The undisturbed run is *colocated* on two nodes; the other is disaggregated with the same two trainer ranks.
A rollout node and a judge's node are killed and come back three times in all.
"""

import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_lost_nodes import SPLIT, controller, events, run_file, workers
from tests.faults.test_resume_exact import final_state, metrics
from tests.runs import RunFile, kill, living, start, wait_for, yatt
from yatt.adapters.files.files import record_in
from yatt.paths import RunPaths

pytestmark = pytest.mark.faults

ITERATIONS = 40
VICTIMS = (3, 4, 3)


def long_run(folder: Path, nodes: int, placement: dict[str, Any]) -> RunFile:
    run = run_file(folder, nodes, placement)
    run.settings["trainer"] = {"total_iterations": ITERATIONS}
    return run


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    run = long_run(tmp_path_factory.mktemp("calm"), 2, {"mode": "colocated"})
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    return run


@dataclass
class Returned:
    """A run, and what was seen of it."""

    run: RunFile
    output: str = ""
    code: int = -1


def joined(run: RunFile, node: int) -> list[int]:
    return [e["life"] for e in events(run, "node.joined") if e["node"] == node]


def lose_and_wait(run: RunFile, node: int) -> None:
    """Kills a node's controller and workers, and waits until it is back."""
    before = joined(run, node)
    for pid in [controller(run, node), *workers(run, node)]:
        kill(pid, signal.SIGKILL)
    wait_for(lambda: joined(run, node) != before, timeout_s=90, what=f"node{node} to join")


@pytest.fixture(scope="module")
def returned(tmp_path_factory: pytest.TempPathFactory) -> Returned:
    made = Returned(long_run(tmp_path_factory.mktemp("returned"), 6, SPLIT))
    process = start("run", str(made.run.write()))
    try:
        wait_for(lambda: events(made.run, "ckpt.commit"), timeout_s=90, what="the first checkpoint")
        for node in VICTIMS:
            lose_and_wait(made.run, node)
        made.output, _ = process.communicate(timeout=400)
        made.code = process.returncode
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return made


def test_a_run_whose_nodes_come_back_three_times_ends_bit_equal(calm: RunFile, returned: Returned) -> None:
    assert returned.code == 0, returned.output
    assert {e["attempt"] for e in events(returned.run, "node.joined")} == {1}, "one attempt"
    assert final_state(returned.run) == final_state(calm)
    assert metrics(returned.run) == metrics(calm)
    assert living(returned.run.run_dir) == {}
    assert not returned.run.leftovers()


def test_each_return_is_a_new_life_and_works(returned: Returned) -> None:
    assert joined(returned.run, 3) == [2, 3]
    assert joined(returned.run, 4) == [2]
    fetched = Counter(e["node"] for e in events(returned.run, "weights.fetch"))
    assert fetched[3] > 3, "it takes weights again after its return"
    for node, life in ((3, 3), (4, 2)):
        record = record_in(RunPaths(returned.run.run_dir).lost(1, node).read_bytes(), 1)
        assert record is not None
        assert record["joined"] == life


def test_pools_are_as_large_as_before_at_the_end(returned: Returned) -> None:
    grants = [(e["slab"], e["holder"]) for e in events(returned.run, "lease.grant")]
    assert Counter(grants)["n3s0", "rollout"] == 3
    assert Counter(grants)["n4s0", "genrm:judge"] == 2
    last = max(e["t"] for e in events(returned.run, "node.joined"))
    checks = {e["node"] for e in events(returned.run, "weights.check") if e["t"] > last}
    assert checks == {2, 3}, "both rollout nodes sample at the end"
