"""Samples of two turns: only the policy's tokens are trained on, in every layout."""

from types import ModuleType

import pytest
import torch

from tests.integration.trainer.conftest import run_world
from tests.integration.trainer.paper_losses import paper_gradient
from tests.integration.trainer.program import samples
from tests.integration.trainer.test_layouts import CP, GRADIENT, PP, TP, largest_difference
from tests.packages import trainer_module

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]
LAYOUTS = {"tp2": {TP: 2, "sequence_parallel": True}, "pp2": {PP: 2}, "cp2": {CP: 2}, "dp2": {}}
PLAIN = {"correction": {"rule": "none"}, "loss_agg_mode": "token-mean"}
GSPO = {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean", "correction": {"rule": "none"}}
CASES = {"ppo": PLAIN, "gspo": GSPO}
"""At the first step the gradient of gspo is that of ppo with this aggregation."""


def batches() -> ModuleType:
    return trainer_module("attention.batches")


def jobs(model: str, layouts: dict) -> list[dict]:
    return [
        {"name": f"{case}{name}", "model": model, "algorithm": algorithm, "actions": GRADIENT, "turns": 2,
         "layout": layout}
        for name, layout in layouts.items()
        for case, algorithm in CASES.items()
    ]  # fmt: skip


def test_every_layout_has_the_gradient_of_the_policys_tokens(shallow, tmp_path):
    """One test: with tests in another order, each would make the worlds anew."""
    model = shallow["qwen3"]
    one = run_world(tmp_path / "one", 1, jobs(str(model), {"": {}}))
    two = run_world(tmp_path / "two", 2, jobs(str(model), LAYOUTS))
    for case, algorithm in CASES.items():
        paper = paper_gradient(model, algorithm, has_observations=True)
        got = {name: job.tensors("first") for name, job in (one | two).items() if name.startswith(case)}
        assert len(got) == 1 + len(LAYOUTS)
        far = {name: largest_difference(tensors, paper) for name, tensors in got.items()}
        assert {name: value for name, value in far.items() if value >= 1e-5} == {}
        without = paper_gradient(model, algorithm)
        assert largest_difference(without, paper) > 1e-4, "the policy reads the observations"


@pytest.mark.parametrize("cp_size", [1, 2])
def test_an_observation_has_no_row_in_the_loss(cp_size):
    """So its gradient is exactly zero: no logits are computed where an observation is predicted."""
    _, rollouts = samples(1, has_observations=True)
    made, start = [], 0
    for rollout in rollouts:
        made.append(batches().sample_of(rollout, start))
        start += made[-1].num_completion_tokens
    weights = [one.sampler_logprobs * 0 + 1 for one in made]
    labels: list[int] = []
    flat: list[int] = []
    for rank in range(cp_size):
        cut = batches().SequenceLayout(align=2 * cp_size if cp_size > 1 else 1, cp_size=cp_size, cp_rank=rank)
        micro = batches().micro_batch(made, weights, cut, torch.device("cpu"))
        labels += micro.labels_T.tolist()
        flat += micro.flat_T.tolist()
        assert len(set(micro.rows_R[: len(micro.labels_T)].tolist())) == len(micro.labels_T)
    wanted = [int(token) for one in made for token in one.ids[one.is_sampled]]
    assert sorted(flat) == list(range(len(wanted)))
    assert [label for _, label in sorted(zip(flat, labels, strict=True))] == wanted
