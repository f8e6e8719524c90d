"""Losses over sequences and an algorithm from a user's file: every layout learns the same."""

import pytest

from tests.integration.trainer.conftest import run_world
from tests.integration.trainer.test_layouts import CP, PP, TP, largest_difference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]
LEARN = [["gradient", "first"], ["train", 2], ["publish", "final"]]
OWN = """
from yatt.algo.algorithm import Needs
from yatt.algo.loss import TokenLosses


class Reinforce:
    needs = Needs()

    def advantages(self, table):
        mean = table.rewards_N.mean()
        return (table.rewards_N - mean).repeat_interleave(table.lengths_N).float()

    def loss(self, view):
        means_S = view.sample_means(view.logprobs_T)
        losses_T = -view.advantages_T * view.of_tokens(means_S)
        none_T = losses_T.detach() != losses_T.detach()
        return TokenLosses(losses_T, none_T, none_T, (view.old_T - view.logprobs_T).detach())


def make_algorithm(section):
    return Reinforce()
"""
LAYOUTS = {"tp2": {TP: 2, "sequence_parallel": True}, "pp2": {PP: 2}, "cp2": {CP: 2}, "dp2": {}}
PAIRS = {
    "tp2": ("gspo", "own"),
    "pp2": ("gmpo", "cispo"),
    "cp2": ("gspo", "gmpo", "cispo", "own"),
    "dp2": ("gmpo", "own"),
}
"""Losses of each layout: they act on tokens after it, except that context parallelism cuts sequences."""


@pytest.fixture(scope="session")
def algorithms(tmp_path_factory):
    own = tmp_path_factory.mktemp("own") / "reinforce.py"
    own.write_text(OWN)
    narrow = {"clip_ratio_low": 0.002, "clip_ratio_high": 0.003, "loss_agg_mode": "seq-mean-token-mean"}
    return {
        "ppo": {**narrow, "policy_loss": "ppo"},
        "gspo": {**narrow, "policy_loss": "gspo"},
        "gmpo": {**narrow, "policy_loss": "gmpo"},
        "cispo": {**narrow, "policy_loss": "cispo", "loss_agg_mode": "token-mean"},
        "own": {"path": str(own)},
    }


@pytest.fixture(scope="session")
def alone(shallow, algorithms, tmp_path_factory):
    qwen3 = str(shallow["qwen3"])
    jobs = [
        {"name": name, "model": qwen3, "algorithm": algorithm, "actions": LEARN}
        for name, algorithm in algorithms.items()
    ]
    return run_world(tmp_path_factory.mktemp("alone"), 1, jobs)


@pytest.fixture(scope="session")
def pair(shallow, algorithms, tmp_path_factory):
    qwen3 = str(shallow["qwen3"])
    jobs = [
        {"name": f"{name}-{layout}", "model": qwen3, "algorithm": algorithms[name], "actions": LEARN,
         "layout": sizes}
        for layout, sizes in LAYOUTS.items()
        for name in PAIRS[layout]
    ]  # fmt: skip
    return run_world(tmp_path_factory.mktemp("pair"), 2, jobs)


NAMES = ("gspo", "gmpo", "cispo", "own")


@pytest.mark.parametrize(("layout", "name"), [(layout, name) for layout in PAIRS for name in PAIRS[layout]])
def test_two_ranks_have_the_gradient_of_one_and_learn_the_same(alone, pair, name, layout):
    one, two = alone[name], pair[f"{name}-{layout}"]
    expected = one.tensors("first")
    assert largest_difference(two.tensors("first"), expected) < 1e-5
    assert any(tensor.abs().max() > 1e-4 for tensor in expected.values()), "there is a gradient"
    assert largest_difference(two.weights("final"), one.weights("final")) < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_each_loss_learns_something_else_than_ppo(alone, name):
    assert largest_difference(alone[name].weights("final"), alone["ppo"].weights("final")) > 1e-5


def test_tokens_were_clipped(alone):
    for name in ("ppo", "gspo", "gmpo", "cispo"):
        steps = alone[name].notes[0]["metrics"]
        assert max(row["actor/pg_clipfrac"] for row in steps) > 0, name
