"""Which changed inputs are refused, which are told, and in which words."""

import itertools

import pytest

from yatt.core.attempts import inputs
from yatt.records.inputs import is_input

TOLD = (
    "rewards[digits]", "genrms[judge].model", "genrms[judge].path", "environment", "algorithm.path",
    "critic.weights",
)  # fmt: skip
REFUSED = ("tokenizer", "chat_template", "model_config", "critic.model_config", "data.val_files")
EVERY = (*TOLD, *REFUSED, "weights", "model.family")


def rules(**what: object) -> inputs.InputRules:
    return inputs.InputRules(**({"has_reference": False, "is_deterministic": False} | what))


def changed(name: str, of: inputs.InputRules) -> inputs.ChangedInputs:
    before = dict.fromkeys(EVERY, "same")
    return inputs.changed_digests(before, before | {name: "another"}, of)


@pytest.mark.parametrize("name", EVERY)
def test_what_decides_the_meaning_of_a_number_is_refused_unless_it_is_named(name: str) -> None:
    is_refused = name in REFUSED
    assert changed(name, rules()) == inputs.ChangedInputs(*(((name,), ()) if is_refused else ((), (name,))))
    assert changed(name, rules(is_deterministic=True)).refused == (name,)
    assert changed(name, rules(has_reference=True)).refused == (
        (name,) if is_refused or name == "weights" else ()
    )
    for is_deterministic, has_reference in itertools.product((False, True), repeat=2):
        named = rules(
            is_deterministic=is_deterministic, has_reference=has_reference, accepted=frozenset([name])
        )
        assert changed(name, named) == inputs.ChangedInputs((), (name,))


def test_what_came_went_or_was_unknown_is_no_change() -> None:
    before, now = {"environment": "a", "tokenizer": "t"}, {"rewards[new]": "b", "tokenizer": "t"}
    assert inputs.changed_digests(before, now, rules(is_deterministic=True)) == inputs.ChangedInputs()


def test_a_person_is_told_what_changed_and_how_to_go_on() -> None:
    said = inputs.refusal_of_inputs(("rewards[digits]", "tokenizer"), "/runs/a b")
    assert "rewards[digits], the tokenizer of model.path." in said
    assert """`yatt resume '/runs/a b' 'run.accept_changed=["rewards[digits]",tokenizer]'`""" in said
    assert inputs.notice_of_inputs(("environment",), 7).startswith(
        "not what they were at iteration 7: environment."
    )


def test_names_are_those_of_the_config() -> None:
    assert all(map(is_input, EVERY))
    assert not any(map(is_input, ("", "rewards", "rewards[]", "judge", "genrms[a]", "tokenizer ", "data")))
