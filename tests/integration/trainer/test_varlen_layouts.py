"""Attention of a stream in one kernel learns what attention sequence by sequence learns, in each layout."""

import pytest

from tests.integration.trainer.conftest import make_model, run_world
from tests.integration.trainer.test_families import SP, TINY
from tests.integration.trainer.test_layouts import CP, TP, largest_difference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LAYOUTS = {1: {"one": {}}, 2: {"cp2": {CP: 2}, "tp2": {TP: 2, **SP}}, 4: {"cp4": {CP: 4}}}
ACTIONS = [["gradient", "first"], ["train", 2], ["publish", "final"], ["streams", 0]]
WORLDS = [(1, "qwen3"), (2, "qwen3"), (2, "deepseek_v3"), (4, "qwen3")]


@pytest.mark.parametrize(("world_size", "kind"), WORLDS)
def test_a_stream_in_one_kernel_has_the_gradients_of_its_sequences(tmp_path, world_size, kind):
    model = make_model(tmp_path / "model", kind, num_hidden_layers=2, **TINY[kind])
    jobs = [
        {"name": f"{name}-{how}", "model": str(model), "layout": layout, "actions": ACTIONS, **more}
        for name, layout in LAYOUTS[world_size].items()
        for how, more in {"loop": {}, "kernel": {"varlen": True}}.items()
    ]
    done = run_world(tmp_path / "jobs", world_size, jobs)
    for name in LAYOUTS[world_size]:
        kernel, loop = done[f"{name}-kernel"], done[f"{name}-loop"]
        assert all(note["streams"] for note in kernel.notes), "the kernel was used"
        assert not any(note["streams"] for note in loop.notes)
        assert largest_difference(kernel.weights("final"), loop.weights("final")) < 1e-6
        gradient, expected = kernel.tensors("first"), loop.tensors("first")
        for key, tensor in expected.items():
            far = (gradient[key] - tensor).abs().max().item()
            assert far < 1e-6 * max(tensor.abs().max().item(), 0.1), (name, key)


def test_ranks_that_gather_keys_together_use_the_kernel_only_if_all_have_it(tmp_path):
    model = make_model(tmp_path / "model", "qwen3", num_hidden_layers=2, **TINY["qwen3"])
    job = {"model": str(model), "layout": {CP: 2}, "actions": ACTIONS}
    mixed = {"varlen": True, "without_kernel": [1]}
    jobs = [{"name": "loop", **job}, {"name": "mixed", **job, **mixed}]
    done = run_world(tmp_path / "jobs", 2, jobs)
    assert largest_difference(done["mixed"].weights("final"), done["loop"].weights("final")) == 0
