"""What the backward pass computes again gives the same gradients, and less is kept for it."""

import pytest

from tests.integration.trainer.conftest import make_model, run_world
from tests.integration.trainer.test_families import ALGORITHM, TINY
from tests.integration.trainer.test_layouts import CP, TP, assert_bit_equal, largest_difference

pytestmark = pytest.mark.slow
NUM_LAYERS = 3
DENSE, EXPERTS, LATENT = "qwen3", "qwen2_moe", "deepseek_v3"
MODULES = {
    DENSE: (["mlp"],),
    EXPERTS: (["shared_experts"], ["moe"]),
    LATENT: (["mlp", "moe"], ["mla_up_proj"], ["core_attn", "mla_up_proj", "shared_experts"]),
}
SPLIT = {TP: 2, "sequence_parallel": True}
ACTIONS = [["kept", "first"], ["publish", "final"]]
"""An iteration has two optimizer steps: the second one's gradient is of weights that have moved."""


def settings_of(kind, world_size):
    """Each way to compute again, by its name; on two ranks only whole layers, and the last of the parts."""
    yield "full", {"recompute": "full"}
    if world_size == 1:
        yield "first", {"recompute": "full", "recompute_layers": 1}
    for modules in MODULES[kind] if world_size == 1 else MODULES[kind][-1:]:
        yield "+".join(modules), {"recompute": "selective", "recompute_modules": modules}


def jobs_of(prefix, model, layout, settings):
    common = {"model": str(model), "algorithm": ALGORITHM, "actions": ACTIONS}
    return [
        {"name": f"{prefix}{name}", "layout": {**layout, **each}, **common}
        for name, each in {"none": {}, **settings}.items()
    ]


def assert_same_with_less(done):
    """Gradients and weights of every job are those of `none`, on each rank with fewer bytes kept.

    Parts of a layer add their input's gradient to the residual's in another order, which rounds otherwise.
    """
    plain = done.pop("none")
    for name, job in done.items():
        if name in ("full", "first"):
            assert_bit_equal(job.weights("final"), plain.weights("final"))
        assert largest_difference(job.weights("final"), plain.weights("final")) < 1e-6, name
        gradient = job.tensors("first")
        for tensor_name, expected in plain.tensors("first").items():
            far = (gradient[tensor_name] - expected).abs().max().item()
            assert far < 1e-6 * max(expected.abs().max().item(), 0.1), (name, tensor_name)
        for mine, others in zip(job.notes, plain.notes, strict=True):
            assert mine["kept_bytes"] < 0.97 * others["kept_bytes"], name


@pytest.fixture(scope="module", params=[1, 2])
def done(request, tmp_path_factory):
    """Every way to compute again, of every kind of model, on one rank and on two that share matrices."""
    folder, layout = tmp_path_factory.mktemp(f"world-{request.param}"), SPLIT if request.param > 1 else {}
    jobs = []
    for kind in MODULES:
        model = make_model(folder / kind, kind, num_hidden_layers=NUM_LAYERS, **TINY[kind])
        jobs += jobs_of(f"{kind}-", model, layout, dict(settings_of(kind, request.param)))
    return run_world(folder / "jobs", request.param, jobs)


@pytest.mark.parametrize("kind", MODULES)
def test_what_is_computed_again_has_the_same_gradient_and_is_not_kept(done, kind):
    jobs = {name.removeprefix(f"{kind}-"): job for name, job in done.items() if name.startswith(f"{kind}-")}
    kept = {name: job.notes[0]["kept_bytes"] for name, job in jobs.items()}
    assert kept["full"] < 0.1 * kept["none"]
    assert "first" not in kept or kept["full"] < kept["first"] < kept["none"]
    assert_same_with_less(jobs)


def test_attention_computed_again_keeps_no_gathered_keys(tmp_path):
    model = make_model(tmp_path / "model", DENSE, num_hidden_layers=NUM_LAYERS, **TINY[DENSE])
    settings = {"attention": {"recompute": "selective", "recompute_modules": ["core_attn"]}}
    jobs = jobs_of("", model, {CP: 2}, settings)
    assert_same_with_less(run_world(tmp_path / "world", 2, jobs))
