"""Router replay: an update sends tokens to the experts that the policy before it chose.

The reference is transformers with the choice of experts taken down in one pass and forced in another, and
routers that were moved in between. In the trainer the same move is made between the pass of the old policy
and the first update.
"""

import contextlib
from unittest import mock

import pytest
import torch

from tests.integration.trainer.conftest import make_model, run_world
from tests.integration.trainer.paper_losses import advantages, aggregated, completion_logprobs, saved
from tests.integration.trainer.program import router_noise, samples
from tests.integration.trainer.test_families import PAIR, SPREAD, TINY
from yatt.trainer.forward.stats import load_metrics

pytestmark = pytest.mark.slow
ALGORITHM = {"loss_agg_mode": "token-mean", "correction": {"rule": "none"}}
KIND, LAYERS = "qwen3_moe", 3
LAYOUTS = {
    "tp2ep2": SPREAD["tp2ep2"],
    "pp2": PAIR["pp2"],
    "pp2-again": {**PAIR["pp2"], "recompute": "full"},
    "cp2": PAIR["cp2"],
}
"""With two stages a layer's next forward pass precedes the backward pass that computes its last one again."""

TOPK = torch.topk


@contextlib.contextmanager
def taken_down(choices):
    def topk(scores, count, dim):
        found = TOPK(scores, count, dim=dim)
        choices.append(found.indices)
        return found

    with mock.patch("torch.topk", topk):
        yield


@contextlib.contextmanager
def forced(choices):
    left = iter(choices)

    def topk(scores, count, dim):
        indices = next(left)
        return scores.gather(dim, indices), indices

    with mock.patch("torch.topk", topk):
        yield


def moved_gradient(folder, *, is_replayed):
    """The gradient of the first update, and the share of routes that moved routers would have changed."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float()
    facts, rollouts = samples(1)
    gains = advantages([fact.reward for fact in facts])
    half = list(zip(rollouts, gains, strict=True))[: len(rollouts) // 2]
    old, choices = [], []
    with torch.no_grad():
        for rollout, _ in half:
            choices.append([])
            with taken_down(choices[-1]):
                old.append(completion_logprobs(model, rollout))
        for number, layer in enumerate(model.model.layers):
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.weight += router_noise(number, layer.mlp.gate.weight.shape)
    rows, changed = [], []
    for (rollout, gain), before, chosen in zip(half, old, choices, strict=True):
        with forced(chosen) if is_replayed else taken_down(free := []):
            ratio = (completion_logprobs(model, rollout) - before).exp()
        if not is_replayed:
            changed += [(a.sort(1)[0] != b.sort(1)[0]).any(1) for a, b in zip(free, chosen, strict=True)]
        assert ratio.min() > 0.8 and ratio.max() < 1.2, "nothing is clipped"
        rows.append(-gain * ratio)
    aggregated("token-mean", rows).backward()
    share = float(torch.cat(changed).float().mean()) if changed else 0.0
    return dict(pair for name, p in model.named_parameters() for pair in saved(name, p.grad)), share


@pytest.fixture(scope="session")
def worlds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("routes")
    model = make_model(folder / "model", KIND, num_hidden_layers=LAYERS, **TINY[KIND])

    def job(name, layout, *, is_replayed=True):
        return {
            "name": name, "model": str(model), "algorithm": ALGORITHM,
            "actions": [["moved", "first"], ["train", 2]], "layout": {**layout, "router_replay": is_replayed},
        }  # fmt: skip

    alone = [job("one", {}), job("again", {"recompute": "full"}), job("free", {}, is_replayed=False)]
    jobs = run_world(folder / "alone", 1, alone)
    return model, jobs | run_world(folder / "pair", 2, [job(*pair) for pair in LAYOUTS.items()])


def differing(got, expected):
    assert got.keys() == expected.keys()
    return {
        name for name, tensor in expected.items()
        if (got[name] - tensor).abs().max() > 1e-5 * max(tensor.abs().max().item(), 1e-1)
    }  # fmt: skip


def test_updates_have_the_gradient_of_the_recorded_routes_in_every_layout(worlds):
    model, jobs = worlds
    expected, _ = moved_gradient(model, is_replayed=True)
    assert expected["model.layers.0.mlp.gate.weight"].abs().max() > 0, "routers learn"
    for name in ("one", "again", *LAYOUTS):
        assert differing(jobs[name].tensors("first"), expected) == set(), name


def test_without_replay_they_have_that_of_the_routes_of_now(worlds):
    model, jobs = worlds
    expected, share = moved_gradient(model, is_replayed=False)
    assert share > 0.02, "the routers moved"
    assert differing(jobs["free"].tensors("first"), expected) == set()
    assert differing(jobs["free"].tensors("first"), moved_gradient(model, is_replayed=True)[0])


def test_the_load_of_experts_is_measured(worlds):
    _, jobs = worlds
    for name in ("one", "free", "tp2ep2", "pp2-again"):
        every = [note["metrics"][0] for note in jobs[name].notes]
        found = [{key: value for key, value in m.items() if key.startswith("moe/")} for m in every]
        assert found == found[:1] * len(found), "each rank has the sums of all"
        assert (
            0 <= found[0]["moe/load/min"] < 1 < found[0]["moe/load/max"] <= 1 + found[0]["moe/max_violation"]
        )
        assert 0 <= found[0]["moe/idle_experts"] < 1


def test_loads_are_by_the_mean_of_their_layer():
    counts = torch.tensor([[0, 4, 8], [0, 0, 0], [10, 20, 30]])
    assert load_metrics(counts) == {
        "moe/load/max": pytest.approx((2 + 1.5) / 2), "moe/load/min": pytest.approx((0 + 0.5) / 2),
        "moe/max_violation": pytest.approx(1), "moe/idle_experts": pytest.approx(1 / 6),
    }  # fmt: skip
    assert load_metrics(torch.zeros(2, 3)) == {}
