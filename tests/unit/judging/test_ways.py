"""Ways of judging: what is asked about a group, and what its answers mean."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise as neighbours
from typing import Any

import pytest
from hypothesis import given, strategies as st

from yatt.config.schema import GenRMSection, VerdictSection
from yatt.config.sections.judges import CriterionSection, JudgingSection
from yatt.judging.comparison import in_orders, lists_of, pairs_of
from yatt.judging.judging import WAYS, judging_of, most_shown, questions_per_completion
from yatt.judging.protocol import Answer, JudgedGroup

SEEDS = st.integers(0, 1 << 20)


def genrm_of(**judging: Any) -> GenRMSection:
    verdict = {"scores": {"A": 1.0}} if judging.get("by") in ("pairwise", "rubric") else {}
    return GenRMSection(
        name="j", model="m", template="t", unparsable_score=0.25,
        judging=JudgingSection(**judging), verdict=VerdictSection(**verdict),
    )  # fmt: skip


def group_of(size: int, seed: int = 0) -> JudgedGroup:
    """Completion i is a text of i + 1 letters: longer ones are better."""
    return JudgedGroup(
        prompt="p", ground_truth="zzzz", data_source="d", seed=seed,
        completions=tuple("x" * (i + 1) for i in range(size)), indexes=tuple(range(size)),
    )  # fmt: skip


SETTINGS: list[dict[str, Any]] = [
    {"by": "pointwise"},
    *({"by": "pairwise", "pairs": pairs, "orders": orders, "scores_by": by}
      for pairs, orders, by in (("all", "both", "win_rate"), ("circular", "drawn", "bradley_terry"),
                                ("anchor", "one", "win_rate"), ("ground_truth", "both", "bradley_terry"),
                                ("matchings", "drawn", "win_rate"))),
    {"by": "rubric", "criteria": tuple(CriterionSection(name=each, text=each) for each in "ab")},
    {"by": "listwise"}, {"by": "listwise", "list_size": 3, "orders": "drawn"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "votes", "questions"),
    [
        ({"by": "pointwise"}, 1, 1.0), ({"by": "pointwise"}, 5, 5.0),
        ({"by": "pairwise", "pairs": "all"}, 1, 7.0), ({"by": "pairwise", "pairs": "circular"}, 2, 4.0),
        ({"by": "pairwise", "pairs": "matchings", "matchings": 3, "orders": "drawn"}, 1, 1.5),
        ({"by": "listwise"}, 1, 0.25), (SETTINGS[6], 1, 2.0), ({**SETTINGS[6], "asks": "together"}, 1, 1.0),
        ({"by": "rubric", "criteria_key": "extra_info.rubric"}, 3, 3.0),
    ],
)  # fmt: skip
def test_questions_per_completion_are_those_of_a_group_of_eight(settings, votes, questions) -> None:
    genrm = replace(genrm_of(**settings), votes=votes, temperature=1.0)
    assert questions_per_completion(genrm, 8) == questions


@given(st.sampled_from(SETTINGS), st.integers(2, 9), SEEDS)
def test_questions_are_the_same_each_time_and_answers_of_every_kind_are_read(
    settings: dict[str, Any], size: int, seed: int
) -> None:
    """What interruptions and resumed runs rest on; and every question may be the one without a verdict."""
    judging, group, draw = judging_of(genrm_of(**settings)), group_of(size, seed), random.Random(seed)
    questions = judging.questions(group)
    assert questions == judging.questions(group)
    assert len({each.key for each in questions}) == len(questions) > 0
    answers: dict[str, Answer | None] = {}
    for each in questions:
        assert all(0 <= place < size for place in each.about)
        assert each.fields.keys() == set(judging.fields)
        ranking = draw.sample(range(each.num_ranked), each.num_ranked)
        found = Answer(rankings=(tuple(ranking),)) if each.num_ranked else Answer(votes=(draw.random(),))
        answers[each.key] = draw.choice([None, found])
    scores = judging.read(group, answers).scores
    assert len(scores) == size and all(score is not None and 0 <= score <= 1 for score in scores)
    assert judging.read(group, answers).scores == scores


def test_every_way_of_the_config_is_there() -> None:
    known = JudgingSection.__dataclass_fields__["by"].type
    assert {*WAYS, "own"} == set(known.__args__), "the config's names"


@given(st.integers(2, 17), st.integers(1, 20), SEEDS)
def test_matchings_compare_each_completion_equally_often_and_no_pair_twice(
    size: int, count: int, seed: int
) -> None:
    pairs = pairs_of("matchings", size, seed, count)
    rounds = min(count, size - 1 + size % 2)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs) == rounds * (size // 2)
    times = Counter(place for pair in pairs for place in pair)
    assert all(len(set(pair)) == 2 for pair in pairs)
    if size % 2:
        assert min(times[i] for i in range(size)) >= rounds - 1, "one is left out each time, none twice"
    else:
        assert set(times.values()) == {rounds}


@given(st.integers(2, 20), st.integers(2, 9), SEEDS)
def test_lists_have_their_size_and_overlap_so_that_all_are_in_one_order(
    size: int, list_size: int, seed: int
) -> None:
    lists = lists_of(list_size, size, seed)
    if size <= list_size:
        assert lists == [tuple(range(size))]
        return
    assert {place for each in lists for place in each} == set(range(size))
    assert all(len(set(each)) == list_size for each in lists)
    assert all(set(one) & set(other) for one, other in neighbours([*lists, lists[0]]))


def test_drawn_orders_are_half_of_both_and_each_comes() -> None:
    pairs = pairs_of("all", 16)
    drawn = in_orders("drawn", pairs, 3)
    assert len(in_orders("both", pairs)) == 2 * len(drawn) == 240 and in_orders("one", pairs) == pairs
    turned = sum(one != other for one, other in zip(pairs, drawn, strict=True))
    assert 30 < turned < 90 and in_orders("drawn", pairs, 3) == drawn != in_orders("drawn", pairs, 4)


@pytest.mark.parametrize(
    ("settings", "shown"),
    [({}, 1), ({"by": "pairwise"}, 2), ({"by": "pairwise", "pairs": "ground_truth"}, 1),
     ({"by": "listwise"}, 6), ({"by": "listwise", "list_size": 4}, 4)],
)  # fmt: skip
def test_the_most_that_a_question_shows(settings: dict[str, Any], shown: int) -> None:
    assert most_shown(genrm_of(**settings), 6) == shown


def test_pairs_with_the_truth_show_it_and_both_orders_that_disagree_are_counted() -> None:
    judging, group = judging_of(genrm_of(by="pairwise", pairs="ground_truth")), group_of(2)
    questions = judging.questions(group)
    assert [(q.fields["completion_a"], q.fields["completion_b"]) for q in questions] == [
        ("x", "zzzz"), ("zzzz", "x"), ("xx", "zzzz"), ("zzzz", "xx"),
    ]  # fmt: skip
    first_place = {each.key: Answer(votes=(1.0,)) for each in questions}
    found = judging.read(group, first_place)
    assert found.scores == (0.5, 0.5) and found.counts == {
        "pairs": 2,
        "contradictions": 2,
        "decided": 4,
        "first_won": 4,
    }
    honest = dict(zip(first_place, (Answer(votes=(v,)) for v in (0.0, 1.0, 1.0, 0.0)), strict=True))
    assert judging.read(group, honest).scores == (0.0, 1.0)
    assert judging.read(group, honest).counts["contradictions"] == 0
