"""What `yatt check` says of a GenRM that thinks: its budget, its end, its questions."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs import RunFile
from tests.tiny_models import make_scripted_model
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.config.load import load_run_config
from yatt.config.schema import RunConfig, VerdictSection
from yatt.config.sections.judges import ThinkSection
from yatt.control.rollouts.scoring.asked import thought_ending
from yatt.errors import ConfigError
from yatt.launch.checks.input_trial import check_inputs
from yatt.launch.checks.judge_check import context_notes
from yatt.launch.checks.shown_samples import shown_samples

END = "\n</think>\n\n"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder: Path = tmp_path_factory.mktemp("run")
    make_scripted_model(folder / "policy")
    make_scripted_model(folder / "judge")
    judge = {
        "name": "j", "model": str(folder / "judge"), "engine": "scripted", "template": "A: {completion}.",
        "verdict": {"pattern": "([0-9])"}, "think": {"budget": 20}, "max_tokens": 4, "max_model_tokens": 200,
    }  # fmt: skip
    (folder / "train.jsonl").write_text('{"prompt": "0 plus 3 is", "answer": "3"}\n')
    run = RunFile(folder, {"genrms": [judge], "data": {"ground_truth_key": "answer"}})
    return load_run_config([run.write()], [])


def of_judge(config: RunConfig, **values: object) -> RunConfig:
    return replace(config, genrms=(replace(config.genrms[0], **values),))


def test_a_budget_that_never_has_room_is_refused_with_the_largest_that_has(config: RunConfig) -> None:
    end = len(Tokenizer(config.genrms[0].model).encode_plain(END))
    question = len(Tokenizer(config.genrms[0].model).encode("A: a."))
    room = 200 - question - end - 4
    check_inputs(of_judge(config, think=ThinkSection(budget=room)))
    with pytest.raises(ConfigError, match=r"genrms\[0\]\.think\.budget") as caught:
        check_inputs(of_judge(config, think=ThinkSection(budget=room + 1)))
    said = str(caught.value)
    assert f"{room + 1} never has room: the shortest question has {question} tokens, think.end {end}" in said
    assert f"Write {room} or less, or raise max_model_tokens" in said
    with pytest.raises(ConfigError, match="Lower max_tokens, or raise max_model_tokens"):
        check_inputs(of_judge(config, max_tokens=200))
    check_inputs(of_judge(config, max_tokens=200, think=ThinkSection()))


def test_the_end_counts_as_part_of_the_longest_question(config: RunConfig) -> None:
    genrm, longest = config.genrms[0], 6 + config.rollout.max_response_tokens
    cases = (longest + 11, 10, False), (longest + 10, 10, True), (longest + 1, 0, False)
    for limit, num_end, is_refused in cases:
        think = ThinkSection(budget=1 if num_end else 0)
        one = replace(genrm, max_model_tokens=limit, think=think, max_tokens=1)
        if is_refused:
            with pytest.raises(ConfigError, match=r"the longest question has .* [+] think\.end 10"):
                list(context_notes(config, one, "genrms[0]", 6, num_end))
        else:
            list(context_notes(config, one, "genrms[0]", 6, num_end))


def test_a_thought_that_may_be_shorter_is_told(config: RunConfig) -> None:
    longest = 6 + config.rollout.max_response_tokens + 10
    cases = (
        (longest + 9, []), (longest + 8, ["think.budget 5"]), (longest + 3, ["think.budget 5", "may be cut"]),
    )  # fmt: skip
    for limit, says in cases:
        genrm = replace(config.genrms[0], max_model_tokens=limit, think=ThinkSection(budget=5))
        notes = list(context_notes(config, genrm, "genrms[0]", 6, 10))
        assert len(notes) == len(says) and all(part in note for part, note in zip(says, notes, strict=True))


def test_an_end_that_the_vocabulary_lacks_is_refused(config: RunConfig, tmp_path: Path) -> None:
    tokenizer = Tokenizer(config.genrms[0].model)
    assert tokenizer.decode(list(thought_ending(config.genrms[0], tokenizer).ids)) == END

    class WithoutAngles(Tokenizer):
        def encode_parts(self, parts, *, adds_special):  # type: ignore[no-untyped-def]
            kept = [replace(part, text=part.text.replace("<", "")) for part in parts]
            return super().encode_parts(kept, adds_special=adds_special)

    with pytest.raises(ConfigError, match="cannot be written in the tokenizer of") as caught:
        thought_ending(config.genrms[0], WithoutAngles(config.genrms[0].model))
    assert caught.value.findings[0].key == "genrms[j].think.end"


def test_questions_are_shown_with_the_place_of_the_thought(config: RunConfig) -> None:
    _, question, _ = shown_samples(config, 1)
    shown = question.partition(":\n")[2].splitlines()
    assert shown == ["  | A: 3.[a thought of at most 20 tokens]", "  | </think>", "  | ", "  | [the verdict]"]


def test_a_function_with_a_client_has_no_question_to_look_at_and_is_accepted(config: RunConfig) -> None:
    own = {"path": "asks.py", "template": "", "verdict": VerdictSection(), "think": ThinkSection()}
    for chat in (False, True):
        check_inputs(of_judge(config, **own, chat=chat))
