"""Sums of validation over prompts: what the leader divides to get its metrics."""

from itertools import zip_longest

import pytest

from yatt.adapters.inputs.dataset import Row
from yatt.config.schema import ValidationSection
from yatt.control.leader.phase_work import of_prompts
from yatt.control.rollouts.groups.groups import new_group
from yatt.control.rollouts.scoring.subject import Subject
from yatt.control.rollouts.validation import MOST_REASONS, with_group
from yatt.core.samples.reasons import MOST_CAUSE
from yatt.records import cluster as c, message as m

ROW, REF = Row(prompt="prompt", ground_truth=None, data_source="sum", raw={}), m.RowRef(0, 0, 0)


def group_of(*scores, extras=None, answers=()):
    group = new_group(0, 0, "prompt", [1, 2], len(scores))
    subjects = [Subject(group=group, sample=sample, row=ROW, ref=REF) for sample in group.samples]
    for subject, score, answer in zip_longest(subjects, scores, answers, fillvalue=""):
        subject.sample.scores = {} if score is None else {"exact": score, "other": 9.0}
        subject.sample.extras = extras or {}
        subject.preds["exact"] = answer
    return subjects


def test_a_completion_without_a_score_is_left_out_and_counted_with_its_reason():
    subjects = group_of(-1.0, None, -2.0, None)
    for subject in subjects[1::2]:
        subject.sample.fail(f"reward 'exact', {subject.place}: reward.py:7: KeyError: 'label'", is_users=True)
    sums = with_group(c.SourceScores(), subjects, "exact")
    assert (sums.total, sums.count, sums.failed, sums.num_prompts) == (-3.0, 4, 2, 1)
    assert sums.reasons == {"reward 'exact', reward.py:7: KeyError: 'label'": 2}
    assert sums.best == {2: (-1.0, 1)}, "no four of them have a score"


def test_a_completion_that_a_function_has_no_score_for_has_not_failed():
    subjects = group_of(1.0, None)
    subjects[1].sample.unmeasured = {"exact": "the function has no score for it"}
    sums = with_group(c.SourceScores(), subjects, "exact")
    assert (sums.total, sums.count, sums.failed, sums.reasons) == (1.0, 1, 0, {})


def test_the_most_frequent_reasons_are_kept():
    sums = c.SourceScores()
    for number in range(200):
        (subject,) = group_of(None)
        subject.sample.fail("often" if number % 2 else f"once {number} {'x' * 1000}")
        sums = with_group(sums, [subject], "exact")
    assert sums.failed == 200 and len(sums.reasons) == MOST_REASONS and sums.reasons["often"] == 100
    assert max(map(len, sums.reasons)) == MOST_CAUSE


def test_sums_grow_by_prompt():
    sums = with_group(c.SourceScores(), group_of(1.0, 0.0, extras={"exact/length": 2.0}), "exact")
    sums = with_group(sums, group_of(0.0, 0.0, extras={"exact/length": 3.0}), "exact")
    assert (sums.total, sums.count, sums.failed, sums.num_prompts) == (1.0, 4, 0, 2)
    assert sums.best == {2: (1.0, 2)} and sums.extras == {"exact/length": 10.0}


def test_one_completion_per_prompt_has_no_best():
    assert with_group(c.SourceScores(), group_of(1.0), "exact").best == {}


def test_the_majority_is_over_all_nodes_prompts_and_only_where_functions_give_answers():
    first = with_group(c.SourceScores(), group_of(0.0, 1.0, 1.0, answers=("7", "8", "8")), "exact")
    second = with_group(c.SourceScores(), group_of(0.25, None, 1.0, answers=("9", "", "")), "exact")
    second = with_group(second, group_of(1.0, 1.0, 1.0), "exact")
    section = ValidationSection(reward="exact", n=3)
    metrics = of_prompts([first, second], "sum", section)
    assert metrics["val-core/sum/exact/maj@3"] == pytest.approx((1.0 + 0.25 + 0.0) / 3)
    assert metrics["val-core/sum/exact/best@3"] == pytest.approx(1.0), "over two prompts with three scores"
    assert metrics["val-aux/sum/exact/best@2"] == pytest.approx((1.0 + 1.0 + 1.0) / 3)
    assert of_prompts([with_group(c.SourceScores(), group_of(1.0, 0.0), "exact")], "sum", section).keys() == {
        "val-aux/sum/exact/best@2"
    }
