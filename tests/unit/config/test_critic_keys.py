"""Keys of the critic: which runs have one, and what is refused before the start."""

from pathlib import Path

import pytest

from tests.unit.config.test_load import GOOD, mistakes, write
from yatt.config.load import load_run_config, parse_resolved, resolved_text
from yatt.config.schema import OptimizerSection
from yatt.evaluation.request import EvalOptions, evaluation_settings

GAE = "algorithm.adv_estimator=gae"


def test_gae_has_a_critic_with_usual_settings_and_needs_one_completion(tmp_path: Path) -> None:
    config = load_run_config([write(tmp_path, GOOD)], [GAE, "rollout.n=1"])
    assert config.has_critic and config.critic_model == config.model
    assert config.critic.optimizer == OptimizerSection(lr=1e-5)
    assert parse_resolved(resolved_text(config)) == config
    other = load_run_config([write(tmp_path, GOOD)], [GAE, "critic.path=/models/reward"])
    assert other.critic_model.path == "/models/reward" and other.critic_model.dtype == other.model.dtype


def test_other_estimators_have_none(tmp_path: Path) -> None:
    assert not load_run_config([write(tmp_path, GOOD)], []).has_critic
    own = load_run_config([write(tmp_path, GOOD)], [GAE, "algorithm.path=mine.py"])
    assert not own.has_critic, "an algorithm of the user's own replaces the estimator"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["critic.value_clip=0.2"],
            "critic.value_clip: has no effect with algorithm.adv_estimator: grpo, because only gae has a "
            "critic; remove it, or write algorithm.adv_estimator: gae.",
        ),
        (
            [GAE, "algorithm.path=mine.py", "critic.epochs=2"],
            "critic.epochs: has no effect with algorithm.path: mine.py, because only gae has a critic; "
            "remove it, or write algorithm.adv_estimator: gae without a path.",
        ),
        (["algorithm.lam=0.9"], "algorithm.lam: has no effect with algorithm.adv_estimator: grpo"),
        (["algorithm.whiten=false"], "algorithm.whiten: has no effect with algorithm.adv_estimator: grpo"),
        (
            [GAE, "critic.warmup_iterations=10"],
            "critic.warmup_iterations: is 10 of 10 iterations (trainer.total_iterations), so the policy "
            "would never be trained; write less.",
        ),
        (
            [GAE, "critic.optimizer={lr: 1.0e-5, min_lr: 1.0e-4}"],
            "critic.optimizer.min_lr: 0.0001 is above lr 1e-05",
        ),
        ([GAE, "critic.optimizer={min_lr: 0.0}"], "critic.optimizer.lr: missing, and it has no default"),
        (
            [GAE, "critic.tensor_model_parallel_size=2"],
            "critic.tensor_model_parallel_size: no such key. Known keys: path, optimizer",
        ),
        (
            [GAE, "model.trainer=scripted", "rollout.engine=scripted"],
            "algorithm.adv_estimator: gae needs a critic, and a scripted trainer has none; write grpo for "
            "the rehearsal.",
        ),
        (["rollout.n=1"], "rollout.n: grpo compares completions of one prompt; write 2 or more."),
    ],
)
def test_mistakes_are_told_with_their_cure(tmp_path: Path, arguments: list[str], says: str) -> None:
    assert says in mistakes(tmp_path, GOOD, *arguments)


def test_an_evaluation_of_a_run_with_a_critic_has_none(tmp_path: Path) -> None:
    config = load_run_config([write(tmp_path, GOOD)], [GAE, "critic.value_clip=0.2"])
    options = EvalOptions(data=("held-out.jsonl",), n=1, temperature=0.0)
    found = evaluation_settings(config, options, [], tmp_path, 1)
    assert not found.config.has_critic
