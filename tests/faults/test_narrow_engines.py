"""Two rollout engines of one slot each, beside a GenRM that needs the whole slab of two; one of them ends."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_lost_samples import events, finish
from tests.faults.test_resume_exact import final_state, metrics
from tests.runs import RunFile, environment, kill, rows, start, wait_for, yatt
from tests.standing_still import interpreter_that_stands_still, put_interpreter
from tests.tiny_models import make_scripted_model

pytestmark = pytest.mark.faults

FIRST, SECOND = "rollout-n0s0e0", "rollout-n0s0e1"
SCRIPT = {"steps_per_token": 20, "seconds_per_step": 0.002}


def run_file(folder: Path, **settings: Any) -> RunFile:
    judge = make_scripted_model(folder / "judge", mean_tokens=3)
    (Path(judge) / "model.safetensors").write_bytes(b"")
    section = {"name": "judge", "model": judge, "template": "{prompt}{completion}", "engine": "scripted",
               "verdict": {"pattern": "([a-m])", "scores": {}}, "max_model_tokens": 64, "tp_size": 2,
               "on_unparsable": "score", "unparsable_score": 0.5}  # fmt: skip
    run = RunFile(folder, {
        "launch": {"nodes": 1, "gpus_per_node": 2},
        "genrms": [section],
        "trainer": {"total_iterations": 3},
        "lease": {"renew_s": 0.5, "ttl_s": 10.0, "term_s": 1.0},
        **settings,
    })  # fmt: skip
    run.write()
    (folder / "policy" / "scripted.json").write_text(json.dumps(SCRIPT))
    return run


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    """The same run, undisturbed, with one rollout engine on the slab."""
    run = run_file(tmp_path_factory.mktemp("wide"), rollout={"tp_size": 2})
    assert (done := yatt("run", str(run.write()))).returncode == 0, done.stdout
    return run


def check_as_wide(run: RunFile, wide: RunFile) -> None:
    assert len(events(run, "attempt.start")) == 1, "one attempt"
    assert not events(run, "lease.expire") and not events(run, "rollout.group.drop")
    assert grants(run) == grants(wide), "no slab changed hands for it"
    assert metrics(run) == metrics(wide)
    assert final_state(run) == final_state(wide)


def grants(run: RunFile) -> list[tuple[str, int]]:
    return [(event["holder"], event["token"]) for event in events(run, "lease.grant")]


def started(run: RunFile) -> list[str]:
    """Engines that were started, with the number of the start."""
    names = {event["worker"] for event in events(run, "worker.start")}
    return sorted(name for name in names if name.startswith(("rollout", "genrm")))


def ends_of(run: RunFile, start: str) -> list[str]:
    """How a start of an engine ended."""
    return [event["how"] for event in events(run, "worker.end") if event["worker"] == start]


def pid_of(run: RunFile, name: str) -> int:
    """The process of an engine's newest start, once it is awake with weights."""

    def found() -> list[dict[str, Any]]:
        starts = [e for e in events(run, "worker.start") if e["worker"].rpartition(".")[0] == name]
        awake = {e["worker"] for e in events(run, "weights.check")}
        return [e for e in starts[-1:] if e["worker"] in awake]

    return int(wait_for(found, timeout_s=60, what=f"{name} to be awake")[0]["pid"])


def sampling(run: RunFile, iterations: int) -> None:
    """Until completions are sampled after so many iterations."""
    wait_for(
        lambda: len(events(run, "rollout.group.open")) > iterations,
        timeout_s=60, what="completions to be sampled",
    )  # fmt: skip


def test_two_narrow_engines_change_no_bit_of_what_one_wide_engine_does(tmp_path: Path, wide: RunFile) -> None:
    run = run_file(tmp_path)
    assert (done := yatt("run", str(run.write()))).returncode == 0, done.stdout
    assert started(run) == ["genrm-judge-n0s0.1", f"{FIRST}.1", f"{SECOND}.1"]
    assert started(wide) == ["genrm-judge-n0s0.1", "rollout-n0s0.1"]
    check_as_wide(run, wide)


