"""SGD steps as torch's does, and its state is saved and resumed in any layout, to the bit."""

import pytest
import torch

from tests.integration.trainer.conftest import run_world
from tests.integration.trainer.test_layouts import TP, assert_bit_equal, largest_difference

pytestmark = pytest.mark.slow
LR, DECAY, MOMENTUM = 0.1, 0.05, 0.75
SETTINGS = {
    "kind": "sgd", "lr": LR, "weight_decay": DECAY, "clip_grad": 0.0, "lr_warmup_steps": 0,
    "sgd_momentum": MOMENTUM,
}  # fmt: skip
PLAIN = {**SETTINGS, "sgd_momentum": 0.0}
ONE_STEP = {"mini_batch_size": 4}
LEARN = [["publish", "start"], ["gradient", "first"], ["save", 1], ["state", "state1"], ["publish", "after1"]]
GO_ON = [["train", 2], ["state", "state2"], ["publish", "final"]]
LAYOUTS = {
    "tp2": {TP: 2, "sequence_parallel": True},
    "dp2": {"overlap_grad_reduce": True, "overlap_param_gather": True},
}
SAVED = "manifests/00000001.000001.json"


def job_of(models, folder, name, settings, **more):
    common = {"model": str(models["qwen3"]), "optimizer": settings, "store": str(folder / f"store-{name}")}
    return {"name": name, "layout": ONE_STEP, "actions": [*LEARN, *GO_ON], **common, **more}


def resumed_of(models, folder, name, saved, settings=SETTINGS, layout=None):
    actions = [["state", "state1"], ["publish", "after1"], *GO_ON]
    more = {"restore": SAVED, "actions": actions, "layout": {**ONE_STEP, **(layout or {})}}
    return {**job_of(models, folder, name, settings, **more), "store": str(folder / f"store-{saved}")}


@pytest.fixture(scope="session")
def alone(models, tmp_path_factory):
    """One rank, with momentum, without, and with Adam."""
    folder = tmp_path_factory.mktemp("alone")
    jobs = [
        job_of(models, folder, "momentum", SETTINGS),
        job_of(models, folder, "plain", PLAIN),
        job_of(models, folder, "adam", {}),
        resumed_of(models, folder, "momentum-resumed", "momentum"),
        resumed_of(models, folder, "plain-resumed", "plain", PLAIN),
        {**resumed_of(models, folder, "from-adam", "adam"), "actions": [], "is_refused": True},
        {**resumed_of(models, folder, "from-sgd", "momentum", {}), "actions": [], "is_refused": True},
    ]
    return folder, run_world(folder / "jobs", 1, jobs)


@pytest.fixture(scope="session")
def pair(models, alone):
    """Two ranks: what they learn, and what they make of one rank's state."""
    folder, jobs = alone[0], []
    for name, layout in LAYOUTS.items():
        jobs.append(job_of(models, folder, name, SETTINGS, layout={**ONE_STEP, **layout}))
        jobs.append(resumed_of(models, folder, f"{name}-resumed", name, layout=layout))
        jobs.append(resumed_of(models, folder, f"{name}-from-one", "momentum", layout=layout))
    return run_world(folder / "pair", 2, jobs)


def test_a_step_is_torchs_step(alone):
    job = alone[1]["momentum"]
    parameters = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in job.weights("start").items()}
    for name, parameter in parameters.items():
        parameter.grad = job.tensors("first")[name]
    norms = [parameter for parameter in parameters.values() if parameter.dim() == 1]
    others = [parameter for parameter in parameters.values() if parameter.dim() > 1]
    groups = [{"params": norms, "weight_decay": 0.0}, {"params": others, "weight_decay": DECAY}]
    optimizer = torch.optim.SGD(groups, lr=LR, momentum=MOMENTUM)
    optimizer.step()
    assert_bit_equal(job.weights("after1"), {name: each.detach() for name, each in parameters.items()})
    buffers = {name: optimizer.state[each]["momentum_buffer"] for name, each in parameters.items()}
    state = {
        name.removeprefix("momentum_buffer."): tensor
        for name, tensor in job.tensors("state1").items()
        if name.startswith("momentum_buffer.")
    }
    assert_bit_equal(state, buffers)
    assert largest_difference(job.weights("start"), job.weights("after1")) > 1e-3


def test_momentum_adds_its_share_of_the_step_before(alone):
    with_it, without = alone[1]["momentum"], alone[1]["plain"]
    assert_bit_equal(with_it.weights("after1"), without.weights("after1"))
    assert not [name for name in without.tensors("state1") if name.startswith("momentum")]
    buffers = with_it.tensors("state1")
    for name, tensor in without.weights("final").items():
        share = LR * MOMENTUM * buffers[f"momentum_buffer.{name}"]
        torch.testing.assert_close(tensor - with_it.weights("final")[name], share, rtol=1e-4, atol=1e-6)


def test_a_resumed_run_ends_bit_equal_and_any_layout_reads_the_state(alone, pair):
    jobs = {**alone[1], **pair}
    for name in ("momentum", "plain", *LAYOUTS):
        for point in ("state1", "state2"):
            assert_bit_equal(jobs[f"{name}-resumed"].tensors(point), jobs[name].tensors(point))
    for name in LAYOUTS:
        assert largest_difference(jobs[name].weights("final"), jobs["momentum"].weights("final")) < 1e-5
        moved = jobs[f"{name}-from-one"]
        assert_bit_equal(moved.tensors("state1"), jobs["momentum"].tensors("state1"))
        assert largest_difference(moved.weights("final"), jobs["momentum"].weights("final")) < 1e-5


def test_the_state_of_another_kind_is_refused_with_the_key(alone):
    says = "state of another optimizer (exp_avg, exp_avg_sq, not momentum_buffer); write the kind"
    assert says in alone[1]["from-adam"].notes[0]["fault"]
    assert "(momentum_buffer, not exp_avg, exp_avg_sq)" in alone[1]["from-sgd"].notes[0]["fault"]
