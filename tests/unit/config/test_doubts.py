"""Settings that are allowed but often not meant are said once, with what follows."""

import json
from pathlib import Path

import pytest

from yatt.config.doubts import doubtful_settings
from yatt.config.load import load_run_config
from yatt.errors import ConfigError

QUICKSTART = Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml"


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["rollout.top_p=0.9"], "rollout.top_p"),
        (["rollout.top_k=20"], "rollout.top_k"),
        (["optimizer.lr=0", "optimizer.min_lr=0"], "optimizer.lr"),
        (["rollout.tp_size=2", "launch.nodes=4", "placement.genrm_gpu_sets=2"], "rollout.tp_size"),
        (["rollout.temperature=0.7", "algorithm.kl_in=loss"], "rollout.temperature"),
        (["algorithm.entropy_coeff=-0.1"], "algorithm.entropy_coeff"),
        (["algorithm.clip_ratio_high=0"], "algorithm.clip_ratio_high"),
        (["algorithm.correction.high=0.5"], "algorithm.correction.high"),
        (["algorithm.policy_loss=gspo"], "algorithm.loss_agg_mode"),
        (["optimizer.lr_warmup_steps=1000000"], "optimizer.lr_warmup_steps"),
        (["launch.phase_timeout_s=50"], "rewards[0].timeout_s"),
        (["launch.phase_timeout_s=200", "run.deterministic=true"], "rewards[0].timeout_s"),
    ],
)
def test_a_doubtful_setting_is_named_and_what_follows_is_said(arguments: list[str], key: str) -> None:
    assert [each.key for each in doubtful_settings(load_run_config([QUICKSTART], arguments))] == [key]


@pytest.mark.parametrize(
    "arguments",
    [
        ["algorithm.policy_loss=gspo", "algorithm.loss_agg_mode=seq-mean-token-mean"],
        ["algorithm.policy_loss=cispo"],
        ["algorithm.path=own.py", "rollout.n=1"],
    ],
)
def test_a_loss_over_sequences_or_of_ones_own_is_not_doubted(arguments: list[str]) -> None:
    assert doubtful_settings(load_run_config([QUICKSTART], arguments)) == []


@pytest.mark.parametrize("other", ["algorithm.policy_loss=gmpo", "algorithm.path=own.py"])
def test_a_dual_clip_without_ppo_is_refused(other: str) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.clip_ratio_c: only ppo has a dual clip, not"):
        load_run_config([QUICKSTART], [other, "algorithm.clip_ratio_c=3.0"])


def test_the_examples_are_not_doubted() -> None:
    assert doubtful_settings(load_run_config([QUICKSTART], [])) == []
    assert (
        doubtful_settings(load_run_config([QUICKSTART, QUICKSTART.with_name("quickstart-slurm.yaml")], []))
        == []
    )


def test_a_genrms_function_that_may_take_as_long_as_the_phase_is_doubted(tmp_path: Path) -> None:
    judge = {"name": "judge", "model": "models/judge", "path": "judge.py", "timeout_s": 90}
    (tmp_path / "more.yaml").write_text(json.dumps({"genrms": [judge], "launch": {"phase_timeout_s": 80}}))
    found = [
        each.key for each in doubtful_settings(load_run_config([QUICKSTART, tmp_path / "more.yaml"], []))
    ]
    assert found == ["genrms[0].timeout_s"]


def test_a_service_whose_failure_outlasts_the_phase_is_doubted(tmp_path: Path) -> None:
    genrm = {
        "name": "judge", "model": "big", "template": "{completion}", "verdict": {"pattern": "([0-9])"},
        "api": {"url": "http://localhost:1/v1", "timeout_s": 60, "retries": 3, "outage_s": 100},
    }  # fmt: skip
    for phase_timeout_s, is_doubted in ((340, True), (341, False)):
        placement = {"mode": "colocated", "genrm_gpu_sets": 0}
        more = {"genrms": [genrm], "launch": {"phase_timeout_s": phase_timeout_s}, "placement": placement}
        (tmp_path / "more.yaml").write_text(json.dumps(more))
        found = [
            each.key for each in doubtful_settings(load_run_config([QUICKSTART, tmp_path / "more.yaml"], []))
        ]
        assert ("genrms[0].api" in found) == is_doubted, found
