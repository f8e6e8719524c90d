"""Rubrics: which criteria are asked, what their values make, and rows that bring their own."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, strategies as st

from yatt.config.schema import GenRMSection, VerdictSection
from yatt.config.sections.judges import CriterionSection, JudgingSection
from yatt.judging.judging import judging_of
from yatt.judging.protocol import Answer, JudgedGroup, UnusableRow
from yatt.judging.reading import parse_values, structure_of
from yatt.judging.ways.rubric import criteria_of_row, refuse_row, weighted_share

RIGHT = {"name": "right", "text": "The result is right.", "weight": 3.0}
SHORT = {"name": "short", "text": "It is short."}
GUESS = {"name": "guess", "text": "It guesses.", "weight": -1.0}
FORM = {"name": "form", "rule": "digits", "required": True}
YES_NO = {"scores": {"Y": 1.0, "N": 0.0}}


def genrm_of(
    *criteria: dict[str, Any], verdict: dict[str, Any] | None = None, **judging: Any
) -> GenRMSection:
    return GenRMSection(
        name="j", model="m", template="t", unparsable_score=0.5,
        verdict=VerdictSection(**(verdict or YES_NO)),
        judging=JudgingSection(
            by="rubric", criteria=tuple(CriterionSection(**each) for each in criteria), **judging
        ),
    )  # fmt: skip


def group_of(rules: list[float], seed: int = 0, row: dict[str, Any] | None = None) -> JudgedGroup:
    return JudgedGroup(
        prompt="p", ground_truth="", data_source="", seed=seed, row=row or {},
        completions=tuple(f"text {i}" for i in range(len(rules))), indexes=tuple(range(len(rules))),
        scores=tuple({"digits": each} for each in rules),
    )  # fmt: skip


def test_each_criterion_is_a_question_and_the_score_is_the_weighted_share() -> None:
    judging, group = judging_of(genrm_of(RIGHT, SHORT, GUESS)), group_of([0.0, 0.0])
    questions = judging.questions(group)
    assert [q.key for q in questions] == [f"{i}/{n}" for i in (0, 1) for n in ("right", "short", "guess")]
    assert questions[3].fields == {"completion": "text 1", "criterion": "The result is right."}
    said = {"0/right": 1.0, "0/short": 0.0, "0/guess": 0.0, "1/right": 1.0, "1/short": 1.0, "1/guess": 1.0}
    found = judging.read(group, {key: Answer(votes=(value,)) for key, value in said.items()})
    assert found.scores == (pytest.approx(3 / 4), pytest.approx((3 + 1 - 1) / 4))
    assert found.extras[1] == {"right": 1.0, "short": 1.0, "guess": 1.0}
    same = {name: found.counts[f"criterion/{name}/same"] for name in ("right", "short", "guess")}
    assert same == {"right": 1, "short": 0, "guess": 0}
    assert all(found.counts[f"criterion/{name}/groups"] == 1 for name in same) and len(found.counts) == 6


def test_nothing_is_asked_where_a_required_rule_is_not_met() -> None:
    judging, group = judging_of(genrm_of(FORM, RIGHT)), group_of([0.0, 1.0, 0.4])
    assert judging.rules == ("digits",)
    assert [q.key for q in judging.questions(group)] == ["1/right"]
    found = judging.read(group, {"1/right": Answer(votes=(0.5,))})
    assert found.scores == (0.0, pytest.approx((1 + 3 * 0.5) / 4), 0.0)
    assert found.extras == ({"form": 0.0}, {"form": 1.0, "right": 0.5}, {"form": 0.4})
    assert found.counts == {}, "of rules, and of one completion, nothing is said"
    every_one = group_of([0.0, 0.0])
    assert judging.questions(every_one) == [] and judging.read(every_one, {}).scores == (0.0, 0.0)
    without = judging_of(genrm_of({**FORM, "required": False}, RIGHT))
    assert len(without.questions(group)) == 3, "a rule that is not required only counts"


def test_a_required_criterion_that_is_not_met_makes_the_score_zero() -> None:
    judging = judging_of(genrm_of({**RIGHT, "required": True}, SHORT))
    group = group_of([0.0, 0.0])
    votes = {"0/right": 0.49, "0/short": 1.0, "1/right": 0.5, "1/short": 1.0}
    assert judging.read(group, {k: Answer(votes=(v,)) for k, v in votes.items()}).scores == (0.0, 0.625)


def test_numbers_are_brought_to_the_scale_and_a_missing_verdict_is_the_score_of_the_run_file() -> None:
    genrm = genrm_of(RIGHT, SHORT, verdict={"pattern": "([0-9])", "minimum": 1.0, "maximum": 5.0})
    found = judging_of(genrm).read(group_of([0.0]), {"0/right": Answer(votes=(4.0, 5.0)), "0/short": None})
    assert found.extras == ({"right": pytest.approx(7 / 8), "short": 0.5},)


def test_all_criteria_together_are_one_question_with_a_value_for_each_name() -> None:
    genrm = genrm_of(FORM, RIGHT, SHORT, asks="together")
    judging, group = judging_of(genrm), group_of([1.0, 0.0])
    (question,) = judging.questions(group)
    assert question.criteria == ("right", "short") and judging.fields == ("completion", "criteria")
    assert question.fields["criteria"] == "right: The result is right.\nshort: It is short."
    schema = json.loads(structure_of(genrm.verdict, question.criteria))["json"]
    assert list(schema["properties"]) == schema["required"] == ["right", "short"]
    assert schema["properties"]["right"] == {"enum": ["Y", "N"]} and not schema["additionalProperties"]
    values = parse_values(
        '```json\n{"right": "Y", "short": "N", "why": "x"}\n```', genrm.verdict, question.criteria
    )
    assert values == {"right": 1.0, "short": 0.0}
    found = judging.read(group, {"0": Answer(values=(values,))})
    assert found.scores == (pytest.approx(4 / 5), 0.0)


@pytest.mark.parametrize("text", ['{"right": "Y"}', '{"right": "Y", "short": "?"}', "Y N", '["Y", "N"]', "{"])
def test_an_answer_without_a_value_for_each_criterion_is_none(text: str) -> None:
    assert parse_values(text, VerdictSection(**YES_NO), ("right", "short")) is None


def test_criteria_are_left_out_by_lot_the_same_for_a_group_but_never_rules_or_required_ones() -> None:
    many = [{"name": f"c{i}", "text": "x"} for i in range(20)]
    judging = judging_of(genrm_of(FORM, {**RIGHT, "required": True}, *many, drop=0.5))
    kept = []
    for seed in range(40):
        names = {q.key.partition("/")[2] for q in judging.questions(group_of([1.0], seed))}
        assert "right" in names
        by_completion = [
            {
                q.fields["criterion"]
                for q in judging.questions(group_of([1.0, 1.0], seed))
                if q.about == (place,)
            }
            for place in (0, 1)
        ]
        assert by_completion[0] == by_completion[1]
        kept.append(len(names) - 1)
    assert 8 < sum(kept) / len(kept) < 12 and len(set(kept)) > 1
    one = judging_of(genrm_of(FORM, SHORT, drop=0.9))
    assert all(len(one.questions(group_of([1.0], seed))) == 1 for seed in range(40)), (
        "one that is asked stays"
    )


ROW = {
    "extra_info": {"rubric": [{"text": "It has a source."}, {"name": "tone", "text": "Kind.", "weight": 2}]}
}


def test_rows_bring_criteria_of_their_own() -> None:
    genrm = genrm_of(SHORT, criteria_key="extra_info.rubric")
    questions = judging_of(genrm).questions(group_of([0.0], row=ROW))
    assert [q.key for q in questions] == ["0/short", "0/row_1", "0/tone"]
    as_text = {"extra_info": {"rubric": json.dumps(ROW["extra_info"]["rubric"])}}
    assert judging_of(genrm).questions(group_of([0.0], row=as_text)) == questions


LONG = "x" * 5000


@pytest.mark.parametrize(
    ("rubric", "says"),
    [
        (3, "is no list of criteria"), ({}, "is no list of criteria"), ("[1", "is no list of criteria"),
        ([{"text": "x"}] * 65, "has 65 criteria, more than 64"), (["x"], r"\[0\] is no object"),
        ([{"text": ""}], r"\[0\].text is no text of 1 to"), ([{"text": LONG}], r"\[0\].text is no text"),
        ([{"text": "x", "points": 3}], "has 'points'; known are name, text, weight and required"),
        ([{"text": "x", "weight": float("nan")}], "weight is no number from"),
        ([{"text": "x", "weight": True}], "weight is no number from"),
        ([{"text": "x", "weight": 10**401}], "weight is no number from"),
        ([{"text": "half \ud800"}], "no text of 1 to"), ([{"text": "x", "name": " "}], "name is no name"),
        ([{"text": "x", "required": 1}], "required is neither true nor false"),
        ([{"text": "x", "name": "a\nb"}], "name is no name"),
        ([{"text": "x", "name": LONG}], "name is no name"),
        ([{"text": "x", "required": True, "weight": -1}], "is required and has a weight below 0"),
        ([{"text": "x", "name": "short"}], "two criteria are named 'short'"),
        ([{"text": "x", "name": "same"}], "the name 'same' is that of one of a judge's own measures"),
    ],
)  # fmt: skip
def test_a_row_whose_criteria_cannot_be_used_is_told(rubric: Any, says: str) -> None:
    genrm, row = genrm_of(SHORT, criteria_key="extra_info.rubric"), {"extra_info": {"rubric": rubric}}
    with pytest.raises(UnusableRow, match=f"extra_info.rubric.*{says}"):
        refuse_row(genrm, row)
    with pytest.raises(UnusableRow):
        judging_of(genrm).questions(group_of([0.0], row=row))


def test_a_row_may_have_no_criteria_where_the_run_file_has_some() -> None:
    some, none = genrm_of(SHORT, criteria_key="extra_info.rubric"), genrm_of(criteria_key="extra_info.rubric")
    for row in ({}, {"extra_info": None}, {"extra_info": {"rubric": []}}):
        refuse_row(some, row)
        assert len(judging_of(some).questions(group_of([0.0], row=row))) == 1
        with pytest.raises(UnusableRow, match="is no list of criteria"):
            refuse_row(none, row)


def test_a_row_with_negative_weights_only_is_told() -> None:
    genrm = genrm_of(criteria_key="extra_info.rubric")
    with pytest.raises(UnusableRow, match="no criterion has a weight above 0"):
        refuse_row(genrm, {"extra_info": {"rubric": [{"text": "x", "weight": -1}]}})


KEYS = st.sampled_from(["rubric", "text", "name", "weight", "required", "x"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_whatever_stands_in_a_row_is_a_list_of_criteria_or_told(value: Any) -> None:
    try:
        found = criteria_of_row({"extra_info": value}, "extra_info.rubric")
    except UnusableRow:
        return
    assert all(each.text and each.name for each in found)


CRITERIA = st.lists(
    st.builds(
        lambda number, weight, required: CriterionSection(
            name=f"c{number}", text="x", weight=abs(weight) if required else weight, required=required
        ),
        st.integers(0, 99), st.floats(-10, 10), st.booleans(),
    ),
    min_size=1, max_size=6, unique_by=lambda each: each.name,
)  # fmt: skip


@given(CRITERIA, st.integers(0, 1 << 20))
def test_the_share_is_between_0_and_1_and_grows_with_what_is_met(
    criteria: list[CriterionSection], seed: int
) -> None:
    draw = random.Random(seed)
    values = {each.name: draw.random() for each in criteria}
    share = weighted_share(criteria, values)
    assert 0.0 <= share <= 1.0
    for each in criteria:
        more = {**values, each.name: 1.0}
        assert weighted_share(criteria, more) >= share - 1e-12 or each.weight < 0
    assert weighted_share(criteria, {**values, **{each.name: 0.0 for each in criteria if each.required}}) == (
        0.0 if any(each.required for each in criteria) else share
    )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"by": "rubric"}, "by: rubric needs criteria, or criteria_key"),
        ({"criteria": (CriterionSection(**SHORT),)}, "criteria: has no effect with by: pointwise"),
        ({"by": "pairwise", "list_size": 3}, "list_size: has no effect with by: pairwise"),
        ({"asks": "together"}, "asks: has no effect with by: pointwise; it is for rubric"),
        ({"by": "rubric", "criteria": (CriterionSection(**SHORT),) * 2}, "two have the same name"),
        ({"by": "rubric", "criteria": (CriterionSection(**FORM),)}, "without one the judge has no say"),
        ({"by": "rubric", "criteria": (CriterionSection(**GUESS),)}, "none that is a text has a weight"),
    ],
)  # fmt: skip
def test_a_rubric_that_judges_nothing_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        JudgingSection(**settings)


@pytest.mark.parametrize(
    ("verdict", "settings", "says"),
    [
        ({"pattern": "([0-9])"}, {}, "needs verdict.scores between 0 and 1"),
        ({"pattern": "([0-9])", "minimum": 5, "maximum": 5}, {}, "needs verdict.scores between 0 and 1"),
        ({"pattern": "(A)", "scores": {"A": 2.0}}, {}, "needs verdict.scores between 0 and 1"),
        ({"pattern": "(Y|N)", **YES_NO}, {"asks": "together"}, "has a form of its own"),
    ],
)  # fmt: skip
def test_a_verdict_that_is_no_value_of_a_criterion_is_refused(
    verdict: dict[str, Any], settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        genrm_of(SHORT, verdict=verdict, **settings)
