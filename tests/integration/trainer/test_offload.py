"""An optimizer that lives on the host is on the device for its steps only, and changes no bit."""

import pytest

from tests.integration.trainer.conftest import run_world
from tests.integration.trainer.test_layouts import assert_bit_equal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
AWAY = {"offload_optimizer": True}
LEARN = [["measured", 1], ["nap", 0], ["save", 1], ["publish", "after1"]]
GO_ON = [["train", 2], ["state", "state"], ["save", 2], ["publish", "final"]]
RESTORE = {
    "restore": "manifests/00000001.000001.json",
    "actions": [["train", 2], ["state", "state"], ["publish", "final"]],
}
KINDS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "overlapped": {"overlap_grad_reduce": True, "overlap_param_gather": True},
}
BYTES = {"float32": (12, 8), "bfloat16": (8, 12), "overlapped": (12, 8), "stateless": (12, 0)}
"""Of a parameter: itself, its gradient and its reference; the optimizer's state, over all ranks."""

NO_MOMENTS = {"optimizer": {"kind": "sgd", "sgd_momentum": 0.0}}


@pytest.fixture(scope="module", params=[1, 2])
def done(request, models, tmp_path_factory):
    """Pairs of jobs: the optimizer on the device, and away. Two resume from the other's save."""
    folder, jobs = tmp_path_factory.mktemp(f"world-{request.param}"), []

    def add(name, layout, store, **more):
        common = {"model": str(models["qwen3"]), "store": str(folder / f"store-{store}")}
        jobs.append({"name": name, "layout": layout, "actions": [*LEARN, *GO_ON], **common, **more})

    for kind, layout in KINDS.items():
        add(f"{kind}-here", layout, f"{kind}-here")
        add(f"{kind}-away", {**layout, **AWAY}, f"{kind}-away")
    add("stateless-here", {}, "stateless-here", **NO_MOMENTS)
    add("stateless-away", AWAY, "stateless-away", **NO_MOMENTS)
    learned, jobs = run_world(folder / "learned", request.param, jobs), []
    add("resumed-here", {}, "float32-away", **RESTORE)
    add("resumed-away", AWAY, "float32-here", **RESTORE)
    return learned | run_world(folder / "resumed", request.param, jobs)


@pytest.mark.parametrize("kind", [*KINDS, "stateless"])
def test_the_state_is_on_the_device_for_steps_only_and_no_bit_changes(done, kind):
    here, away = done[f"{kind}-here"], done[f"{kind}-away"]
    assert_bit_equal(away.tensors("state"), here.tensors("state"))
    assert_bit_equal(away.weights("final"), here.weights("final"))
    for mine, others in zip(away.notes, here.notes, strict=True):
        assert mine["metrics"] == others["metrics"]
        assert mine["left_bytes"] == [0]
        held, whole = mine["device_bytes"], set(others["device_bytes"]["micro_batch"])
        assert len(whole) == 1 and set(held["step"]) == whole and len(held["step"]) == 2
        assert len(set(held["micro_batch"])) == 1
        rest, state = BYTES[kind]
        state /= len(here.notes)
        assert 1 - held["micro_batch"][0] / whole.pop() == pytest.approx(state / (rest + state), abs=0.02)


@pytest.mark.parametrize("place", ["here", "away"])
def test_what_one_saved_the_other_resumes_bit_for_bit(done, place):
    undisturbed, resumed = done["float32-here"], done[f"resumed-{place}"]
    assert_bit_equal(resumed.tensors("state"), undisturbed.tensors("state"))
    assert_bit_equal(resumed.weights("final"), undisturbed.weights("final"))
