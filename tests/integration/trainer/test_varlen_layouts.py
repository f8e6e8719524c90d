"""Attention of a stream in one kernel learns what attention sequence by sequence learns, in each layout."""

from functools import cache

import pytest

from tests.integration.trainer.conftest import Job, make_model, run_world
from tests.integration.trainer.test_families import ALGORITHM, SP, TINY
from tests.integration.trainer.test_layouts import CP, TP, largest_difference

pytestmark = pytest.mark.slow
LAYOUTS = {1: {"one": {}}, 2: {"cp2": {CP: 2}, "tp2": {TP: 2, **SP}}, 4: {"cp4": {CP: 4}}}
ACTIONS = [["gradient", "first"], ["publish", "final"], ["streams", 0]]
"""An iteration has two optimizer steps: the second one's gradient is of weights that have moved."""

WORLDS = [(1, "mistral"), (2, "qwen3"), (2, "deepseek_v3"), (4, "qwen2")]
"""Mistral and Qwen2 have windows, in all layers and in the last one."""
MIXED = (2, "qwen3")
"""The world that also has a job in which only one of two ranks has the kernel."""


@pytest.fixture(scope="session")
def worlds(tmp_path_factory):
    """Runs the world of a size and kind, once."""

    @cache
    def done(world_size: int, kind: str) -> dict[str, Job]:
        folder = tmp_path_factory.mktemp(f"{kind}-{world_size}")
        model = make_model(folder / "model", kind, num_hidden_layers=2, **TINY[kind])
        common = {"model": str(model), "algorithm": ALGORITHM, "actions": ACTIONS}
        jobs = [
            {"name": f"{name}-{how}", "layout": layout, **common, **more}
            for name, layout in LAYOUTS[world_size].items()
            for how, more in {"loop": {}, "kernel": {"varlen": True}}.items()
        ]
        if (world_size, kind) == MIXED:
            mixed = {"varlen": True, "without_kernel": [1]}
            jobs.append({"name": "mixed", "layout": {CP: 2}, **common, **mixed})
        return run_world(folder / "jobs", world_size, jobs)

    return done


@pytest.mark.parametrize(("world_size", "kind"), WORLDS)
def test_a_stream_in_one_kernel_has_the_gradients_of_its_sequences(worlds, world_size, kind):
    done = worlds(world_size, kind)
    for name in LAYOUTS[world_size]:
        kernel, loop = done[f"{name}-kernel"], done[f"{name}-loop"]
        assert all(note["streams"] for note in kernel.notes), "the kernel was used"
        assert not any(note["streams"] for note in loop.notes)
        assert largest_difference(kernel.weights("final"), loop.weights("final")) < 1e-6
        gradient, expected = kernel.tensors("first"), loop.tensors("first")
        for key, tensor in expected.items():
            far = (gradient[key] - tensor).abs().max().item()
            assert far < 1e-6 * max(tensor.abs().max().item(), 0.1), (name, key)


def test_ranks_that_gather_keys_together_use_the_kernel_only_if_all_have_it(worlds):
    done = worlds(*MIXED)
    assert largest_difference(done["mixed"].weights("final"), done["cp2-loop"].weights("final")) == 0
