"""Norms over all heads, norms after the halves of a layer, YaRN in some layers: OLMo-2, OLMo-3, MiniMax-M2.

The matrix of families proves them in every layout; here are layouts that it leaves out, and mistakes.
"""

import math

import pytest
from safetensors.torch import load_file

from tests.integration.trainer.conftest import make_model, run_world
from tests.integration.trainer.paper_losses import paper_gradient
from tests.integration.trainer.test_families import ALGORITHM, ONE_STEP, SP, TINY, TP, WRONG, not_equal
from tests.integration.trainer.test_layouts import farthest, hf_logprobs

pytestmark = pytest.mark.slow
NUM_LAYERS = 2
LEARN = [["publish", "start"], ["probe", "probed"], ["gradient", "first"]]
SHARED = {TP: 2, **SP}
RIGHT = {
    "without-sp": {TP: 2}, "again": {**SHARED, "recompute": "full"},
    "mlp-again": {**SHARED, "recompute": "selective", "recompute_modules": ["core_attn", "mlp"]},
}  # fmt: skip
TRAPS = ("norm-of-one-rank", "norm-gradient-of-one-rank", "norm-added-up", "norm-unmarked")
READ = "replace(right, read=lambda values: replace(right.read(values), {}))"
BEFORE = READ.format("layers=tuple(replace(layer, norms_after=False) for layer in right.read(values).layers)")
NO_TEMPERATURE = READ.format("yarn=replace(right.read(values).yarn, mscale=0.0)")
MISTAKES = {
    "norm-of-each-head": ("olmo2", {"trap": "norm-of-each-head"}),
    "norm-of-each-head-of-minimax": ("minimax_m2", {"trap": "norm-of-each-head"}),
    "no-bias-of-the-router": ("minimax_m2", {"trap": "norm-and-no-bias"}),
    "norm-before-the-half": ("olmo2", BEFORE),
    "yarn-everywhere": ("olmo3", {"trap": "norm-yarn-everywhere"}),
    "no-yarn": ("olmo3", READ.format("yarn=None")),
    "no-temperature": ("olmo3", NO_TEMPERATURE),
    "window-one-short": (
        "olmo3", "replace(right, read=lambda values: right.read({**values, 'sliding_window': 3}))",
    ),
    "all-rotated": ("minimax_m2", READ.format("rotary_share=1.0")),
}  # fmt: skip


def model_of(folder, kind):
    return make_model(folder / kind, kind, num_hidden_layers=NUM_LAYERS, **TINY[kind])


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A model that two ranks share: its folder, and what they did with it."""
    folder = tmp_path_factory.mktemp("shared")
    model = model_of(folder, "olmo2")
    common = {"model": str(model), "algorithm": ALGORITHM, "actions": LEARN}
    jobs = [{"name": name, "layout": layout | ONE_STEP, **common} for name, layout in RIGHT.items()]
    jobs += [{"name": trap, "trap": trap, "layout": SHARED | ONE_STEP, **common} for trap in TRAPS]
    return model, run_world(folder / "world", 2, jobs)


def worst(job, expected):
    """The largest difference of a gradient, relative to the tensor's largest element, by name."""
    got = job.tensors("first")
    assert got.keys() == expected.keys()
    return {
        name: ((got[name] - tensor).abs().max() / max(tensor.abs().max().item(), 0.1)).item()
        for name, tensor in expected.items()
    }


def norm_of(gradients):
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in gradients.values()))


@pytest.mark.parametrize("name", RIGHT)
def test_a_norm_over_the_heads_of_two_ranks_is_transformers(shared, name):
    """A whole run of two ranks, of all tests here: only ranks reduce a sum and its gradient."""
    model, done = shared
    expected, job = paper_gradient(model, ALGORITHM, num_steps=1), done[name]
    assert farthest(job.notes[0]["probe"]["logprobs"], hf_logprobs(model)) < 3e-6
    assert max(worst(job, expected).values()) < 1e-5
    assert not_equal(job.weights("start"), load_file(model / "model.safetensors")) == []
    for note in job.notes:
        assert note["metrics"][0]["actor/grad_norm"] == pytest.approx(norm_of(expected), rel=1e-5)


def test_mistakes_of_ranks_that_share_a_norm_are_found(shared):
    """The first one is in log-probs; each other one in gradients or their norm only."""
    model, done = shared
    known, expected = hf_logprobs(model), paper_gradient(model, ALGORITHM, num_steps=1)
    far = {name: farthest(done[name].notes[0]["probe"]["logprobs"], known) for name in TRAPS}
    assert far.pop("norm-of-one-rank") > 1e-3
    assert max(far.values()) < 3e-6
    assert max(worst(done["norm-gradient-of-one-rank"], expected).values()) > 1e-2
    summed = worst(done["norm-added-up"], expected)
    wrong = {name for name, share in summed.items() if share > 1e-5}
    assert wrong == {name for name in expected if name.endswith(("q_norm.weight", "k_norm.weight"))}
    assert max(worst(done["norm-unmarked"], expected).values()) < 1e-5
    metric = done["norm-unmarked"].notes[0]["metrics"][0]["actor/grad_norm"]
    assert metric != pytest.approx(norm_of(expected), rel=1e-4)


def test_mistakes_of_one_rank_round_trip_and_have_other_log_probs(tmp_path):
    models = {kind: model_of(tmp_path, kind) for kind in ("olmo2", "olmo3", "minimax_m2")}
    jobs = []
    for name, (kind, wrong) in MISTAKES.items():
        more = wrong
        if isinstance(wrong, str):
            own = tmp_path / f"{name}.py"
            own.write_text(WRONG.format(kind=kind, wrong=wrong, plant=""))
            more = {"family": str(own)}
        job = {"model": str(models[kind]), "algorithm": ALGORITHM, "actions": [["probe", "start"]]}
        jobs.append({"name": name, **job, **more})
    done = run_world(tmp_path / "world", 1, jobs)
    known = {kind: hf_logprobs(model) for kind, model in models.items()}
    for name, (kind, _) in MISTAKES.items():
        assert not_equal(done[name].weights("start"), load_file(models[kind] / "model.safetensors")) == []
        assert farthest(done[name].notes[0]["probe"]["logprobs"], known[kind]) > 1e-3, name
