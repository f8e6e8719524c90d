"""PPO learns from one completion per prompt, where group baselines have nothing to compare."""

from pathlib import Path
from statistics import mean

import pytest

from tests.integration.trainer import one_sample
from tests.integration.trainer.conftest import run_world

pytestmark = pytest.mark.slow
ITERATIONS = 40
GAE = {"adv_estimator": "gae", "correction": {"rule": "none"}}
CRITIC = {"epochs": 2, "optimizer": {"lr": 3e-3, "lr_warmup_steps": 0}}


def test_a_critic_learns_what_prompts_are_worth_and_the_policy_what_it_can_change(shallow, tmp_path):
    """The other algorithm of one completion has the mean of the batch as its baseline. A trainer rank alone,
    which samples for itself, is cheaper than a whole run."""
    common = {"model": str(shallow["qwen3"]), "iterations": ITERATIONS, "critic": {}}
    jobs = [
        {**common, "name": "gae", "algorithm": GAE, "critic": CRITIC},
        {**common, "name": "batch", "algorithm": GAE | {"adv_estimator": "reinforce_plus_plus"}},
    ]
    done = run_world(tmp_path / "world", 1, jobs, program=Path(one_sample.__file__))
    gae, batch = (done[name].notes[0]["metrics"] for name in ("gae", "batch"))
    assert abs(gae[0]["critic/vf_explained_var"]) < 0.05, "values begin at 0"
    assert mean(row["critic/vf_explained_var"] for row in gae[-5:]) > 0.8
    assert mean(row["share"] for row in gae[:2]) < 0.65
    assert mean(row["share"] for row in gae[-5:]) > 0.9
    assert mean(row["share"] for row in batch[-5:]) < mean(row["share"] for row in gae[-5:]) - 0.1
