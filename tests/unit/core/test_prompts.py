"""Which prompts are opened, by whom and in which order."""

import random
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from yatt.core.samples.prompts import (
    LEAST_OPENED,
    MOST_AHEAD,
    PATIENCE,
    Acceptance,
    InOrder,
    PromptNumbers,
    Quota,
    RowSource,
    dealt_numbers,
    first_number,
    num_extra,
    opening_limit,
    row_order,
    sample_seed,
    share_of_shard,
)


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 200))
def test_shares_add_up_to_the_batch_and_belong_to_their_node(nodes: int, batch: int, first: int) -> None:
    shares = [share_of_shard(batch, shard=k, num_shards=nodes, first=first) for k in range(nodes)]
    trainer_nodes = Counter(number % nodes for number in range(first, first + batch))
    assert shares == [trainer_nodes[k] for k in range(nodes)]


@given(st.integers(1, 9), st.integers(0, 200))
def test_the_first_number_of_a_node_is_its_own_and_the_smallest(nodes: int, at_least: int) -> None:
    for node in range(nodes):
        number = first_number(node, nodes, at_least=at_least)
        assert number % nodes == node
        assert at_least <= number < at_least + nodes


LIVES = st.lists(
    st.tuples(st.integers(1, 5), st.lists(st.integers(0, 12), min_size=5, max_size=5)), max_size=5
)
"""Numbers of nodes, and how many prompts each of them opens in that life."""


@given(LIVES)
def test_no_number_is_passed_over_or_opened_twice_however_often_the_number_of_nodes_changes(lives) -> None:
    opened, shards = list[int](), [PromptNumbers(0, 1)]
    for num_shards, counts in [*lives, (1, [0] * 5)]:
        shards = [dealt_numbers(shards, shard=k, num_shards=num_shards) for k in range(num_shards)]
        for k, count in enumerate(counts[:num_shards]):
            for _ in range(count):
                number = shards[k].lowest
                assert [one.has(number) for one in shards] == [other == k for other in range(num_shards)]
                assert shards[k].first_left(1) <= {number}
                opened.append(number)
                shards[k] = shards[k].after(number)
    (last,) = shards
    left = {number for numbers in last.left for number in numbers}
    assert sorted([*opened, *left]) == list(range(last.own))
    assert last.first_left(99) == left and last.after(last.own - 1).left == ()


def test_left_over_numbers_are_dealt_evenly_and_cost_no_memory() -> None:
    far = [PromptNumbers(0, 2, 1 << 50), PromptNumbers(1, 2, 1)]
    shards = [dealt_numbers(far, shard=k, num_shards=3) for k in range(3)]
    sizes = [sum(map(len, shard.left)) for shard in shards]
    assert max(sizes) - min(sizes) <= 1 and sum(sizes) == (1 << 49) - 1
    assert [shard.lowest for shard in shards] == [1, 3, 5]


@given(st.integers(1, 50), st.integers(0, 3))
def test_every_row_comes_once_a_data_epoch(num_rows: int, data_epoch: int) -> None:
    order = row_order([RowSource(num_rows)], seed=1, data_epoch=data_epoch, shuffle=True)
    assert sorted(order) == list(range(num_rows))
    assert order == row_order([RowSource(num_rows)], seed=1, data_epoch=data_epoch, shuffle=True)


def test_data_epochs_and_seeds_differ_in_order() -> None:
    orders = {
        tuple(row_order([RowSource(20)], seed=s, data_epoch=e, shuffle=True)) for s in (0, 1) for e in (0, 1)
    }
    assert len(orders) == 4
    assert row_order([RowSource(3)], seed=0, data_epoch=0, shuffle=False) == [0, 1, 2]


def test_seeds_of_samples_differ() -> None:
    seeds = {
        sample_seed(0, number, index, retry) for number in range(20) for index in range(8) for retry in (0, 1)
    }
    assert len(seeds) == 320


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 8))
def test_a_quota_ends_filled_or_exhausted_and_never_above_its_limit(fate: list[bool], target: int) -> None:
    quota = Quota(target=target, limit=3 * target)
    for accepted in fate:
        quota = quota.opened(quota.num_to_open())
        assert quota.accepted + quota.dropped + quota.in_flight <= PATIENCE * quota.limit
        if not quota.in_flight:
            break
        quota = quota.resolved(accepted=accepted)
    if not quota.in_flight and not quota.num_to_open():
        assert quota.accepted >= target or quota.is_exhausted()


