"""Distillation as a loss in every layout: gradients and metrics against the formula in float64."""

import itertools
import statistics

import pytest
import torch

from tests.integration.trainer.conftest import make_model, run_world
from tests.integration.trainer.paper_losses import paper_gradient
from tests.integration.trainer.program import samples
from tests.integration.trainer.taught import TEACHERS, N, paper_distilled, with_teachers
from tests.integration.trainer.test_critic import TWO, farthest_gradient
from tests.integration.trainer.test_layouts import assert_bit_equal, largest_difference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]
MASKED, RATIOS = (3, 10), (0.4, 1.2)
PLAIN = {"correction": {"rule": "none"}, "loss_agg_mode": "token-mean"}
FIRST, LEARN = [["only_gradient", "first"]], [["gradient", "first"], ["train", 2], ["publish", "final"]]
OWN = """
import torch
from yatt.algo.algorithm import Needs
from yatt.algo.loss import TokenLosses

class Nothing:
    needs = Needs()
    def advantages(self, table):
        return torch.zeros(int(table.lengths_N.sum()))
    def loss(self, view):
        zeros = torch.zeros_like(view.logprobs_T)
        return TokenLosses(view.logprobs_T * 0, zeros > 0, zeros > 0, zeros)

def make_algorithm(section):
    return Nothing()
"""


def job(model, name, layout, actions=FIRST, **more):
    common = {"algorithm": PLAIN, "turns": 2, "masked": MASKED, "layout": layout, "teachers": "alone"}
    return {"name": name, "model": str(model), "actions": actions, **common, **more}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A model folder, and what one and two ranks did with it."""
    folder = tmp_path_factory.mktemp("distilled")
    model = make_model(folder / "model", "qwen3", is_tied=False, num_hidden_layers=2)
    (own := folder / "own.py").write_text(OWN)
    rejection = {"level": "token", "low": RATIOS[0], "high": RATIOS[1]}
    traps = ("without-the-rest", "at-temperature-one", "coefficient-twice")
    alone = [
        job(model, "one", {}, LEARN),
        job(model, "beside", {}, teachers="beside"),
        job(model, "samples", {}, algorithm={**PLAIN, "loss_agg_mode": "seq-mean-token-mean"}),
        job(model, "rejected", {}, algorithm={**PLAIN, "rejection": rejection}),
        job(model, "own", {}, LEARN, algorithm={**PLAIN, "path": str(own)}),
        job(model, "still", {}, [["train", 1]], optimizer={"lr": 0.0}),
        *(job(model, trap, {}, trap=f"distill-{trap}") for trap in traps),
    ]
    pair = [job(model, name, layout, LEARN) for name, layout in TWO.items()]
    pair += [
        job(model, f"tp2-{trap}", TWO["tp2"], trap=f"distill-{trap}")
        for trap in ("ids-of-another-rank", "rest-of-one-rank")
    ]
    return model, run_world(folder / "alone", 1, alone) | run_world(folder / "pair", 2, pair)


@pytest.fixture(scope="module")
def paper(dense):
    return paper_of(dense)


def paper_of(dense, mode="token-mean", **more):
    taught = with_teachers(*samples(1, has_observations=True), has_rewards=False)
    return paper_distilled(dense[0], *taught, mode=mode, masked=MASKED, **more)


@pytest.mark.parametrize("name", ["one", *TWO])
def test_gradients_are_the_formulas_in_every_layout(dense, paper, name):
    """Two teachers with their own numbers of tokens, and samples without one; of one sample a likeliest token
    is none of the policy's, of another nothing is left for the others; turns, masked samples, an empty
    micro-batch. Ranks alone, and no whole run: two worlds for all tests of this module."""
    gradient = dense[1][name].tensors("first")
    assert farthest_gradient(gradient, paper.gradient) < 1e-5
    assert all(tensor.abs().max() > 1e-6 for tensor in paper.gradient.values())


@pytest.mark.parametrize("name", TWO)
def test_every_layout_learns_as_one_rank_does(dense, name):
    """Two iterations of the same ranks; no whole run."""
    one, two = dense[1]["one"], dense[1][name]
    assert largest_difference(two.weights("final"), one.weights("final")) < 1e-5
    for iteration in (0, 1):
        expected = one.notes[0]["metrics"][iteration]
        assert {"distill/kl", "distill/mass_top_k"} < expected.keys()
        for notes in two.notes:
            assert notes["metrics"][iteration] == pytest.approx(expected, abs=2e-5, rel=2e-5)


def test_it_adds_to_the_loss_of_rewards(dense, paper):
    both = dense[1]["beside"].tensors("first")
    alone = paper_gradient(dense[0], PLAIN, has_observations=True, masked=MASKED)
    wanted = {name: alone[name] + tensor for name, tensor in paper.gradient.items()}
    assert farthest_gradient(both, wanted) < 1e-5
    assert farthest_gradient(both, alone) > 1e-2 < farthest_gradient(both, paper.gradient)


def test_it_is_averaged_as_the_policys_loss(dense):
    found = dense[1]["samples"].tensors("first")
    assert farthest_gradient(found, paper_of(dense, "seq-mean-token-mean").gradient) < 1e-5


def test_rejected_tokens_are_not_taught(dense, paper):
    found = dense[1]["rejected"].tensors("first")
    assert farthest_gradient(found, paper_of(dense, ratios=RATIOS).gradient) < 1e-5
    assert farthest_gradient(found, paper.gradient) > 1e-2


def test_an_algorithm_of_the_users_own_gets_it_too(dense):
    assert_bit_equal(dense[1]["own"].tensors("first"), dense[1]["one"].tensors("first"))
    assert_bit_equal(dense[1]["own"].weights("final"), dense[1]["one"].weights("final"))


def test_metrics_are_means_over_the_taught_tokens(dense, paper):
    found = dense[1]["still"].notes[0]["metrics"][0]
    taught = [n for n in range(len(paper.kl)) if TEACHERS[n // N] is not None and n not in MASKED]
    kl, mass = ([*itertools.chain(*(each[n] for n in taught))] for each in (paper.kl, paper.mass))
    assert found["distill/kl"] == pytest.approx(statistics.mean(kl), rel=1e-5)
    assert found["distill/mass_top_k"] == pytest.approx(statistics.mean(mass), rel=1e-5)
    assert max(paper.mass[2]) > 1 - 1e-6 and found["actor/pg_loss"] == 0.0


def test_planted_mistakes_are_found(dense, paper):
    """In the gradients of the same ranks; no whole run."""
    for name, found in dense[1].items():
        if name in TWO or name in ("one", "beside", "samples", "rejected", "own", "still"):
            continue
        assert farthest_gradient(found.tensors("first"), paper.gradient) > 1e-2, name
    assert torch.count_nonzero(paper.gradient["lm_head.weight"]) == paper.gradient["lm_head.weight"].numel()
