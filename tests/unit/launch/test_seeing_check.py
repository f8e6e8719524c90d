"""GenRMs that are to see and cannot are refused before the start."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiny_models import make_scripted_model, make_seeing_scripted_model
from tests.unit.launch.test_made_pictures import config_of
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.config.schema import GenRMSection, RunConfig
from yatt.config.sections.judges import JudgingSection
from yatt.config.sections.scoring import ApiSection, VerdictSection
from yatt.errors import ConfigError
from yatt.genrm.__main__ import genrm_plan
from yatt.launch.checks.preflight import check_preflight
from yatt.launch.checks.seeing_check import refuse_blind, seeing_notes

SHORTEST = {"prompt": "a", "ground_truth": "a", "data_source": "a", "completion": "a"}


def judge(model: str, **values: object) -> GenRMSection:
    return GenRMSection(name="j", model=model, template="{media}{completion}", sees="prompt", **values)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return config_of(tmp_path, tmp_path / "rows", make_seeing_scripted_model(tmp_path / "policy"))


def test_models_and_engines_that_take_no_pictures_are_refused(tmp_path: Path, config: RunConfig) -> None:
    text, seeing = make_scripted_model(tmp_path / "text"), config.model.path
    refuse_blind(config, judge(seeing), "genrms[0]")
    blind = replace(config, model=replace(config.model, path=text))
    for run, genrm, says in (
        (config, judge(text), r"genrms\[0\]\.sees: .*/text takes no pictures"),
        (config, judge(seeing, engine="transformers"), "engine transformers takes no pictures; write vllm"),
        (blind, judge(seeing), r"the policy .*/text takes text only, so prompts have no pictures"),
    ):
        with pytest.raises(ConfigError, match=says):
            refuse_blind(run, genrm, "genrms[0]")


def test_a_chat_template_without_pictures_and_a_context_that_is_too_small_are_told(
    tmp_path: Path, config: RunConfig
) -> None:
    folder = make_seeing_scripted_model(tmp_path / "judge")
    tokenizer = Tokenizer(folder)
    assert seeing_notes(config, judge(folder, chat=True), "genrms[0]", tokenizer, SHORTEST) == []
    small = judge(folder, max_model_tokens=24)
    (note,) = seeing_notes(config, small, "genrms[0]", tokenizer, SHORTEST)
    assert "a question with the largest picture has" in note and "takes 24 with its answer" in note
    settings = json.loads((Path(folder) / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}"
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    with pytest.raises(ConfigError, match="does not show a picture"):
        seeing_notes(config, judge(folder, chat=True), "genrms[0]", Tokenizer(folder), SHORTEST)


def test_a_service_sees_if_there_are_pictures_whatever_its_model_is_called(
    tmp_path: Path, config: RunConfig
) -> None:
    far = judge("a-name", api=ApiSection(url="http://x"), engine="transformers")
    refuse_blind(config, far, "genrms[0]")
    blind = replace(config, model=replace(config.model, path=make_scripted_model(tmp_path / "text")))
    with pytest.raises(ConfigError, match=r"genrms\[0\]\.sees: the policy .*/text takes text only"):
        refuse_blind(blind, far, "genrms[0]")
    with pytest.raises(ConfigError, match=r"genrms\[0\]\.sees: the policy .*/text takes text only"):
        check_preflight(replace(blind, genrms=(far,)), runs_here=False, engines_are_here=False)


def test_functions_and_services_without_chat_are_refused_by_the_file() -> None:
    with pytest.raises(ValueError, match="sees: needs a template; functions get text only"):
        GenRMSection(name="j", model="m", path="judge.py", sees="prompt")
    for url in ("https://a.example/v1/completions", "https://a.example/v1/chat/completions/"):
        with pytest.raises(ValueError, match="A service that has only /completions is no judge"):
            ApiSection(url=url)


@pytest.mark.parametrize(
    ("values", "times"),
    [
        ({"sees": "prompt"}, 1),
        ({"sees": "all"}, 1),
        (
            {
                "sees": "all",
                "judging": JudgingSection(by="pairwise"),
                "template": "{completion_a}{completion_b}",
            },
            2,
        ),
        ({"sees": "all", "judging": JudgingSection(by="listwise"), "template": "{completions}"}, 6),
        ({"sees": "none"}, 0),
    ],
)
def test_an_engine_takes_as_many_pictures_as_a_question_may_have(
    tmp_path: Path, config: RunConfig, values: dict[str, object], times: int
) -> None:
    given = {
        "name": "j",
        "model": config.model.path,
        "template": "{completion}",
        "engine": "scripted",
        **values,
    }
    scores = VerdictSection(pattern="(a)", scores={"a": 1.0})
    config = replace(
        config, genrms=(GenRMSection(**given, verdict=scores),),
        rollout=replace(config.rollout, n=2),
        validation=replace(config.validation, n=6), data=replace(config.data, media_store=str(tmp_path)),
    )  # fmt: skip
    assert genrm_plan(config, "j").options.most_pictures == times * config.media.most_per_prompt
