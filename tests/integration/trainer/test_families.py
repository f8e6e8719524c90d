"""Every model family computes, learns and resumes as transformers does, in every layout.

The matrix is made from the families: each has a tiny config here, with an odd number of layers, so that the
stages of a pipeline differ. The family of docs/extending.md is one of them.
"""

import pytest
from safetensors.torch import load_file

from tests.integration.test_extending import family_file
from tests.integration.trainer.conftest import make_model, run_world
from tests.integration.trainer.paper_losses import paper_gradient
from tests.integration.trainer.test_layouts import (
    CP,
    PP,
    TP,
    assert_bit_equal,
    hf_logprobs,
    largest_difference,
)
from yatt.models.families import FAMILIES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]
OWN = "phi3"
"""The family of docs/extending.md."""

TINY = {
    "llama": {"is_tied": False, "vocab_size": 63},
    "qwen2": {"is_tied": True, "vocab_size": 63},
    "qwen3": {"is_tied": False, "vocab_size": 62},
    "qwen3_moe": {
        "is_tied": False,
        "vocab_size": 62,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "qwen2_moe": {
        "is_tied": False,
        "vocab_size": 63,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": False,
    },
    OWN: {"is_tied": False, "vocab_size": 63, "pad_token_id": None, "eos_token_id": 2},
}
"""Settings of a tiny model of each family; vocabularies of 63 are padded under tensor parallelism."""

ODD = 3
LAYOUTS = {"tp2": {TP: 2, "sequence_parallel": True}, "pp2": {PP: 2}, "cp2": {CP: 2}}
MOVES = (("tp2", "one"), ("pp2", "tp2"), ("pp2", "pp2"), ("cp2", "pp2"))
"""The layout that resumes, and the layout that saved: one before it in `LAYOUTS`, or itself."""

ALGORITHM = {"loss_agg_mode": "token-mean", "correction": {"rule": "truncate"}}
LEARN = [["publish", "start"], ["gradient", "first"], ["save", 1], ["publish", "after1"], ["train", 2]]
GO_ON = [["publish", "after1"], ["train", 2], ["publish", "final"]]
WRONG = """
from dataclasses import replace
from yatt.models.families import FAMILIES
from yatt.models.rows import LayerNames, decoder, layer_rows

right = FAMILIES["{kind}"]

def named(shape, **names):
    return decoder(shape, layer_rows(shape, LayerNames(**names)))

def exchanged(shape):
    other = {{".experts.0.": ".experts.1.", ".experts.1.": ".experts.0."}}
    def new(name):
        return next((name.replace(a, b) for a, b in other.items() if a in name), name)
    return [replace(row, parts=tuple(replace(part, name=new(part.name)) for part in row.parts))
            for row in named(shape)]

def with_experts(shape, **changes):
    def changed(layer):
        has_some = layer.feed_forward == shape.experts
        return replace(layer, feed_forward=replace(shape.experts, **changes)) if has_some else layer
    return replace(shape, layers=tuple(changed(layer) for layer in shape.layers))

family = {wrong}
"""
MISTAKES = {
    "key-for-value": (
        "llama",
        "replace(right, rows=lambda shape: named(shape, qkv=("
        "'self_attn.q_proj', 'self_attn.v_proj', 'self_attn.k_proj')))",
    ),
    "up-for-gate": (
        "llama", "replace(right, rows=lambda shape: named(shape, gate_up=('mlp.up_proj', 'mlp.gate_proj')))",
    ),
    "norm-for-norm": (
        "llama",
        "replace(right, rows=lambda shape: named(shape, input_norm='post_attention_layernorm', "
        "ffn_norm='input_layernorm'))",
    ),
    "expert-for-expert": ("qwen3_moe", "replace(right, rows=exchanged)"),
    "weights-of-all-experts": (
        "qwen3_moe", "replace(right, read=lambda values: with_experts(right.read(values), normalizes=False))",
    ),
    "one-expert-fewer": (
        "qwen2_moe", "replace(right, read=lambda values: with_experts(right.read(values), top_k=1))",
    ),
}  # fmt: skip
"""Families that pass every check and every round trip, and are wrong."""


def test_every_family_has_a_tiny_config():
    assert set(TINY) == {*FAMILIES, OWN}


class Worlds:
    """The models, and what one rank and two ranks did with them."""

    def __init__(self, folder):
        self.folder, self.family = folder, family_file(folder)
        tiny = {"num_hidden_layers": ODD}
        self.models = {
            kind: make_model(folder / f"model-{kind}", kind, **tiny, **TINY[kind]) for kind in TINY
        }
        self.alone = run_world(folder / "alone", 1, [*self._learning("one", {}), *self._mistakes()])
        jobs = [job for name, layout in LAYOUTS.items() for job in self._learning(name, layout)]
        jobs += [self._resuming(kind, to, LAYOUTS[to], saved) for kind in TINY for to, saved in MOVES]
        self.pair = run_world(folder / "pair", 2, jobs)
        self.jobs = self.alone | self.pair

    def _job(self, kind, layout, saved):
        common = {"model": str(self.models[kind]), "layout": layout, "algorithm": ALGORITHM}
        family = {"family": str(self.family)} if kind == OWN else {}
        return {**common, **family, "store": str(self.folder / f"store-{kind}-{saved}")}

    def _learning(self, name, layout):
        actions = [*LEARN, ["publish", "final"]]
        return [
            {"name": f"{kind}-{name}", "actions": actions, **self._job(kind, layout, name)} for kind in TINY
        ]

    def _resuming(self, kind, name, layout, saved):
        restore = {"actions": GO_ON, "restore": "manifests/00000001.000001.json"}
        return {"name": f"{kind}-{name}-from-{saved}", **restore, **self._job(kind, layout, saved)}

    def _mistakes(self):
        for name, (kind, wrong) in MISTAKES.items():
            file = self.folder / f"{name}.py"
            file.write_text(WRONG.format(kind=kind, wrong=wrong))
            job = self._job(kind, {}, name)
            yield {"name": name, "actions": [["publish", "start"]], **job, "family": str(file)}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    return Worlds(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def gradients(worlds):
    return {kind: paper_gradient(worlds.models[kind], ALGORITHM) for kind in TINY}


def every(layouts):
    return pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in TINY for name in layouts])


