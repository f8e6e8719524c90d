"""Folders of scalar reward models before the start, and keys that only one kind of GenRM has."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from tests.findings import words_by_key
from tests.tiny_models import make_tokenizer
from tests.unit.config.test_load import GOOD, mistakes, write
from yatt.config.doubts import doubtful_settings
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
        ("chat: true, judging: {by: pairwise}", "judging: has no effect with kind: scalar"),
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
        ("top_k: 129", "top_k"),
        ("top_k: 8, coef: 0.0", "coef: 0 with top_k is no loss that brings the policy near the teacher"),
        ("top_k: 8, coef: -1.0", "write a number above 0, or remove top_k."),
        ("api: {url: 'http://j:1/v1'}", "kind: teacher needs an engine of the run"),
    ],
)
def test_a_teacher_has_a_factor_and_data_sources_only(tmp_path: Path, more: str, says: str) -> None:
    load_run_config([write(tmp_path, GOOD + TEACHER % "coef: 0.5, data_sources: [a, b]")], [])
    assert says in mistakes(tmp_path, GOOD + TEACHER % more)
    assert "coef: is for kind: teacher; remove it." in mistakes(tmp_path, GOOD + TEXT % "coef: 0.5")
    assert "top_k: is for kind: teacher; remove it." in mistakes(tmp_path, GOOD + TEXT % "top_k: 8")


TWO = "genrms: [{name: a, model: /m, kind: teacher, %s}, {name: b, model: /m, kind: teacher, %s}]\n"


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ("top_k: 8, data_sources: [x, y]", "top_k: 4, data_sources: [y, z]", "completions of data source y"),
        ("top_k: 8, data_sources: [x]", "top_k: 4", "completions of some data source would have the loss of"),
    ],
)
def test_a_completion_has_the_loss_of_one_teacher(tmp_path: Path, first: str, second: str, says: str) -> None:
    said = mistakes(tmp_path, GOOD + TWO % (first, second))
    assert "genrms[1].data_sources: 'a' and 'b' have top_k, and " in said and says in said
    assert "write data_sources that differ, or one of them without top_k." in said
    for other in ("top_k: 4, data_sources: [z]", "coef: 1.0"):
        load_run_config([write(tmp_path, GOOD + TWO % (first, other))], [])


def test_a_critic_needs_a_reward_beside_the_loss_of_a_teacher(tmp_path: Path) -> None:
    text = GOOD[: GOOD.index("rewards:")] + "algorithm: {adv_estimator: gae}\n" + TEACHER
    said = mistakes(tmp_path, text % "top_k: 8")
    assert "algorithm.adv_estimator: gae without any reward: all returns are 0" in said
    load_run_config([write(tmp_path, text % "coef: 1.0")], [])


def test_another_temperature_is_told(tmp_path: Path) -> None:
    for temperature, more, is_told in ((0.8, "top_k: 8", True), (1.0, "top_k: 8", False), (0.8, "", False)):
        text = GOOD + f"rollout: {{temperature: {temperature}}}\n" + TEACHER % more
        config = load_run_config([write(tmp_path, text)], [])
        told = words_by_key(doubtful_settings(config)).get("rollout.temperature", "")
        assert ("is brought to the teacher at 1, not the saved policy" in told) is is_told


def test_likeliest_tokens_are_not_all_of_a_vocabulary(tmp_path: Path) -> None:
    for name, size in (("policy", 40), ("teacher", 64)):
        make_tokenizer(tmp_path / name)
        (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": size}))
    text = (GOOD + TEACHER).replace("/models/qwen3", str(tmp_path / "policy"))
    text = text.replace("model: /m", f"model: {tmp_path / 'teacher'}")
    for count, says in ((39, ""), (40, "40 of 40 tokens of .*policy leaves none for the others; write 39"),
                        (70, "70 of 64 tokens of .*teacher leaves none")):  # fmt: skip
        config = load_run_config([write(tmp_path, text % f"top_k: {count}")], [])
        with pytest.raises(ConfigError, match=rf"genrms\[0\]\.top_k: {says}") if says else nullcontext():
            check_teacher(config, config.genrms[0], "genrms[0]")


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


def test_a_loss_needs_no_reward_and_takes_one_completion_per_prompt(tmp_path: Path) -> None:
    text = GOOD[: GOOD.index("rewards:")] + "algorithm: {adv_estimator: reinforce_plus_plus}\n"
    text += "rollout: {n: 1}\n" + TEACHER % "top_k: 64"
    config = load_run_config([write(tmp_path, text)], [])
    assert (config.top_k, config.rewards, config.rollout.n) == (64, (), 1)
