"""Sums of validation over prompts: what the leader divides to get its metrics."""

from statistics import mean

from yatt.control.rollouts.groups import new_group
from yatt.control.rollouts.validation import with_group
from yatt.records import cluster as c


def group_of(*scores, extras=None):
    group = new_group(0, 0, "prompt", [1, 2], len(scores))
    for sample, score in zip(group.samples, scores, strict=True):
        sample.scores = {} if score is None else {"exact": score, "other": 9.0}
        sample.extras = extras or {}
    return group


def test_a_completion_without_a_score_counts_as_zero_also_for_the_best():
    sums = with_group(c.SourceScores(), group_of(-1.0, None, -2.0, None), "exact")
    assert (sums.total, sums.count, sums.failed, sums.num_prompts) == (-3.0, 4, 2, 1)
    assert sums.best == {2: mean([0, -1, 0, 0, 0, 0]), 4: 0.0}


def test_sums_grow_by_prompt():
    sums = with_group(c.SourceScores(), group_of(1.0, 0.0, extras={"exact/length": 2.0}), "exact")
    sums = with_group(sums, group_of(0.0, 0.0, extras={"exact/length": 3.0}), "exact")
    assert (sums.total, sums.count, sums.failed, sums.num_prompts) == (1.0, 4, 0, 2)
    assert sums.best == {2: 1.0} and sums.extras == {"exact/length": 10.0}


def test_one_completion_per_prompt_has_no_best():
    assert with_group(c.SourceScores(), group_of(1.0), "exact").best == {}
