"""Completions that are given, in every layout: losses and gradients against definitions with transformers."""

import statistics

import pytest

from tests.integration.trainer.conftest import make_model, run_world
from tests.integration.trainer.given import defined_loss
from tests.integration.trainer.test_critic import TWO, farthest_gradient
from tests.integration.trainer.test_families import EP, TINY
from tests.integration.trainer.test_layouts import TP, assert_bit_equal, largest_difference
from tests.integration.trainer.valued import SCORE, add_score

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]
KINDS = ("sft", "dpo", "reward_model")
PREFERENCE = {
    "sft": {}, "dpo": {"beta": 0.7, "label_smoothing": 0.1, "sft_coef": 0.3},
    "reward_model": {"center_coef": 0.02},
}  # fmt: skip
SAVED = "manifests/00000001.000001.json"
LEARN = [
    ["held_out", 2],
    ["train", 1],
    ["held_out", 2],
    ["publish", "after1"],
    ["save", 1],
    ["train", 2],
    ["state", "final"],
    ["publish", "final"],
]
GO_ON = [["train", 2], ["state", "final"], ["publish", "final"]]
FIRST = [["gradient", "first"]]


def job(folder, model, kind, name, layout, actions=FIRST, **more):
    """Of dpo the policy is another one than the reference: it begins as what sft has saved."""
    if kind == "dpo" and "restore" not in more:
        more |= {"restore": SAVED, "weights_only": True, "is_fork": True, "reads": "sft-one"}
    stores = [str(folder / f"store-{each}") for each in (more.pop("reads", ""), f"{kind}-{name}") if each]
    more.setdefault("algorithm", {"kl_in": "none"})
    common = {"kind": kind, "preference": PREFERENCE[kind], "layout": layout, "store": stores[0]}
    return {"name": f"{kind}-{name}", "model": str(model), "actions": actions, **common, **more}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A model folder with a value head, and what one, two and four ranks learnt from given completions."""
    folder = tmp_path_factory.mktemp("given")
    model = make_model(folder / "model", "qwen3", is_tied=False, num_hidden_layers=2)
    add_score(model)
    one = [job(folder, model, "sft", "one", {}, LEARN)]
    jobs = run_world(folder / "first", 1, one)
    alone = [job(folder, model, kind, "first", {}) for kind in KINDS]
    alone += [job(folder, model, "reward_model", "one", {}, LEARN)]
    alone += [
        job(folder, model, kind, "resumed", {}, GO_ON, reads=f"{kind}-one", restore=SAVED)
        for kind in ("sft", "reward_model")
    ]
    alone += [
        job(
            folder,
            model,
            "dpo",
            "away",
            {"offload_optimizer": True},
            [["nap", 0], ["train", 1], ["state", "final"]],
        ),
        job(folder, model, "dpo", "one", {}, [["train", 1], ["state", "final"]]),
        job(folder, model, "sft", "by-sample", {}, algorithm={"loss_agg_mode": "seq-mean-token-mean"}),
        job(folder, model, "dpo", "of-tokens", {}, trap="given-mean-over-tokens"),
        job(folder, model, "dpo", "of-itself", {}, trap="given-reference-is-the-policy"),
        job(folder, model, "reward_model", "other", {}, trap="given-score-of-another-text"),
    ]
    jobs |= run_world(folder / "alone", 1, alone)
    pair = [job(folder, model, kind, name, layout) for name, layout in TWO.items() for kind in KINDS]
    pair += [
        job(folder, model, "dpo", "of-a-part", TWO["cp2"], trap="given-sums-of-one-rank"),
        job(folder, model, "dpo", "apart", TWO["dp2"], trap="given-pairs-apart"),
    ]
    jobs |= run_world(folder / "pair", 2, pair)
    jobs |= run_world(folder / "four", 4, [job(folder, model, "sft", "four", {TP: 2}, LEARN)])
    return model, jobs


@pytest.fixture(scope="module")
def papers(given):
    model, jobs = given
    begun = jobs["sft-one"].weights("after1")
    begun.pop(SCORE, None)
    return {
        kind: defined_loss(model, kind, PREFERENCE[kind], policy=begun if kind == "dpo" else None)
        for kind in KINDS
    }


@pytest.mark.parametrize("name", ["first", *TWO])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_definitions_in_every_layout(given, papers, kind, name):
    """Ranks alone, and no whole run: four worlds for all tests of this module."""
    found = given[1][f"{kind}-{name}"]
    assert farthest_gradient(found.tensors("first"), papers[kind].gradient) < 1e-5
    assert sum(tensor.abs().max() > 1e-6 for tensor in papers[kind].gradient.values()) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_are_the_same_in_every_layout(given, kind):
    expected = given[1][f"{kind}-first"].notes[0]["metrics"][0]
    assert {"train/loss", "actor/lr", "actor/grad_norm", "response_length/mean"} < expected.keys()
    assert not [key for key in expected if key.startswith("critic/")]
    for name in TWO:
        for notes in given[1][f"{kind}-{name}"].notes:
            assert notes["metrics"][0] == pytest.approx(expected, abs=2e-5, rel=2e-5)


@pytest.mark.parametrize("kind", ["dpo", "reward_model"])
def test_metrics_of_pairs_are_their_definitions(given, kind):
    """With a learning rate of 0, so that both mini-batches are of one policy."""
    model, jobs = given
    begun = jobs["sft-one"].weights("after1") if kind == "dpo" else None
    paper = defined_loss(model, kind, PREFERENCE[kind], policy=begun, whole=True)
    folder = model.parent
    still = job(folder, model, kind, "still", {}, [["held_out", 1], ["train", 1]], optimizer={"lr": 0.0})
    notes = run_world(folder / f"still-{kind}", 1, [still])[f"{kind}-still"].notes[0]
    found = notes["metrics"][0]
    measured = {key for key in notes["held_out"] if key.startswith("train/")}
    assert len(measured) == 5
    assert {key: found[key] for key in measured} == pytest.approx(
        {key: notes["held_out"][key] for key in measured}, rel=1e-6
    )
    assert found["train/loss"] == pytest.approx(paper.loss, rel=1e-5)
    assert found["train/chosen_reward"] == pytest.approx(statistics.mean(paper.chosen), abs=1e-6)
    assert found["train/rejected_reward"] == pytest.approx(statistics.mean(paper.rejected), abs=1e-6)
    right = [a > b for a, b in zip(paper.chosen, paper.rejected, strict=True)]
    assert found["train/accuracy"] == pytest.approx(statistics.mean(right))
    assert 0 < statistics.mean(right) < 1


def test_sft_has_the_means_that_the_run_file_wants(given):
    paper = defined_loss(given[0], "sft", {}, mode="seq-mean-token-mean")
    found = given[1]["sft-by-sample"]
    assert farthest_gradient(found.tensors("first"), paper.gradient) < 1e-5


def test_one_and_four_ranks_learn_the_same(given):
    one, four = given[1]["sft-one"], given[1]["sft-four"]
    assert largest_difference(four.weights("final"), one.weights("final")) < 1e-6
    assert largest_difference(one.weights("final"), one.weights("after1")) > 1e-4, "something is learnt"


@pytest.mark.parametrize("kind", ["sft", "reward_model"])
def test_a_resumed_run_is_bit_equal(given, kind):
    one, resumed = given[1][f"{kind}-one"], given[1][f"{kind}-resumed"]
    assert_bit_equal(resumed.tensors("final"), one.tensors("final"))
    assert_bit_equal(resumed.weights("final"), one.weights("final"))
    assert resumed.notes[0]["metrics"][0] == one.notes[0]["metrics"][1]


@pytest.mark.parametrize("kind", ["sft", "reward_model"])
def test_measuring_changes_no_bit(given, kind):
    """Those that measured are the ones that are resumed by others, which did not."""
    one, resumed = given[1][f"{kind}-one"].notes[0], given[1][f"{kind}-resumed"].notes[0]
    assert "train/loss" in one["held_out"] and "held_out" not in resumed
    assert one["metrics"][1] == resumed["metrics"][0]


def test_an_optimizer_in_host_memory_changes_no_bit(given):
    assert_bit_equal(given[1]["dpo-away"].tensors("final"), given[1]["dpo-one"].tensors("final"))


@pytest.mark.parametrize(
    "name", ["dpo-of-tokens", "dpo-of-itself", "reward_model-other", "dpo-of-a-part", "dpo-apart"]
)
def test_planted_mistakes_are_found(given, papers, name):
    """No whole run: the first test of this module pays for all worlds."""
    kind = name.partition("-")[0]
    found, expected = given[1][name], given[1][f"{kind}-first"].notes[0]["metrics"][0]["train/loss"]
    if "raised" in found.notes[0]:  # a micro-batch with a half of a pair
        return
    is_other_loss = found.notes[0]["metrics"][0]["train/loss"] != pytest.approx(expected, rel=1e-3)
    assert farthest_gradient(found.tensors("first"), papers[kind].gradient) > 1e-3 or is_other_loss


def test_pairs_train_experts_over_ranks(tmp_path):
    model = make_model(tmp_path / "model", "qwen3_moe", num_hidden_layers=2, **TINY["qwen3_moe"])
    add_score(model)
    listed = [job(tmp_path, model, "reward_model", "ep2", {EP: 2})]
    found = run_world(tmp_path / "pair", 2, listed)["reward_model-ep2"]
    paper = defined_loss(model, "reward_model", PREFERENCE["reward_model"])
    assert farthest_gradient(found.tensors("first"), paper.gradient) < 1e-5
