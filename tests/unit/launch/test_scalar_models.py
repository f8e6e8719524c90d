"""Folders of scalar reward models before the start, and keys that only one kind of GenRM has."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiny_models import make_tokenizer
from tests.unit.config.test_load import GOOD, mistakes, write
from yatt.config.load import load_run_config
from yatt.config.schema import GenRMSection
from yatt.errors import ConfigError
from yatt.launch.checks.judge_check import check_head, check_teacher

SCALAR = "genrms: [{name: j, model: /m, kind: scalar, %s}]\n"
TEXT = "genrms: [{name: j, model: /m, template: '{completion}', %s}]\n"


def section(
    folder: Path, architecture: object, *, label: int = 0, kind: str = "scalar", **values: object
) -> GenRMSection:
    (folder / "config.json").write_text(json.dumps({"architectures": architecture, **values}))
    more = {"chat": True} if kind == "scalar" else {"template": "{completion}"}
    return GenRMSection(name="j", model=str(folder), kind=kind, label=label, **more)  # type: ignore[arg-type]


def test_a_head_has_the_wanted_number(tmp_path: Path) -> None:
    reward = ["Qwen3ForSequenceClassification"]
    check_head(section(tmp_path, reward, id2label={"0": "LABEL_0"}), "genrms[0].model")
    check_head(section(tmp_path, reward, label=1), "genrms[0].model")  # as transformers' default
    check_head(section(tmp_path, ["Qwen3ForCausalLM"], kind="text"), "genrms[0].model")
    for label, values in ((1, {"id2label": {"0": "LABEL_0"}}), (2, {}), (3, {"num_labels": 3})):
        with pytest.raises(
            ConfigError, match=rf"genrms\[0\]\.label: {label}, but the head of .* has {label} numbers"
        ):
            check_head(section(tmp_path, reward, label=label, **values), "genrms[0].model")


def test_each_kind_of_model_is_refused_as_the_other(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="is a LlamaForSequenceClassification, which writes no text; write kind"
    ):
        check_head(section(tmp_path, ["LlamaForSequenceClassification"], kind="text"), "genrms[0].model")
    for odd in (["Qwen3ForCausalLM"], [], None, "text", [7]):
        with pytest.raises(
            ConfigError, match="kind: scalar needs one whose class ends with ForSequenceClass"
        ):
            check_head(section(tmp_path, odd), "genrms[0].model")


def test_a_scalar_model_is_shown_a_template_or_the_conversation(tmp_path: Path) -> None:
    config = load_run_config([write(tmp_path, GOOD + SCALAR % "chat: true, transform: sigmoid")], [])
    assert (config.genrms[0].kind, config.genrms[0].transform) == ("scalar", "sigmoid")
    load_run_config([write(tmp_path, GOOD + SCALAR % "template: '{prompt}{completion}', label: 2")], [])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            "dtype: float32",
            "kind: scalar is shown the text of a template, such as '{prompt}{completion}', or",
        ),
        ("chat: true, template: '{prompt}'", "write one of them."),
        ("chat: true, max_tokens: 6", "max_tokens: has no effect with kind: scalar; remove it."),
        ("chat: true, verdict: {pattern: '(a)'}", "verdict: has no effect with kind: scalar"),
        ("chat: true, judging: pairwise", "judging: has no effect with kind: scalar"),
        ("chat: true, votes: 2", "votes: has no effect with kind: scalar"),
        ("chat: true, stop: [x]", "stop: has no effect with kind: scalar"),
        ("chat: true, path: f.py", "path: has no effect with kind: scalar"),
        ("chat: true, sees: prompt", "sees: has no effect with kind: scalar"),
        (
            "chat: true, api: {url: 'http://j:1/v1'}",
            "kind: scalar needs an engine of the run; a service gives text",
        ),
    ],
)
def test_keys_of_texts_are_refused_for_a_number(tmp_path: Path, more: str, says: str) -> None:
    assert says in mistakes(tmp_path, GOOD + SCALAR % more)


@pytest.mark.parametrize("more", ["transform: sigmoid", "label: 1"])
def test_keys_of_numbers_are_refused_for_texts(tmp_path: Path, more: str) -> None:
    name = more.partition(":")[0]
    assert f"{name}: is for kind: scalar; remove it." in mistakes(tmp_path, GOOD + TEXT % more)


TEACHER = "genrms: [{name: j, model: /m, kind: teacher, %s}]\n"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("template: '{prompt}'", "template: has no effect with kind: teacher; remove it."),
        ("weight: 2.0", "weight: has no effect with kind: teacher"),
        ("chat: true", "chat: has no effect with kind: teacher"),
        ("label: 1", "label: is for kind: scalar"),
        ("api: {url: 'http://j:1/v1'}", "kind: teacher needs an engine of the run"),
    ],
)
def test_a_teacher_has_a_factor_and_data_sources_only(tmp_path: Path, more: str, says: str) -> None:
    load_run_config([write(tmp_path, GOOD + TEACHER % "coef: 0.5, data_sources: [a, b]")], [])
    assert says in mistakes(tmp_path, GOOD + TEACHER % more)
    assert "coef: is for kind: teacher; remove it." in mistakes(tmp_path, GOOD + TEXT % "coef: 0.5")


def test_a_teacher_reads_the_policys_tokens(tmp_path: Path) -> None:
    """Another file with the same tokens is the same tokenizer."""
    for name in ("policy", "teacher"):
        make_tokenizer(tmp_path / name)
    text = (GOOD + TEACHER % "coef: 1.0").replace("/models/qwen3", str(tmp_path / "policy"))
    config = load_run_config(
        [write(tmp_path, text.replace("model: /m", f"model: {tmp_path / 'teacher'}"))], []
    )
    check_teacher(config, config.genrms[0], "genrms[0]")
    file = tmp_path / "teacher" / "tokenizer.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "padding": None}, indent=1))
    check_teacher(config, config.genrms[0], "genrms[0]")
    first, *_ = content["model"]["vocab"]
    content["model"]["vocab"][first] += 1
    for other in (json.dumps(content), "[]", "{", '{"model": 1}'):
        file.write_text(other)
        with pytest.raises(ConfigError, match=r"genrms\[0\]\.model: .* has another tokenizer than"):
            check_teacher(config, config.genrms[0], "genrms[0]")
    seeing = replace(config, data=replace(config.data, media_store="/store"))
    with pytest.raises(ConfigError, match="a teacher is shown no pictures, and prompts have some"):
        check_teacher(seeing, config.genrms[0], "genrms[0]")