def test_without_drops_exactly_the_target_is_opened() -> None:
    quota = Quota(target=8, limit=80)
    quota = quota.opened(quota.num_to_open())
    assert quota.in_flight == 8
    assert quota.num_to_open() == 0


def test_oversampling_keeps_its_surplus_in_flight_until_the_target_is_met() -> None:
    quota = Quota(target=8, limit=80, extra=num_extra(8, 1.25))
    quota = quota.opened(quota.num_to_open())
    for accepted in range(8):
        assert (quota.accepted, quota.in_flight) == (accepted, 10 - accepted)
        assert quota.num_to_open() == 0, "a complete group is not replaced"
        quota = quota.resolved(accepted=True)
    assert quota.num_to_open() == 0 and not quota.is_exhausted()
    later = Quota(target=8, limit=80, extra=2, in_flight=quota.in_flight)
    assert later.num_to_open() == 8, "those that are carried over count"


@pytest.mark.parametrize(("oversample", "extra"), [(1.0, 0), (1.1, 1), (1.25, 2), (1.3, 3), (4.0, 24)])
def test_the_surplus_is_a_share_of_the_target(oversample: float, extra: int) -> None:
    assert num_extra(8, oversample) == extra


def test_complete_groups_count_before_they_are_scored_as_far_as_they_will_be_accepted() -> None:
    quota = Quota(target=8, accepted=4, in_flight=8)
    assert quota.is_expected_from(4) and not quota.is_expected_from(3)
    half = Quota(target=8, accepted=4, in_flight=8, acceptance=Acceptance(accepted=49, resolved=99))
    assert half.is_expected_from(8) and not half.is_expected_from(7)


def iterations_until_exhausted(
    share_accepted: float, *, iterations: int, target: int
) -> list[tuple[int, int]]:
    """(opened, carried over) of each iteration, groups resolving in random order."""
    draw, acceptance, carried, in_flight = random.Random(f"{share_accepted}/{target}"), Acceptance(), 0, 0
    found = []
    for _ in range(iterations):
        quota = Quota(
            target=target,
            accepted=carried,
            in_flight=in_flight,
            limit=opening_limit(target, 10.0),
            acceptance=acceptance,
        )
        opened = 0
        while quota.accepted < target:
            opened += quota.num_to_open()
            quota = quota.opened(quota.num_to_open())
            assert quota.in_flight <= max(MOST_AHEAD * target, in_flight)
            assert quota.in_flight, f"exhausted after {len(found)} iterations: {quota}"
            quota = quota.resolved(accepted=draw.random() < share_accepted)
        acceptance, carried, in_flight = quota.acceptance, quota.accepted - target, quota.in_flight
        found.append((opened, carried))
    return found


def test_a_hundred_iterations_of_dropped_groups_never_use_up_a_limit_of_one_iteration() -> None:
    for share_accepted in (0.3, 0.5, 0.9, 0.98):
        for target in (1, 8, 16):
            found = iterations_until_exhausted(share_accepted, iterations=100, target=target)
            opened = sum(number for number, _ in found)
            needed = 100 * target / share_accepted
            assert opened < 1.3 * needed + MOST_AHEAD * target, (share_accepted, target, opened, needed)
            assert max(carried for _, carried in found) <= target, "what is carried over is not a flood"


def test_a_small_share_lives_through_bad_luck() -> None:
    for share_accepted in (0.15, 0.21, 0.3):
        found = iterations_until_exhausted(share_accepted, iterations=5000, target=4)
        assert max(opened for opened, _ in found) > LEAST_OPENED or share_accepted == 0.3


@pytest.mark.parametrize("worked_before", [0, 500])
def test_what_is_never_accepted_any_more_is_given_up(worked_before: int) -> None:
    acceptance = Acceptance()
    for _ in range(worked_before):
        acceptance = acceptance.after(accepted=True)
    quota = Quota(target=4, limit=opening_limit(4, 10.0), acceptance=acceptance)
    while not quota.is_exhausted():
        quota = quota.opened(quota.num_to_open()).resolved(accepted=False)
    assert quota.dropped <= (PATIENCE if worked_before else 1) * quota.limit
    assert quota.accepted == 0


