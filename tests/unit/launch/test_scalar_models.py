"""Folders of scalar reward models before the start, and keys that only one kind of GenRM has."""

import json
from pathlib import Path

import pytest

from tests.unit.config.test_load import GOOD, mistakes, write
from yatt.config.load import load_run_config
from yatt.config.schema import GenRMSection
from yatt.errors import ConfigError
from yatt.launch.checks.judge_check import check_head

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
