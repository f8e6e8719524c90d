"""Experts computed by grouped products learn what experts one by one learn, and are not copied."""

import pytest

from tests.integration.trainer.conftest import make_model, run_world
from tests.integration.trainer.test_families import ALGORITHM, EP, EXPERT_TP, SP, TINY
from tests.integration.trainer.test_layouts import TP, assert_bit_equal, largest_difference

pytestmark = pytest.mark.slow
KIND = "qwen2_moe"
LAYOUTS = {
    1: {"one": {}},
    2: {"tp2": {TP: 2, **SP}, "ep2": {EP: 2}, "tp2ep2": {TP: 2, EP: 2, EXPERT_TP: 1, **SP}},
}
ACTIONS = [
    ["publish", "start"],
    ["together", 0],
    ["gradient", "first"],
    ["publish", "final"],
    ["products", 0],
]


@pytest.fixture(scope="module", params=LAYOUTS)
def done(request, tmp_path_factory):
    """The same steps by both, in each layout."""
    folder = tmp_path_factory.mktemp(f"world-{request.param}")
    model = make_model(folder / "model", KIND, num_hidden_layers=2, **TINY[KIND])
    common = {"model": str(model), "algorithm": ALGORITHM, "actions": ACTIONS}
    jobs = [
        {"name": f"{name}-{how}", "layout": layout, **common, **more}
        for name, layout in LAYOUTS[request.param].items()
        for how, more in {"loop": {}, "grouped": {"grouped": True}}.items()
    ]
    again = {"layout": {"recompute": "selective", "recompute_modules": ["moe"]}, "grouped": True}
    if request.param == 1:
        jobs.append({"name": "again", **common, **again})
    return request.param, run_world(folder / "jobs", request.param, jobs)


def test_grouped_products_have_the_gradients_of_a_loop(done):
    world_size, jobs = done
    pairs = [(f"{name}-grouped", f"{name}-loop") for name in LAYOUTS[world_size]]
    for name, other in [*pairs, *([("again", "one-loop")] if world_size == 1 else [])]:
        grouped, loop = jobs[name], jobs[other]
        assert all(note["products"] for note in grouped.notes), "they were used"
        assert not any(note["products"] for note in loop.notes)
        assert_bit_equal(grouped.weights("start"), loop.weights("start"))
        assert largest_difference(grouped.weights("final"), loop.weights("final")) < 1e-6
        gradient, expected = grouped.tensors("first"), loop.tensors("first")
        for key, tensor in expected.items():
            far = (gradient[key] - tensor).abs().max().item()
            assert far < 1e-6 * max(tensor.abs().max().item(), 0.1), (name, key)
        assert all(all(note["together"]) and len(note["together"]) == 4 for note in grouped.notes)
