"""`run.kind`: what a kind fills in, and which keys have no effect with it."""

from pathlib import Path

import pytest

from tests.unit.config.test_load import GOOD, mistakes, write
from yatt.config.changing import changed_keys
from yatt.config.load import load_run_config, parse_resolved, resolved_text
from yatt.config.origin import load_with_origins

GIVEN = ["rewards=[]", "rollout.n=8"]
"""Turns the run file of these tests into one without rewards."""


@pytest.mark.parametrize(
    ("kind", "form", "size", "has_reference"),
    [("sft", "completions", 1, False), ("dpo", "pairs", 2, True), ("reward_model", "pairs", 2, False)],
)
def test_a_kind_decides_what_rows_have(
    tmp_path: Path, kind: str, form: str, size: int, has_reference: bool
) -> None:
    config = load_run_config([write(tmp_path, GOOD)], [*GIVEN, f"run.kind={kind}"])
    assert (config.data.form, config.rollout.n, config.has_reference) == (form, size, has_reference)
    assert config.is_given and config.has_pairs is (size == 2)
    assert parse_resolved(resolved_text(config)) == config
    _, origins = load_with_origins([write(tmp_path, GOOD)], [*GIVEN, f"run.kind={kind}"])
    assert origins["data.form"] == "filled in by run.kind" and origins["rollout.temperature"] == "default"


def test_a_run_that_samples_is_as_it_was(tmp_path: Path) -> None:
    config = load_run_config([write(tmp_path, GOOD)], [])
    assert config.run.kind == "rl" and config.data.form == "prompts" and not config.is_given
    assert not config.has_reference


def test_the_kind_of_a_run_is_none_of_the_keys_that_may_change(tmp_path: Path) -> None:
    one, other = (
        load_run_config([write(tmp_path, GOOD)], [*GIVEN, f"run.kind={kind}"]) for kind in ("sft", "dpo")
    )
    assert {"run.kind", "data.form"} <= {change.key for change in changed_keys(one, other)}


@pytest.mark.parametrize(
    ("kind", "arguments", "says"),
    [
        ("sft", ["rollout.n=4"], "rollout.n is 4, but a row has 1 with run.kind: sft; remove it."),
        ("rl", ["data.form=pairs"], "run.kind is rl, but data.form is pairs. A run keeps its kind"),
        ("sft", ["data.form=pairs"], "in a file of your own leave out data.form, which run.kind fills in."),
        ("sft", ["rewards=[{name: a, path: a.py}]"], "rewards: has no effect with run.kind: sft; remove it."),
        ("dpo", ["rollout.temperature=0.5"], "rollout.temperature: has no effect with run.kind: dpo"),
        ("sft", ["algorithm.kl_in=loss"], "algorithm.kl_in: has no effect with run.kind: sft"),
        ("dpo", ["algorithm.loss_agg_mode=seq-mean-token-mean"], "algorithm.loss_agg_mode: has no effect"),
        ("sft", ["preference.beta=0.2"], "preference.beta: has no effect with run.kind: sft"),
        ("rl", ["preference.beta=0.2", "rewards=[{name: a, path: a.py}]"], "preference.beta: has no effect"),
        ("reward_model", ["preference.beta=0.2"], "preference.beta: has no effect with run.kind: reward"),
        ("dpo", ["preference.center_coef=0.1"], "preference.center_coef: has no effect with run.kind: dpo"),
        ("sft", ["placement.mode=partial"], "placement.mode: has no effect with run.kind: sft"),
        ("sft", ["logging.rollouts=all"], "logging.rollouts: has no effect with run.kind: sft; remove it."),
        ("sft", ["validation.every=2"], "data.val_files: is empty, but validation.every is set; write at"),
        ("sft", ["validation.reward=a"], "validation.reward: has no effect with run.kind: sft"),
        (
            "dpo",
            ["checkpoint={keep_best: 1, best_metric: val/loss}"],
            "val/loss is a metric of validation, but data.val_f",
        ),
        ("sft", ["model.trainer=scripted"], "model.trainer: no run.kind: sft without megatron."),
        ("sft", ["trainer.ppo_epochs=2"], "trainer.ppo_epochs: each iteration has its own rows; write 1."),
        ("sft", ["trainer.router_replay=true"], "trainer.router_replay: no engine has chosen experts"),
        ("reward_model", ["data.apply_chat_template=false"], "engines show a reward model conversations"),
        ("dpo", ["preference.label_smoothing=0.6"], "preference.label_smoothing is 0.6; write"),
        ("kto", [], "run.kind: 'kto' is not one of 'rl', 'sft', 'dpo', 'reward_model', 'evaluation'."),
        (
            "dpo",
            ["trainer.max_tokens_per_micro_batch=2100"],
            "2100 cannot hold the longest pair of 4096 tokens (twice data.max_prompt_tokens + "
            "rollout.max_response_tokens); write 4096 or more.",
        ),
    ],
)
def test_what_has_no_effect_is_refused_by_its_key(
    tmp_path: Path, kind: str, arguments: list[str], says: str
) -> None:
    common = [*GIVEN, "trainer.max_tokens_per_micro_batch=8192", f"run.kind={kind}"]
    assert says in mistakes(tmp_path, GOOD, *common, *arguments)
