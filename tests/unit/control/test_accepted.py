"""Accepted groups: each is in one batch, and is kept until that batch is trained on."""

import random

import pytest

from yatt.control.rollouts.groups.groups import PromptGroup, new_group
from yatt.control.rollouts.node_groups import AcceptedGroups
from yatt.core.samples.rewards import Shaping
from yatt.records.message import Turn, pack_ids


def group(number: int) -> PromptGroup:
    return new_group(number, number, "", [1], 1)


def judged(*pairs: tuple[float, int]) -> PromptGroup:
    """A group of completions with these scores of a judge and lengths."""
    found = new_group(1, 1, "", [1], len(pairs))
    for sample, (score, length) in zip(found.samples, pairs, strict=True):
        sample.turns = [Turn(pack_ids([1] * length), is_sampled=True)]
        sample.scores = {"judge": score, "rule": 0.5}
    return found


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(1.0, 9), (0.5, 5), (0.0, 1)], {"judge/same": 0.0, "judge/longer_wins": 1.0}),
        ([(1.0, 1), (0.5, 5), (0.0, 9)], {"judge/same": 0.0, "judge/longer_wins": 0.0}),
        ([(1.0, 5), (0.0, 5), (0.0, 9), (1.0, 9)], {"judge/same": 0.0, "judge/longer_wins": 0.5}),
        ([(1.0, 5), (0.0, 5)], {"judge/same": 0.0}),
        ([(0.3, 5), (0.3 + 1e-9, 9)], {"judge/same": 1.0}),
        ([(0.3, 5)], {}),
    ],
)
def test_a_group_says_how_its_judges_scores_go_with_length(pairs, expected) -> None:
    scores = judged(*pairs).fact({"judge": 1.0}, Shaping(max_tokens=0), 0, ("judge", "absent")).scores
    assert {name: value for name, value in scores.items() if "/" in name} == expected
    assert judged(*pairs).fact({"judge": 1.0}, Shaping(max_tokens=0), 0).scores.keys() == {"judge", "rule"}


def test_a_group_says_how_often_a_judge_orders_it_as_scores_of_weight_0_do() -> None:
    found = judged((1.0, 5), (0.5, 5), (0.0, 5), (0.0, 5))
    for sample, truth in zip(found.samples, (1.0, 1.0, 0.0, 0.5), strict=True):
        sample.scores |= {"truth": truth, "counts": truth}
    del found.samples[3].scores["truth"]
    weights = {"judge": 1.0, "counts": 0.5, "truth": 0.0, "rule": 0.0, "absent": 0.0}
    watched = ("truth", "rule", "absent")
    scores = found.fact(weights, Shaping(max_tokens=0), 0, ("judge", "absent"), watched).scores
    agrees = {name: value for name, value in scores.items() if "/agrees/" in name}
    assert agrees == {"judge/agrees/truth": 1.0}, "of two pairs that both tell apart; the rule tells none"
    found.samples[0].scores["truth"] = -1.0
    scores = found.fact(weights, Shaping(max_tokens=0), 0, ("judge",), watched).scores
    assert scores["judge/agrees/truth"] == 1 / 3


def numbers(groups: list[PromptGroup]) -> list[int]:
    return [each.number for each in groups]


def test_groups_that_are_accepted_out_of_order_are_trained_on_as_they_were_reported() -> None:
    accepted = AcceptedGroups(map(group, (7, 2, 5)))
    assert numbers(accepted.report(1, 2)) == [2, 5]
    accepted.add(group(1))
    accepted.add(group(3))
    accepted.take_reported()
    assert numbers(accepted.report(2, 2)) == [1, 3], "2 and 5 are in the batch before"
    assert numbers(accepted.of({2, 5})) == [2, 5]
    accepted.trained({2, 5}, 1)
    assert numbers(accepted.every()) == [1, 3, 7]
    accepted.trained({1, 3}, 2)
    accepted.take_reported()
    assert (numbers(accepted.every()), len(accepted)) == ([7], 1), "what was trained on is not taken"


def test_a_group_that_is_sampled_anew_is_in_no_batch() -> None:
    accepted = AcceptedGroups(map(group, range(3)))
    accepted.report(1, 2)
    accepted.remove(1)
    assert numbers(accepted.every()) == [0, 2]
    accepted.take_reported()
    assert [number for number, _ in accepted.waiting()] == [2]


def test_whatever_the_order_each_group_is_in_one_batch() -> None:
    for seed in range(50):
        draw, accepted, trained = random.Random(seed), AcceptedGroups(), list[int]()
        order = list(range(60))
        draw.shuffle(order)
        batches: list[list[int]] = []
        for number in order:
            accepted.add(group(number))
            if len(accepted) > draw.randint(4, 7):
                accepted.take_reported()
                iteration = len(trained) // 4 + len(batches) + 1
                batches.append(numbers(accepted.report(iteration, 4)))
            while len(batches) > draw.randint(1, 3):
                batch, iteration = batches.pop(0), len(trained) // 4 + 1
                assert numbers(accepted.of(set(batch))) == batch
                accepted.trained(set(batch), iteration)
                trained += batch
        assert len(trained) == len(set(trained))
        assert not set(trained) & set(numbers(accepted.every()))
        assert len(trained) + len(accepted.every()) == 60