def test_an_engine_that_is_killed_costs_its_requests_and_not_its_neighbour(
    tmp_path: Path, wide: RunFile
) -> None:
    run = run_file(tmp_path)
    process = start("run", str(run.write()))
    sampling(run, 1)
    assert kill(pid_of(run, SECOND))
    finish(process)
    assert started(run) == ["genrm-judge-n0s0.1", f"{FIRST}.1", f"{SECOND}.1", f"{SECOND}.2"]
    check_as_wide(run, wide)


def test_an_engine_that_stands_still_is_ended_alone(tmp_path: Path, wide: RunFile) -> None:
    """Its neighbour's heartbeats do not hide it."""
    run = run_file(tmp_path)
    process = start("run", str(run.write()))
    sampling(run, 0)
    assert kill(pid_of(run, FIRST), signal.SIGSTOP)
    finish(process)
    expired = events(run, "engine.expire")
    assert [(e["worker"], "was not heard of for 10 s" in e["cause"]) for e in expired] == [
        (f"{FIRST}.1", True)
    ]
    again = [name for name in started(run) if name.startswith(FIRST)]
    assert again[0] == f"{FIRST}.1" and len(again) == 2, "a start that came to nothing has a number too"
    assert {*started(run)} - {*again} == {"genrm-judge-n0s0.1", f"{SECOND}.1"}
    check_as_wide(run, wide)


def test_a_slab_is_taken_back_while_an_engine_of_it_cannot_begin(tmp_path: Path, wide: RunFile) -> None:
    """The others finish the batch, the trainer gets the slab, and the engine is back when it can begin."""
    launch = {"nodes": 1, "gpus_per_node": 2, "nurseries": False}  # a forked worker needs no interpreter
    run = run_file(tmp_path / "still", launch=launch)
    python = tmp_path / "venv/bin/python"
    put_interpreter(python)
    process = subprocess.Popen(
        [str(python), "-m", "yatt.cli.main", "run", str(run.write())],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    sampling(run, 0)
    victim = pid_of(run, SECOND)
    with interpreter_that_stands_still(python) as lease:
        assert kill(victim)
        wait_for(lambda: len(grants(run)) > 3, what="the trainer to get the slab")
        ends = wait_for(lambda: ends_of(run, f"{SECOND}.2"), timeout_s=60, what="the start to be abandoned")
        lease.release()
    finish(process)
    assert ends == ["was not started: its GPU set was taken back"]
    assert started(run) == ["genrm-judge-n0s0.1", f"{FIRST}.1", f"{SECOND}.1", f"{SECOND}.3"]
    check_as_wide(run, wide)


def test_both_engines_sample_and_each_ones_end_costs_groups_of_its_own(tmp_path: Path) -> None:
    """Without retries, each group that is lost names its engine."""
    run = run_file(
        tmp_path, run={"deterministic": False}, rollout={"max_retries": 0}, trainer={"total_iterations": 1},
    )  # fmt: skip
    (tmp_path / "policy" / "scripted.json").write_text(json.dumps({**SCRIPT, "steps_per_token": 400}))
    process = start("run", str(run.write()))
    sampling(run, 0)
    for name in (FIRST, SECOND):
        assert kill(pid_of(run, name))

        def is_dropped(name: str = name) -> bool:
            return any(f"{name}.1 ended" in event["reason"] for event in events(run, "rollout.group.drop"))

        wait_for(is_dropped, timeout_s=60, what=f"a group that {name} sampled to be dropped")
    finish(process)
    assert len(rows(run.run_dir / "metrics.jsonl")) == 1 and len(events(run, "attempt.start")) == 1
    assert started(run) == [
        "genrm-judge-n0s0.1", f"{FIRST}.1", f"{FIRST}.2", f"{SECOND}.1", f"{SECOND}.2",
    ]  # fmt: skip
