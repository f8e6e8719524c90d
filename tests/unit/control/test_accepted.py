"""Accepted groups: each is in one batch, and is kept until that batch is trained on."""

import random

from yatt.control.rollouts.accepted import AcceptedGroups
from yatt.control.rollouts.groups.groups import PromptGroup, new_group


def group(number: int) -> PromptGroup:
    return new_group(number, number, "", [1], 1)


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
