"""`genrms[].model: policy` and `policy@start`: what is filled in, what is refused, what engines take."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.config.test_load import GOOD, mistakes, write
from yatt.config.doubts import doubtful_settings
from yatt.config.engine_keys import SPECULATION, engine_faults
from yatt.config.load import load_run_config, parse_resolved, resolved_text
from yatt.config.schema import RunConfig
from yatt.config.sizes import engine_roles, rollout_context
from yatt.core.gpus.placement import ROLLOUT, answering_role, placement_of
from yatt.evaluation.judging import named_judge

JUDGE = "genrms=[{name: itself, model: %s, template: '{completion}', verdict: {scores: {a: 1, b: 0}}%s}]"


def judged_by(tmp_path: Path, model: str, more: str = "", *arguments: str) -> RunConfig:
    return load_run_config([write(tmp_path, GOOD)], [JUDGE % (model, more), *arguments])


def test_the_policy_has_no_engine_of_its_own_and_answers_with_those_of_rollout(tmp_path: Path) -> None:
    config = judged_by(tmp_path, "policy", ", max_model_tokens: 9000")
    (genrm,) = config.genrms
    assert config.engine_genrms == () and engine_roles(config) == (ROLLOUT,)
    assert answering_role(genrm) == ROLLOUT and config.judge_folders == {"itself": config.model.path}
    assert not [role for role in placement_of(config).pools if role.startswith("genrm")]
    assert parse_resolved(resolved_text(config)) == config


def test_the_policys_engines_take_the_longer_of_a_sample_and_a_question(tmp_path: Path) -> None:
    sample = 1024 + 1024
    lengths = ["data.max_prompt_tokens=1024", "rollout.max_response_tokens=1024"]
    for asked, longest in ((100, sample), (9000, 9000)):
        config = judged_by(tmp_path, "policy", f", max_model_tokens: {asked}", *lengths)
        assert rollout_context(config) == longest
    other = judged_by(tmp_path, "models/judge", ", max_model_tokens: 9000", *lengths)
    assert rollout_context(other) == sample


def test_the_policy_at_the_start_is_its_folder_whoever_made_the_config(tmp_path: Path) -> None:
    config = judged_by(tmp_path, "policy@start")
    (genrm,) = config.engine_genrms
    assert genrm.model == config.model.path
    assert parse_resolved(resolved_text(config)) == config
    moved = replace(config, model=replace(config.model, path="/elsewhere"))
    assert moved.engine_genrms == (genrm,), "the weights that the run began with"


def test_measured_alone_it_has_an_engine_like_the_policys(tmp_path: Path) -> None:
    config = judged_by(
        tmp_path, "policy", ", max_model_tokens: 9000", "rollout.max_num_seqs=7", "model.dtype=float32"
    )
    genrm = named_judge(config, "itself")
    assert (genrm.model, genrm.dtype, genrm.max_num_seqs) == (config.model.path, "float32", 7)
    assert genrm.has_engine and genrm.max_model_tokens == 9000 and genrm.verdict == config.genrms[0].verdict


@pytest.mark.parametrize(
    ("model", "more", "says"),
    [
        ("policy", "", "max_model_tokens: the policy's engines are built for the longest question"),
        ("policy", ", max_model_tokens: 9, tp_size: 2", "tp_size: has no effect with model: policy"),
        ("policy", ", max_model_tokens: 9, engine: vllm", "engine: has no effect with model: policy"),
        ("policy", ", max_model_tokens: 9, engine_args: {seed: 1}", "engine_args: has no effect"),
        ("policy", ", max_model_tokens: 9, sees: prompt", "sees: model: policy is shown no pictures"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_its_cure(tmp_path: Path, model: str, more: str, says: str) -> None:
    found = mistakes(tmp_path, GOOD, JUDGE % (model, more))
    assert says in found


@pytest.mark.parametrize(
    "judge",
    [
        "{name: t, model: policy, kind: teacher, max_model_tokens: 9}",
        "{name: t, model: policy, path: mine.py, max_model_tokens: 9}",
    ],
)
def test_a_teacher_and_a_client_need_the_policy_at_the_start(tmp_path: Path, judge: str) -> None:
    found = mistakes(tmp_path, GOOD, f"genrms=[{judge}]")
    assert "write model: policy@start" in found
    load_run_config([write(tmp_path, GOOD)], [f"genrms=[{judge.replace('policy', 'policy@start', 1)}]"])


def test_a_policy_has_no_head(tmp_path: Path) -> None:
    judge = "{name: t, model: policy, kind: scalar, chat: true, max_model_tokens: 9}"
    assert "a policy has no head that gives numbers" in mistakes(tmp_path, GOOD, f"genrms=[{judge}]")


@pytest.mark.parametrize(
    "section",
    [
        "genrms=[{name: j/x, model: policy, template: '{completion}', max_model_tokens: 9}]",
        "rewards=[{name: a/b, path: mine.py}]",
        "genrms=[{name: j, model: m, template: '{criterion}', judging: {by: rubric, "
        "criteria: [{name: agrees/a, text: x}]}}]",
    ],
)
def test_a_name_with_a_slash_would_be_another_one_s_curve(tmp_path: Path, section: str) -> None:
    assert "with a '/' its curves could be those of another score" in mistakes(tmp_path, GOOD, section)


def test_soft_verdicts_and_speculation_do_not_go_together(tmp_path: Path) -> None:
    config = judged_by(tmp_path, "policy", ", max_model_tokens: 9000")
    (genrm,), rollout = config.genrms, replace(config.rollout, engine_args={SPECULATION: {"method": "ngram"}})
    soft = replace(genrm, verdict=replace(genrm.verdict, read="soft"))
    for speculates, judge, is_refused in ((True, soft, True), (True, genrm, False), (False, soft, False)):
        tried = replace(config, genrms=(judge,), rollout=rollout if speculates else config.rollout)
        assert ("genrms[0].verdict.read" in {each.key for each in engine_faults(tried)}) == is_refused


@pytest.mark.parametrize("name", ["policy", "policy@start"])
def test_a_service_may_call_its_model_so(tmp_path: Path, name: str) -> None:
    config = judged_by(tmp_path, name, ", api: {url: 'http://a/v1'}")
    (genrm,) = config.genrms
    assert genrm.model == name and not genrm.is_policy and not config.judge_folders


def test_a_run_without_anything_beside_it_is_told(tmp_path: Path) -> None:
    def keys(*arguments: str) -> list[str]:
        config = judged_by(tmp_path, "policy", ", max_model_tokens: 9000", *arguments)
        return [each.key for each in doubtful_settings(config)]

    assert "genrms[0].model" in keys("rewards=[]")
    assert "genrms[0].model" not in keys("rewards=[{name: rule, path: 'builtin:exact', weight: 0}]")
