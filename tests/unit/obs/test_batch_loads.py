"""What a run measured of its batches: read from its events, and as figures of a simulation."""

import json

import pytest

from tests.obs_runs import event, make_run
from yatt.core.gpus.engine_model import EngineSpeed
from yatt.errors import ConfigError
from yatt.forecast.measured import measured_figures
from yatt.obs.story.batch_loads import read_batch_loads
from yatt.paths import RunPaths

JUDGE = "genrm:judge"


def load(iteration: int, *, attempt: int = 1, **changes) -> dict:
    role = {"step_s": 0.02, "sequence_s": 0.001, "room": 128, "engines": 1, "slabs": 4, "idle": 0.31}
    fields = {
        "iteration": iteration, "seconds": 12.3, "num_samples": 16, "lengths": [10.0 * i for i in range(21)],
        "verdicts": {JUDGE: 300.5}, "roles": {"rollout": role, JUDGE: {**role, "step_s": 0.04, "engines": 2}},
        "switch_s": 1.0, "train_s": 20.0, "kept": 0.8,
    }  # fmt: skip
    return event(iteration, "batch.load", attempt=attempt, **{**fields, **changes})


def test_the_last_batches_of_the_newest_attempt_are_read(tmp_path):
    events = [load(i) for i in range(1, 6)] + [load(4, attempt=2), load(5, attempt=2)]
    loads, num_bad = read_batch_loads(make_run(tmp_path, events=events).events)
    assert ([each.iteration for each in loads], num_bad) == ([4, 5], 0)
    assert loads[0].roles["rollout"].step_s == 0.02
    assert loads[0].lengths[-1] == 200.0


def test_figures_are_the_mean_of_the_last_batches_without_those_that_measured_nothing(tmp_path):
    events = [
        load(1, switch_s=100.0),
        load(2, switch_s=1.0, train_s=0, lengths=[0] * 21),
        load(3, switch_s=0, train_s=10, kept=1),
        load(4, switch_s=3.0, train_s=30.0, verdicts={JUDGE: 600}),
    ]
    paths = make_run(
        tmp_path, events=events, launch={"nodes": 2, "gpus_per_node": 4}, rollout={"n": 8},
        genrms=[{"name": "judge", "model": "j", "template": "{completion}", "verdict": {"choices": ["1"]}}],
        placement={"mode": "partial", "genrm_gpu_sets": 2},
    )  # fmt: skip
    figures, where = measured_figures(paths)
    assert figures.switch_s == 2.0
    assert figures.train_gpu_s == 20.0 * 8 / (2 * 8)
    assert figures.verdicts == {JUDGE: pytest.approx((300.5 * 2 + 600) / 3)}
    assert figures.kept == pytest.approx((0.8 + 1 + 0.8) / 3)
    assert figures.lengths[20] == pytest.approx(400 / 3)
    assert figures.speeds[JUDGE] == EngineSpeed(pytest.approx(0.04), pytest.approx(0.001))
    assert "3 iterations up to 4" in where


def test_an_engine_whose_speed_was_not_measured_has_none(tmp_path):
    silent = {"step_s": 0, "sequence_s": 0, "room": 8, "engines": 1, "slabs": 1, "idle": 0}
    paths = make_run(tmp_path, events=[load(1, roles={"rollout": silent}, verdicts={})])
    assert measured_figures(paths)[0].speeds == {}


def test_a_role_of_which_a_run_measured_nothing_does_not_make_the_batch_unreadable(tmp_path):
    """The leader writes null for a role that made no step yet, or that held no slab."""
    roles = load(1)["roles"]
    silent = {**roles[JUDGE], "step_s": None, "sequence_s": None, "idle": None}
    ((found,), num_bad) = read_batch_loads(
        make_run(tmp_path, events=[load(1, roles={**roles, JUDGE: silent})]).events
    )
    assert found.roles[JUDGE].idle is None and not num_bad


DAMAGED = (
    {"lengths": []}, {"lengths": [3.0, 2.0]}, {"lengths": ["1", "2"]}, {"lengths": [1.0, float("nan")]},
    {"lengths": {}}, {"kept": 0}, {"kept": 1.1}, {"kept": None}, {"num_samples": 1.5}, {"num_samples": -1},
    {"seconds": float("inf")}, {"seconds": True}, {"roles": []}, {"roles": {"rollout": {}}},
    {"roles": {"trainer": {}}}, {"roles": {"rollout": {"engines": 10**6}}},
    {"verdicts": {JUDGE: -1}}, {"verdicts": {"judge": 1}}, {"switch_s": "1"},
    {"train_s": 1e300},
)  # fmt: skip


@pytest.mark.parametrize("changes", DAMAGED, ids=str)
def test_a_damaged_event_is_skipped_and_counted(tmp_path, changes):
    paths = make_run(tmp_path, events=[load(1), load(2, **changes)])
    loads, num_bad = read_batch_loads(paths.events)
    assert ([each.iteration for each in loads], num_bad) == ([1], 1)


def test_a_run_without_measured_batches_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match="no measured batch, and 1 that cannot be read"):
        measured_figures(make_run(tmp_path, events=[load(1, kept=-1)]))
    with pytest.raises(ConfigError, match="not a run folder"):
        measured_figures(RunPaths(tmp_path))


def test_lines_that_are_no_events_are_passed_over(tmp_path):
    paths = make_run(tmp_path, events=[load(1)])
    with open(paths.events, "ab") as file:
        file.write(b'{"kind": "batch.load"}\n\xff\xfe\n[]\n{"kind":\n' + json.dumps(load(2)).encode() + b"\n")
        file.write(json.dumps(load(3)).encode()[:-10])
    loads, num_bad = read_batch_loads(paths.events)
    assert ([each.iteration for each in loads], num_bad) == ([1, 2], 5)