@every(["one", *LAYOUTS])
def test_log_probs_are_those_of_transformers(worlds, kind, name):
    job = worlds.jobs[f"{kind}-{name}"]
    assert hf_logprobs(worlds.models[kind], job.notes[0]["probe_of"]["start"]) < 1e-5
    assert all(note["probe_of"] == job.notes[0]["probe_of"] for note in job.notes)


@every(["one", *LAYOUTS])
def test_gradients_are_those_of_transformers_tensor_by_tensor(worlds, gradients, kind, name):
    got, expected = worlds.jobs[f"{kind}-{name}"].tensors("first"), gradients[kind]
    assert got.keys() == expected.keys()
    for tensor_name, tensor in expected.items():
        assert tensor.abs().max() > 0 or ".experts." in tensor_name, tensor_name  # nobody may choose one
        difference = (got[tensor_name] - tensor).abs().max().item()
        assert difference < 1e-5 * max(tensor.abs().max().item(), 1e-1), tensor_name


@every(["one", *LAYOUTS])
def test_published_weights_are_the_folders_bit_for_bit(worlds, kind, name):
    source = load_file(worlds.models[kind] / "model.safetensors")
    assert_bit_equal(worlds.jobs[f"{kind}-{name}"].weights("start"), source)


@every(LAYOUTS)
def test_two_ranks_learn_what_one_learns(worlds, kind, name):
    one, two = worlds.jobs[f"{kind}-one"], worlds.jobs[f"{kind}-{name}"]
    assert largest_difference(one.weights("start"), one.weights("final")) > 1e-3
    assert largest_difference(two.weights("final"), one.weights("final")) < 1e-5


@pytest.mark.parametrize("kind", TINY)
@pytest.mark.parametrize(("name", "saved"), MOVES)
def test_a_layout_goes_on_from_what_another_saved(worlds, kind, name, saved):
    undisturbed, resumed = worlds.jobs[f"{kind}-{saved}"], worlds.jobs[f"{kind}-{name}-from-{saved}"]
    assert_bit_equal(resumed.weights("after1"), undisturbed.weights("after1"))
    if name == saved:
        assert_bit_equal(resumed.weights("final"), undisturbed.weights("final"))
    assert largest_difference(resumed.weights("final"), undisturbed.weights("final")) < 1e-6


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_family_that_round_trips_has_other_log_probs(worlds, name):
    job, model = worlds.alone[name], worlds.models[MISTAKES[name][0]]
    assert_bit_equal(job.weights("start"), load_file(model / "model.safetensors"))
    assert hf_logprobs(model, job.notes[0]["probe_of"]["start"]) > 1e-3


def test_the_stages_of_the_pipeline_differ(worlds):
    layers = [note["num_layers"] for note in worlds.pair["llama-pp2"].notes]
    assert layers == [2, 1]
