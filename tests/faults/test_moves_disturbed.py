"""Faults in the middle of a move, at each of its states: no slab has two holders, no token is lost or made
twice, and the run goes on in the same attempt."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bench.oversampling import balance_of
from tests.faults.test_lost_nodes import controller
from tests.moving_slabs import JUDGE, double_holders, moving_run, turning_run
from tests.runs import RunFile, kill, rows, start, wait_for, yatt

pytestmark = pytest.mark.faults
ITERATIONS = 4
Event = dict[str, Any]


def events(run: RunFile, *kinds: str) -> list[Event]:
    path = run.run_dir / "events.jsonl"
    found = rows(path) if path.exists() else []
    return [event for event in found if not kinds or event["kind"] in kinds]


def first(run: RunFile, kind: str, holds: Callable[[Event], bool] = lambda _: True) -> Event:
    """The first such event, waited for."""
    return wait_for(
        lambda: next((event for event in events(run, kind) if holds(event)), None), timeout_s=120, what=kind
    )


def process_of(run: RunFile, name: str) -> int:
    """The newest process of a worker."""
    found = [e for e in events(run, "worker.start") if e["worker"].rpartition(".")[0] == name]
    return found[-1]["pid"]


def finished(run: RunFile, process: Any) -> list[Event]:
    said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    found = events(run)
    assert double_holders(found) == []
    assert len([e for e in found if e["kind"] == "attempt.start"]) >= 1
    balance = balance_of(run)
    assert (balance.sampled, balance.restarted) == (balance.trained + balance.left, 0)
    return found


def moving(tmp_path: Path) -> tuple[RunFile, Any, Event]:
    """A run at the moment when its first slab was ordered to the GenRM."""
    run = moving_run(tmp_path, "disaggregated", ITERATIONS)
    process = start("run", str(run.write()))
    return run, process, first(run, "slab.move")


def attempts(found: list[Event]) -> set[int]:
    return {event["attempt"] for event in found}


def test_engines_that_should_sleep_and_one_that_has_moved_stand_still_or_are_killed(tmp_path: Path):
    """Three faults in one run: `protocol/test_moves_walk.py` has every order of the answers, but neither
    processes nor leases."""
    run, process, move = moving(tmp_path)
    kill(process_of(run, f"rollout-{move['slab']}"), signal.SIGSTOP)
    second = first(run, "slab.move", lambda e: e["slab"] != move["slab"] and e["after"] == JUDGE)
    kill(process_of(run, f"rollout-{second['slab']}"))
    slabs = {move["slab"], second["slab"]}
    moved = first(run, "slab.moved", lambda e: e["has_moved"] and e["slab"] in slabs)
    name = f"genrm-judge-{moved['slab']}"
    kill(process_of(run, name))
    found = finished(run, process)
    assert attempts(found) == {1}
    for slab in slabs:
        answers = [e["has_moved"] for e in found if e["kind"] == "slab.moved" and e["slab"] == slab]
        assert answers[0], "a dead holder has released its slab"
    starts = [e for e in found if e["kind"] == "worker.start" and e["worker"].startswith(name)]
    assert len(starts) == 2, "the one that had moved was started again"


def test_the_engine_that_should_wake_is_killed_so_the_slab_goes_back(tmp_path: Path):
    run, process, move = moving(tmp_path)
    name = f"genrm-judge-{move['slab']}"
    begun = first(run, "worker.start", lambda e: e["worker"].startswith(name))
    kill(begun["pid"])
    found = finished(run, process)
    assert attempts(found) == {1}
    (unfit,) = [e for e in found if e["kind"] == "engine.unfit"]
    assert (unfit["slab"], unfit["holder"], unfit["first"]) == (move["slab"], JUDGE, "rollout")
    later = [e for e in found if e["kind"] == "slab.move" and e["t"] > unfit["t"]]
    assert move["slab"] not in {e["slab"] for e in later if e["after"] == JUDGE}, "it is not tried again"
    grants = [e["holder"] for e in found if e["kind"] == "lease.grant" and e["slab"] == move["slab"]]
    assert grants == ["rollout", JUDGE, "rollout"]


def test_a_node_without_memory_for_a_second_engine_starts_none(tmp_path: Path):
    run = moving_run(tmp_path, "disaggregated", 2)  # with one judge an iteration is long
    run.settings["genrms"][0]["kv_cache_bytes"] = 1 << 45  # the scripted engine has none
    found = finished(run, start("run", str(run.write())))
    assert attempts(found) == {1}
    unfit = [e for e in found if e["kind"] == "engine.unfit"]
    assert unfit and all("MiB of host memory" in e["error"] for e in unfit)
    started = {e["worker"] for e in found if e["kind"] == "worker.start" and "genrm" in e["worker"]}
    assert started == {"genrm-judge-n2s2.1"}, "only the one that the slab had at first"
    assert len({e["slab"] for e in unfit}) == len(unfit), "each slab is tried once"


def test_a_turn_for_which_engines_cannot_be_built_is_the_last_one(tmp_path: Path):
    """A whole run: its batch is judged by the GPU set that can, and the next ones have a split again."""
    run = turning_run(tmp_path, ITERATIONS)
    run.settings["genrms"][0]["kv_cache_bytes"] = 1 << 45
    found = finished(run, start("run", str(run.write())))
    assert attempts(found) == {1}
    unfit = {e["slab"] for e in found if e["kind"] == "engine.unfit"}
    assert len(unfit) == 3, "each but the one that the judge had at first"
    scored = [e["iteration"] for e in found if e["kind"] == "phase.begin" and e["phase"] == "score"]
    assert len(set(scored)) == 1, scored
    trained = [row for row in rows(run.run_dir / "metrics.jsonl") if row["training/global_step"]]
    after = [row[f"placement/gpu_sets/{JUDGE}"] for row in trained if row["training/global_step"] > scored[0]]
    assert after and set(after) == {1}


def test_the_node_of_a_move_is_lost_and_comes_back(tmp_path: Path):
    run, process, move = moving(tmp_path)
    kill(controller(run, int(move["slab"][1])))
    found = finished(run, process)
    assert attempts(found) == {1}
    lost = [e["node"] for e in found if e["kind"] == "node.lost"]
    assert len(lost) == 1


def test_a_run_that_is_stopped_in_a_move_continues_with_its_last_split(tmp_path: Path):
    run, process, _ = moving(tmp_path)
    stopped = yatt("cancel", str(run.run_dir))
    assert stopped.returncode == 0, stopped.stderr
    process.communicate(timeout=300)
    again = yatt("resume", str(run.run_dir))
    assert again.returncode == 0, again.stdout + again.stderr
    found = events(run)
    assert double_holders(found) == []
    balance = balance_of(run)
    assert (balance.sampled, balance.restarted) == (balance.trained + balance.left, 0)
    trained = [row for row in rows(run.run_dir / "metrics.jsonl") if row["training/global_step"]]
    splits = [row["placement/gpu_sets/rollout"] for row in trained]
    assert len(splits) == ITERATIONS