@given(st.lists(st.booleans(), min_size=8, max_size=8), st.integers(1, 3), st.integers(0, 300), st.randoms())
def test_a_patient_quota_is_exhausted_by_what_was_sampled_not_by_what_ended_first(
    fate: list[bool], target: int, failed_before: int, draw: random.Random
) -> None:
    """Group i is accepted if fate[i]; they end in any order, after any history."""
    acceptance = Acceptance()
    for _ in range(failed_before):
        acceptance = acceptance.after(accepted=False)
    quota = Quota(target=target, limit=2, is_patient=True, acceptance=acceptance)
    under_way: list[bool] = []
    num_opened = 0
    while not quota.is_exhausted() and quota.accepted < target:
        num = quota.num_to_open()
        under_way += fate[num_opened : num_opened + num]
        num_opened += num
        quota = quota.opened(num)
        quota = quota.resolved(accepted=under_way.pop(draw.randrange(len(under_way))))
    while under_way and quota.accepted < target:  # exhausted is looked at when nothing is under way
        quota = quota.resolved(accepted=under_way.pop())
    assert (quota.accepted >= target) == (sum(fate) >= target)


def test_the_acceptance_rate_forgets() -> None:
    acceptance = Acceptance()
    for _ in range(500):
        acceptance = acceptance.after(accepted=False)
    assert acceptance.rate < 0.02
    for _ in range(500):
        acceptance = acceptance.after(accepted=True)
    assert acceptance.rate > 0.95


@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["open", "accept", "drop", "ask"])), max_size=60)
)
def test_groups_in_order_are_those_with_no_unfinished_one_below(story):
    accepted, unfinished, top = {1, 4, 7}, {2, 5}, 7
    groups = InOrder(accepted, unfinished)
    for pick, what in story:
        if what == "open":
            top += 1 + pick % 3
            unfinished.add(top)
            groups.opened(top)
        elif what != "ask" and unfinished:
            number = sorted(unfinished)[pick % len(unfinished)]
            unfinished.discard(number)
            accepted |= {number} if what == "accept" else set()
            groups.resolved(number, accepted=what == "accept")
        if what == "ask":
            lowest = min(unfinished, default=1000)
            assert groups.num_in_order() == sum(number < lowest for number in accepted)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.floats(0, 3)), min_size=1, max_size=4),
    st.integers(0, 5),
    st.booleans(),
)
def test_a_data_epoch_has_each_row_as_often_as_its_source_weighs(sources, data_epoch, shuffle):
    found = [RowSource(num_rows, weight) for num_rows, weight in sources]
    order = row_order(found, seed=3, data_epoch=data_epoch, shuffle=shuffle)
    assert len(order) == sum(source.num_prompts for source in found)
    times, first = Counter(order), 0
    for source in found:
        rows = [times[row] for row in range(first, first + source.num_rows)]
        whole = int(source.weight)
        assert all(count in (whole, whole + 1) for count in rows)
        assert sum(count - whole for count in rows) == source.num_extra
        assert abs(sum(rows) - source.num_rows * source.weight) <= 0.5 + 1e-9
        first += source.num_rows
    assert set(order) <= set(range(first))


def test_another_part_of_a_source_is_drawn_in_each_data_epoch_and_the_same_after_a_resume():
    source = [RowSource(10), RowSource(40, 0.25)]
    drawn = [row_order(source, seed=0, data_epoch=epoch, shuffle=True) for epoch in range(4)]
    parts = [frozenset(row for row in order if row >= 10) for order in drawn]
    assert len(set(parts)) > 1 and all(len(part) == 10 for part in parts)
    assert all(set(range(10)) <= set(order) for order in drawn)
    assert drawn[2] == row_order(source, seed=0, data_epoch=2, shuffle=True)


def test_without_weights_the_order_is_that_of_one_file():
    whole = row_order([RowSource(30)], seed=5, data_epoch=1, shuffle=True)
    assert whole == row_order([RowSource(10), RowSource(20)], seed=5, data_epoch=1, shuffle=True)
