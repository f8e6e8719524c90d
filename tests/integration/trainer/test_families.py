"""Every model family computes, learns and resumes as transformers does, in every layout.

The matrix is made from the families, and each has a tiny config here. The family of docs/extending.md is one
of them. A family is one test, because its worlds of ranks take most of the time.
"""

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.test_extending import family_file
from tests.integration.trainer.conftest import make_model, run_world
from tests.integration.trainer.paper_losses import paper_gradient
from tests.integration.trainer.test_layouts import (
    CP,
    PP,
    TP,
    VPP,
    farthest,
    hf_logprobs,
    largest_difference,
)
from yatt.models.families import FAMILIES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]
EP, EXPERT_TP, VPP2 = "expert_model_parallel_size", "expert_tensor_parallel_size", "vpp2"
OWN = "phi3"
"""The family of docs/extending.md."""

SIGMOID = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
KIMI_YARN = {
    **YARN, "rope_theta": 100.0, "factor": 32.0, "original_max_position_embeddings": 128, "beta_fast": 1.0,
    "beta_slow": 1.0,
}  # fmt: skip
"""With these sizes two of four frequencies are others with the `beta_fast` that DeepSeek has."""

LAYER_YARN = {
    "full_attention": {
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 16,
        "beta_fast": 4.0, "beta_slow": 1.0, "attention_factor": 1.3,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}  # fmt: skip

TINY = {
    "llama": {"is_tied": False, "vocab_size": 63},
    "mistral": {"is_tied": False, "vocab_size": 63, "sliding_window": 4, "head_dim": 16},
    "qwen2": {
        "is_tied": True,
        "vocab_size": 63,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
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
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": False,
        "use_sliding_window": True,
        "sliding_window": 5,
    },
    "mixtral": {
        "is_tied": False,
        "vocab_size": 62,
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
    },
    "glm4_moe": {"is_tied": False, "vocab_size": 63, "use_qk_norm": True, "attention_bias": True, **SIGMOID},
    "deepseek_v3": {
        "is_tied": False,
        "vocab_size": 62,
        "q_lora_rank": 24,
        **LATENT,
        **SIGMOID,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
    },
    "kimi_k2": {
        "is_tied": True,
        "vocab_size": 63,
        "q_lora_rank": None,
        **LATENT,
        **SIGMOID,
        "rope_parameters": KIMI_YARN,
    },
    "olmo2": {"is_tied": False, "vocab_size": 63, "pad_token_id": None, "eos_token_id": 2},
    "olmo3": {
        "is_tied": True,
        "vocab_size": 62,
        "pad_token_id": None,  # transformers does not train the embedding of one
        "eos_token_id": 2,
        "head_dim": 16,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": LAYER_YARN,
    },
    "minimax_m2": {
        "is_tied": False,
        "vocab_size": 63,
        "head_dim": 16,
        "rotary_dim": 6,
        "intermediate_size": 24,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    OWN: {"is_tied": False, "vocab_size": 63, "pad_token_id": None, "eos_token_id": 2},
}
"""Settings of a tiny model of each family; vocabularies of 63 are padded under TP. Windows are shorter than
sequences: in all layers (Mistral, Mixtral), the last ones (Qwen2) or every other one (Qwen2-MoE, OLMo-3).
Biases of routers change who is chosen, and weights of norms over all heads are spread."""

ODD, EVEN = 3, 4
"""Layers: stages of a pipeline differ; interleaved stages have one layer each."""

SP = {"sequence_parallel": True}
PAIR = {"tp2": {TP: 2, **SP}, "pp2": {PP: 2}, "cp2": {CP: 2}}
SPREAD = {"ep2": {EP: 2}, "tp2ep2": {TP: 2, EP: 2, EXPERT_TP: 1, **SP}}
FOUR = {"etp2": {TP: 2, EP: 2, EXPERT_TP: 2, **SP}, "pp2ep2": {PP: 2, EP: 2}}
MOVES = {"tp2": ("one",), "pp2": ("tp2", "pp2"), "cp2": ("pp2",)}
SPREAD_MOVES = {"ep2": ("one", "ep2"), "tp2ep2": ("ep2",), "tp2": ("ep2",)}
FOUR_MOVES = {"etp2": ("tp2ep2",), "pp2ep2": ("etp2", "pp2ep2")}
"""Layouts that resume, and the layouts that saved: themselves, or earlier ones (`SPREAD` comes first)."""

WITH_EXPERTS = ("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "deepseek_v3", "kimi_k2", "minimax_m2")
MOST_MOVES = 4
"""Of a family with experts; families take turns, so that each move is made by two of them."""


ALGORITHM = {"loss_agg_mode": "token-mean", "correction": {"rule": "truncate"}}
ONE_STEP = {"mini_batch_size": 4}
"""All prompt groups of an iteration in one optimizer step, so that two steps have fewer passes."""

LEARN = [["probe", "start"], ["gradient", "first"], ["save", 1], ["publish", "after1"], ["train", 2]]
GO_ON = [["publish", "after1"], ["train", 2], ["publish", "final"]]
WRONG = """
from dataclasses import replace
from yatt.models.families import FAMILIES
from yatt.models.rows import LayerNames, decoder_table, layer_rows

right = FAMILIES["{kind}"]

def named(shape, **names):
    return decoder_table(shape, layer_rows(shape, LayerNames(**names)))

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

{plant}
family = {wrong}
"""
NO_BIAS = """
from functools import partial
from megatron.core.transformer.moe import router
choose = router.topk_routing_with_score_function
without = {"expert_bias": None}
router.topk_routing_with_score_function = lambda *given, **named: choose(*given, **{**named, **without})
"""
NO_GATE = """
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
begin = SharedExpertMLP.__init__

def without_gate(self, *given, **named):
    begin(self, *given, **named)
    self.use_shared_expert_gate = False

SharedExpertMLP.__init__ = without_gate
"""
OTHER_LAYERS = """
from yatt.trainer.mcore import spec
find = spec.is_layer_window_attention
spec.is_layer_window_attention = lambda size, listed, number: find(size, listed, number % 2 + 1)
"""
COLUMN_PARALLEL = """
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from yatt.trainer.mcore import spec
spec.DuplicatedLinear = ColumnParallelLinear
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
    "gate-of-the-shared-expert": ("qwen2_moe", "right", NO_GATE),
    "bias-of-the-router": ("deepseek_v3", "right", NO_BIAS),
    "no-groups": (
        "deepseek_v3",
        "replace(right, read=lambda values: with_experts(right.read(values), sigmoid=replace("
        "right.read(values).experts.sigmoid, num_groups=1)))",
    ),
    "no-temperature": (
        "kimi_k2",
        "replace(right, read=lambda values: replace(right.read(values), yarn=replace("
        "right.read(values).yarn, mscale_all_dim=0.5, mscale=0.5)))",
    ),
    "beta-fast-of-deepseek": (
        "kimi_k2",
        "replace(right, read=lambda values: replace(right.read(values), yarn=replace("
        "right.read(values).yarn, beta_fast=32)))",
    ),
    "window-one-short": (
        "mistral", "replace(right, read=lambda values: right.read({**values, 'sliding_window': 3}))",
    ),
    "window-in-every-layer": (
        "qwen2",
        "replace(right, read=lambda values: right.read("
        "{**values, 'layer_types': ['sliding_attention'] * 3}))",
    ),
    "window-in-other-layers": ("qwen2_moe", "right", OTHER_LAYERS),
    "all-rotated": (
        "glm4_moe", "replace(right, read=lambda values: replace(right.read(values), rotary_share=1.0))",
    ),
}  # fmt: skip
"""Families that pass every check and every round trip, and are wrong."""


def test_every_family_has_a_tiny_config():
    text = {kind for kind, family in FAMILIES.items() if family.tower is None}
    assert {*TINY} == {*text, OWN}
    assert [kind for kind in TINY if any("experts" in key for key in TINY[kind])] == [*WITH_EXPERTS]


def moves_of(kind):
    """Pairs of layouts, one that resumes and one that saved, which a family is resumed in."""
    without = [(name, saved) for name, several in MOVES.items() for saved in several]
    if kind not in WITH_EXPERTS:
        return without
    both = (SPREAD_MOVES, FOUR_MOVES)
    moves = without + [(name, saved) for each in both for name, several in each.items() for saved in several]
    first = WITH_EXPERTS.index(kind) * MOST_MOVES
    return [moves[(first + k) % len(moves)] for k in range(MOST_MOVES)]


def test_every_move_is_made_by_two_families_with_experts():
    made = [move for kind in WITH_EXPERTS for move in moves_of(kind)]
    assert min(made.count(move) for move in made) >= 2
    assert len(set(made)) == sum(
        len(several) for each in (MOVES, SPREAD_MOVES, FOUR_MOVES) for several in each.values()
    )


class Family:
    """A tiny model of a family, and what one, two and four ranks did with it."""

    def __init__(self, folder, kind):
        self.folder, self.kind = folder, kind
        self.models = {
            num: make_model(folder / f"model-{num}", kind, num_hidden_layers=num, **TINY[kind])
            for num in (ODD, EVEN)
        }
        self.has_experts = kind in WITH_EXPERTS
        self.layouts = {"one": {}, **PAIR, **(SPREAD | FOUR if self.has_experts else {})}
        self.jobs = run_world(folder / "alone", 1, [self._learning("one")])
        self.jobs |= run_world(folder / "pair", 2, [*self._pair()])
        if self.has_experts:
            self.jobs |= run_world(folder / "four", 4, [*self._jobs(FOUR, FOUR_MOVES)])

    def _pair(self):
        if self.has_experts:
            yield from self._jobs(SPREAD, SPREAD_MOVES)
        yield from self._jobs(PAIR, MOVES)
        actions = [["probe", "start"], ["only_gradient", "first"]]
        yield {"name": VPP2, "actions": actions, **self._common({PP: 2, VPP: 2}, EVEN)}

    def _jobs(self, layouts, moves):
        for name in layouts:
            yield self._learning(name)
        for name, saved in ((name, each) for name, several in moves.items() for each in several):
            if (name, saved) not in moves_of(self.kind):
                continue
            restore = {"actions": GO_ON, "restore": "manifests/00000001.000001.json"}
            job = {**self._common(self.layouts[name]), "store": self._store(saved)}
            yield {"name": f"{name}-from-{saved}", **restore, **job}

    def _learning(self, name):
        actions = [*LEARN, ["publish", "final"]]
        job = {**self._common(self.layouts[name]), "store": self._store(name)}
        return {"name": name, "actions": actions, **job}

    def _common(self, layout, num_layers=ODD):
        family = {"family": str(family_file(self.folder))} if self.kind == OWN else {}
        common = {"model": str(self.models[num_layers]), "algorithm": ALGORITHM, **family}
        return {**common, "layout": layout | ONE_STEP}

    def _store(self, name):
        return str(self.folder / f"store-{name}")

    @property
    def resumed(self):
        """Pairs of layouts: one that resumed, one that saved."""
        return [tuple(name.split("-from-")) for name in self.jobs if "-from-" in name]

    def model_of(self, name):
        return self.models[EVEN if name == VPP2 else ODD]


def wrong_log_probs(family):
    """Of the probe: 1e-5 is the farthest from transformers' that is right."""
    for num_layers, names in ((ODD, family.layouts), (EVEN, [VPP2])):
        expected = hf_logprobs(family.models[num_layers])
        for name in names:
            job = family.jobs[name]
            probe = job.notes[0]["probe"]
            if (far := farthest(probe["logprobs"], expected)) >= 1e-5:
                yield f"{name}: log-probs differ by {far:.1e}"
            if not 0 < probe["rounding"] < 1e-5:
                yield f"{name}: a rounding changes log-probs by {probe['rounding']:.1e}"
            if any(note["probe"] != probe for note in job.notes):
                yield f"{name}: ranks have other log-probs"


def wrong_gradients(family):
    """Of the first update, relative to the largest element of each tensor, before Adam sees it."""
    for num_layers, names in ((ODD, family.layouts), (EVEN, [VPP2])):
        expected = paper_gradient(family.models[num_layers], ALGORITHM, num_steps=1)
        for name in names:
            got = family.jobs[name].tensors("first")
            got = {key: tensor for key, tensor in got.items() if not key.endswith("correction_bias")}
            if got.keys() != expected.keys():
                yield f"{name}: other tensors {sorted(got.keys() ^ expected.keys())}"
            for tensor_name, tensor in expected.items():
                largest = tensor.abs().max().item()
                if not largest and ".experts." not in tensor_name:  # nobody may choose one
                    yield f"{tensor_name} learns nothing"
                if (far := (got[tensor_name] - tensor).abs().max().item()) >= 1e-5 * max(largest, 1e-1):
                    yield f"{name}: gradient of {tensor_name} differs by {far:.1e} of {largest:.1e}"


def wrong_publications(family):
    """Bit by bit the folder's, from every layout."""
    for name in (*family.layouts, VPP2):
        source = load_file(family.model_of(name) / "model.safetensors")
        if differing := not_equal(family.jobs[name].weights("start"), source):
            yield f"{name}: published other {differing}"


def wrong_lessons(family):
    """After two iterations every layout has the weights that one rank has."""
    one = family.jobs["one"]
    if largest_difference(one.weights("start"), one.weights("final")) <= 1e-3:
        yield "one rank learns nothing"
    for name in family.layouts:
        if (far := largest_difference(family.jobs[name].weights("final"), one.weights("final"))) >= 1e-5:
            yield f"{name}: learned something else, {far:.1e}"


def wrong_resumes(family):
    """What was saved comes back bit by bit in any layout, and learns the same from there."""
    for name, saved in family.resumed:
        undisturbed, resumed = family.jobs[saved], family.jobs[f"{name}-from-{saved}"]
        if differing := not_equal(resumed.weights("after1"), undisturbed.weights("after1")):
            yield f"{name} from {saved}: has other {differing}"
        if name == saved and (differing := not_equal(resumed.weights("final"), undisturbed.weights("final"))):
            yield f"{name} resumed: learned other {differing}"
        if (far := largest_difference(resumed.weights("final"), undisturbed.weights("final"))) >= 1e-6:
            yield f"{name} from {saved}: learned something else, {far:.1e}"


def not_equal(got, expected):
    """Names of tensors that differ by a bit, in dtype, or are on one side only."""
    both = got.keys() & expected.keys()
    same = {n for n in both if got[n].dtype == expected[n].dtype and torch.equal(got[n], expected[n])}
    return sorted((got.keys() | expected.keys()) - same)


CHECKS = (wrong_log_probs, wrong_gradients, wrong_publications, wrong_lessons, wrong_resumes)


@pytest.mark.parametrize("kind", TINY)
def test_a_family_is_transformers_in_every_layout(tmp_path, kind):
    family = Family(tmp_path, kind)
    assert [fault for check in CHECKS for fault in check(family)] == []
    assert [note["num_layers"] for note in family.jobs["pp2"].notes] == [2, 1]


def wrong_job(folder, kind, wrong, plant=""):
    """A model, and a job with a wrong family, which may also plant a mistake in what the ranks run."""
    model = make_model(folder / "model", kind, num_hidden_layers=ODD, **TINY[kind])
    (folder / "own.py").write_text(WRONG.format(kind=kind, wrong=wrong, plant=plant))
    common = {"family": str(folder / "own.py"), "algorithm": ALGORITHM}
    return model, {"name": "wrong", "model": str(model), **common}


def test_latent_attention_without_a_whole_way_down_learns_something_else(tmp_path):
    """Fails as soon as megatron-core is cured (issue 1699): `DuplicatedLinear` can go then."""
    model, job = wrong_job(tmp_path, "deepseek_v3", "right", COLUMN_PARALLEL)
    actions = [["probe", "start"], ["only_gradient", "first"]]
    done = run_world(tmp_path / "world", 2, [{**job, "layout": PAIR["tp2"], "actions": actions}])["wrong"]
    assert farthest(done.notes[0]["probe"]["logprobs"], hf_logprobs(model)) < 1e-5
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    right, got = paper_gradient(model, ALGORITHM)[name], done.tensors("first")[name]
    assert (got - right).abs().max() > 1e-3 * right.abs().max()


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_family_that_round_trips_has_other_log_probs(tmp_path, name):
    model, job = wrong_job(tmp_path, *MISTAKES[name])
    done = run_world(tmp_path / "world", 1, [{**job, "actions": [["probe", "start"]]}])["wrong"]
    assert not_equal(done.weights("start"), load_file(model / "model.safetensors")) == []
    assert farthest(done.notes[0]["probe"]["logprobs"], hf_logprobs(model)) > 1e-3
