"""Alarms: each planted defect gives its own alarm, healthy series give none, and what is seen ends."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from yatt.core.figures.alarms import STEP, Alarm, AlarmState, Begins, Change, Dropped, Ends, Rules, step
from yatt.core.figures.drop_counters import drops_message

RULES = Rules(iterations=5, kl_coef=0.001)
Row = dict[str, Any]


def healthy_row(draw: random.Random, iteration: int, *, on_policy: bool = False) -> Row:
    """As runs have them: rewards differ, a spike now and then, one bad batch now and then."""
    is_odd = iteration % 11 == 0  # once in eleven iterations something looks like a defect
    spike = 30.0 if iteration % 37 == 0 else 1.0
    reward = draw.choice((0.0, 1.0))
    return {
        STEP: iteration,
        "critic/rewards/mean": reward if is_odd else draw.uniform(0.1, 0.9),
        "critic/rewards/max": reward if is_odd else 1.0,
        "critic/rewards/min": reward if is_odd else 0.0,
        "training/flat_groups": 1.0 if is_odd else draw.uniform(0.0, 0.9),
        "critic/advantages/max": 0.0 if is_odd else draw.uniform(0.8, 2.5),
        "critic/advantages/min": 0.0 if is_odd else -draw.uniform(0.8, 2.5),
        "actor/pg_loss": draw.gauss(0, 1e-8 if on_policy and draw.random() < 0.9 else 0.02 * spike),
        "actor/kl_loss": 1e-6 * iteration**2 * draw.uniform(0.5, 2.0),
        "actor/ppo_kl": draw.gauss(0, 0.01),
        "actor/grad_norm": 0.0 if is_odd else draw.lognormvariate(-1.5, 1.0) * spike,
        "response_length/mean": draw.uniform(200, 800),
        "response_length/clip_ratio": 1.0 if is_odd else draw.uniform(0.0, 0.95),
        "response_length/masked_ratio": 0.0,
    }  # fmt: skip


def healthy(seed: int, count: int, *, on_policy: bool = False) -> list[Row]:
    draw = random.Random(seed)
    return [healthy_row(draw, iteration, on_policy=on_policy) for iteration in range(1, count + 1)]


def changes_of(rows: list[Row], rules: Rules = RULES) -> list[Change]:
    state, found = AlarmState(), []
    for row in rows:
        state, changes = step(state, row, rules)
        found += changes
    return found


def begun(rows: list[Row], rules: Rules = RULES) -> list[tuple[Alarm, int, int]]:
    return [(c.alarm, c.since, c.iteration) for c in changes_of(rows, rules) if isinstance(c, Begins)]


FLAT = {
    "critic/advantages/max": 0.0,
    "critic/advantages/min": 0.0,
    "actor/pg_loss": 0.0,
    "actor/grad_norm": 0.0,
}
LOW = {"critic/advantages/max": 2.0, "critic/advantages/min": -1.5}

DEFECTS: dict[str, tuple[Alarm, Callable[[int], Row]]] = {
    "a reward that is always 0": (Alarm.REWARD_FLAT, lambda _: {
        "critic/rewards/max": 0.0, "critic/rewards/min": 0.0, "training/flat_groups": 1.0, **FLAT}),
    "groups that differ only from each other": (Alarm.GROUPS_FLAT, lambda i: {
        "critic/rewards/max": 0.9, "critic/rewards/min": 0.1, "training/flat_groups": 1.0, **FLAT}),
    "a frozen policy": (Alarm.NO_GRADIENT, lambda _: {"actor/grad_norm": 0.0}),
    "a gradient that Adam cannot see": (Alarm.NO_GRADIENT, lambda i: {"actor/grad_norm": 3e-9 / (i + 1)}),
    "a gradient that is no number": (Alarm.NO_GRADIENT, lambda _: {"actor/grad_norm": math.nan}),
    "every completion cut": (Alarm.ALL_CUT, lambda _: {"response_length/clip_ratio": 1.0}),
    "every completion cut and masked": (Alarm.ALL_CUT, lambda _: {
        "response_length/clip_ratio": 1.0, "response_length/masked_ratio": 1.0, "actor/grad_norm": 0.0}),
    "a loss that is no number": (Alarm.LOSS_EXPLODED, lambda _: {
        "actor/pg_loss": math.nan, "actor/grad_norm": math.nan}),
    "a loss that grows": (Alarm.LOSS_EXPLODED, lambda i: {"actor/pg_loss": -40.0 * 2**i, **LOW}),
    "a KL that grows": (Alarm.LOSS_EXPLODED, lambda i: {"actor/kl_loss": 1e6 * 2**i, **LOW}),
    "a policy that jumps": (Alarm.POLICY_JUMPS, lambda _: {"actor/ppo_kl": 3.3, "actor/grad_norm": 1e-12}),
}  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), on_policy=st.booleans())
def test_a_healthy_run_of_200_iterations_has_no_alarm(seed, on_policy):
    assert changes_of(healthy(seed, 200, on_policy=on_policy)) == []


@pytest.mark.parametrize("name", DEFECTS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), start=st.integers(12, 60), k=st.integers(2, 8), on_policy=st.booleans())
def test_a_defect_gives_its_own_alarm_within_k_iterations_and_no_other(name, seed, start, k, on_policy):
    alarm, plant = DEFECTS[name]
    rows = healthy(seed, start + 40, on_policy=on_policy)
    # An odd healthy row just before would make the streak one longer.
    start += start % 11 == 1
    for index, row in enumerate(rows[start - 1 :]):
        if not row["critic/advantages/max"] or index == 0:
            row.update(healthy_row(random.Random(seed), 1))
            row[STEP] = start + index
        row.update(plant(index))
    rules = Rules(iterations=k, kl_coef=0.001)
    # An iteration whose loss explodes by itself (every 37th) explains the sign: it ends and adds nothing.
    exploded = [i for i in (37, 74) if start <= i < start + k]
    [(found, since, iteration)] = begun(rows, rules)
    assert (found, since) == (alarm, start)
    assert start + k - 1 <= iteration <= start + k - 1 + len(exploded)


@pytest.mark.parametrize(
    ("alarm", "sign"),
    [(Alarm.NO_GRADIENT, {"actor/grad_norm": 0.0}), (Alarm.POLICY_JUMPS, {"actor/ppo_kl": 9.0})],
)
def test_an_iteration_that_another_sign_explains_ends_no_alarm(alarm, sign):
    rows = [{STEP: i, **LOW, **sign} for i in range(1, 31)]
    rows[12]["actor/pg_loss"] = math.nan
    assert [(change.alarm, change.iteration) for change in changes_of(rows)] == [(alarm, 5)]


@pytest.mark.parametrize("name", DEFECTS)
def test_no_alarm_before_k_and_with_0_none_at_all(name):
    rows = [{**row, **DEFECTS[name][1](i)} for i, row in enumerate(healthy(3, 9))]
    assert begun(rows[:4]) == []
    assert begun(rows)[0][1:] == (1, 5)
    assert changes_of(rows, Rules(iterations=0)) == []


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_resumed_run_that_repeats_its_rows_is_in_the_same_state(data):
    """Any mixture of rows: fed in one go, or up to a checkpoint and then from there on again."""
    draw = random.Random(data.draw(st.integers(0, 2**32)))
    plants = [plant for _, plant in DEFECTS.values()]
    rows = [{**row, **draw.choice(plants)(0)} if draw.random() < 0.8 else row for row in healthy(1, 40)]
    whole = state = AlarmState()
    for row in rows:
        whole, _ = step(whole, row, RULES)
    cut = data.draw(st.integers(0, 40))
    for row in [*rows[:cut], *rows[:cut], *rows[cut:]]:
        state, _ = step(state, row, RULES)
    assert repr(state) == repr(whole)  # by repr: nan is not equal to itself


def test_an_alarm_ends_with_the_first_iteration_without_its_sign():
    rows = healthy(1, 10)
    for row in rows[:7]:
        row.update(DEFECTS["a reward that is always 0"][1](0))
    first, second = changes_of(rows)
    assert isinstance(first, Begins) and (first.since, first.iteration) == (1, 5)
    assert (
        "the reward was 0.000 for every completion in the last 5 iterations, since iteration 1"
        in first.message
    )
    assert "data.ground_truth_key" in first.message
    assert second == Ends(alarm=Alarm.REWARD_FLAT, iteration=8)


def test_a_flat_reward_that_changes_is_flat_groups():
    rows = healthy(1, 12)
    for index, row in enumerate(rows):
        row.update(DEFECTS["a reward that is always 0"][1](0))
        row["critic/rewards/max"] = row["critic/rewards/min"] = index % 2
    assert begun(rows) == [(Alarm.GROUPS_FLAT, 1, 5)]


def test_what_the_config_makes_normal_is_no_alarm():
    flat = [{**row, **DEFECTS["groups that differ only from each other"][1](0)} for row in healthy(1, 9)]
    for row in flat:
        row["actor/grad_norm"] = 1.0
    assert begun(flat, Rules(iterations=5, compares_groups=False)) == []
    cut = [{**row, **DEFECTS["every completion cut"][1](0)} for row in healthy(1, 9)]
    assert begun(cut, Rules(iterations=5, may_stop=False)) == []
    summed = [{**row, "actor/pg_loss": 60.0, "response_length/mean": 500.0, **LOW} for row in healthy(1, 9)]
    assert begun(summed) == [(Alarm.LOSS_EXPLODED, 1, 5)]
    assert begun(summed, Rules(iterations=5, sums_tokens=True)) == []


# Measured with the tiny test model and one prompt group a mini-batch, twelve iterations each:
# (policy loss, KL in the loss, gradient norm, KL within the iteration).
MEASURED = {
    0.1: (
        (0.00044, 0, 0.173, 0.28), (0.00021, 0, 0.0332, 3.559), (-0.02604, 0, 0.185, 3.326),
        (0, 0, 1.86e-8, 3.63), (0, 0, 3.38e-9, 2.541), (0, 0, 6.04e-12, 1.671), (0, 0, 5.28e-16, 1.216),
        (-0.01632, 0, 1.43e-14, 0.799), (-0.00811, 0, 8.48e-14, 0.555), (0, 0, 5.01e-15, 0.343),
        (0, 0, 3.49e-18, 0.231), (0, 0, 6.26e-16, 0.125),
    ),
    1.0: (
        (0.1793, 408437022.6, 302685.25, 17.02), (0, 485165152.0, 0, 14.58), (0, 485165152.0, 0, 16.23),
        (0, 485165152.0, 0, 13.74), (-0.00885, 480871655.1, 0, 13.78), (0, 485165152.0, 0, 12.03),
        (0, 485165152.0, 0, 9.5), (0, 485165152.0, 0, 3.26), (0, 485165152.0, 0, -1.31),
        (0, 485165152.0, 0, -4.14), (-0.02446, 481053582.9, 0, -6.52), (0, 485165152.0, 0, -7.49),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("lr", "expected"),
    [
        (0.1, [(Alarm.POLICY_JUMPS, 2, 6), (Alarm.NO_GRADIENT, 8, 12)]),
        (1.0, [(Alarm.LOSS_EXPLODED, 1, 5)]),
    ],
)
def test_a_learning_rate_that_is_too_large_is_seen_in_measured_series(lr, expected):
    names = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/ppo_kl")
    rows = [
        {
            STEP: i,
            **LOW,
            "critic/rewards/max": 1.0,
            "critic/rewards/min": 0.0,
            **dict(zip(names, row, strict=True)),
        }
        for i, row in enumerate(MEASURED[lr], start=1)
    ]
    assert begun(rows, Rules(iterations=5, kl_coef=0.1)) == expected


def test_dropped_groups_are_told_with_their_causes_at_once_and_then_now_and_then():
    rows = healthy(1, 60)
    for row in rows[2:]:
        row |= {"rollout/dropped_groups": 2.0, "rollout/failed_groups": 1.0, "reward/exact/failed": 3.0}
    rows[2]["genrm/a/b/unparsable"] = 4.0
    told = [change for change in changes_of(rows) if isinstance(change, Dropped)]
    assert [change.iteration for change in told] == [3, 23, 43]
    assert told[0].message.startswith(
        "iteration 3: 3 prompt groups were dropped, 2 because their rewards were all equal and 1 because a "
        "sample failed (reward 'exact' failed 3 times, GenRM 'a/b' gave 4 unreadable verdicts)."
    )
    assert told[1].message.startswith("iterations 4 to 23: 60 prompt groups were dropped")
    assert drops_message({"rollout/failed_groups": 1.0}, 2, 2).startswith(
        "iteration 2: 1 prompt group was dropped, 1 because a sample failed. "
    )


def test_a_validation_without_scores_is_an_alarm_at_once_until_the_next_validation_is_whole():
    share, state, told = "val-aux/letters/exact/failed_share", AlarmState(), []
    rows = [{}, {share: 0.5}, {}, {}, {share: 0.11}, {}, {share: 0.1}, {}]
    for iteration, row in enumerate(rows, start=1):
        state, changes = step(state, {STEP: iteration, **row}, Rules(iterations=5))
        told += changes
    assert [(type(each).__name__, each.alarm, each.iteration) for each in told] == [
        ("Begins", Alarm.VALIDATION_FAILED, 2), ("Ends", Alarm.VALIDATION_FAILED, 7)
    ]  # fmt: skip
    assert told[0].message.startswith(
        "more than 10% of the held-out completions had no score in iteration 2."
    )


def test_a_judge_that_cannot_be_read_is_an_alarm_at_once_and_explains_a_flat_reward():
    flat = {"critic/rewards/max": 0.0, "critic/rewards/min": 0.0, "actor/grad_norm": 0.0}
    judged = {"genrm/judge/asked": 256.0, "genrm/judge/unparsable": 200.0, "genrm/judge/truncated": 6.0}
    state, told = AlarmState(), []
    for iteration in range(1, 12):
        row = {STEP: iteration, **flat, **(judged if iteration < 9 else {"genrm/judge/asked": 256.0})}
        state, changes = step(state, row, Rules(iterations=3))
        told += [(type(each).__name__, each.alarm, each.iteration) for each in changes]
        if iteration == 1:
            assert "'judge' to 80% of the questions) in iteration 1." in changes[0].message
    assert told == [
        ("Begins", Alarm.JUDGE_UNREADABLE, 1), ("Ends", Alarm.JUDGE_UNREADABLE, 9),
        ("Begins", Alarm.REWARD_FLAT, 11),
    ]  # fmt: skip


@pytest.mark.parametrize(("asked", "unread", "is_alarm"), [(100, 20, False), (100, 21, True), (4, 4, False)])
def test_how_many_unreadable_answers_are_an_alarm(asked, unread, is_alarm):
    row = {STEP: 1, "genrm/a/b/asked": asked, "genrm/a/b/unparsable": unread}
    _, changes = step(AlarmState(), row, Rules(iterations=3))
    assert bool(changes) == is_alarm


PLACE = {"genrm/j/pairs": 100, "genrm/j/decided": 100}


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ({"contradictions": 41}, "contradicted itself in 41% of the pairs shown in both orders"),
        ({"contradictions": 40, "first_won": 50}, ""),
        ({"first_won": 66}, "preferred the first place in 66%"),
        ({"first_won": 34}, "preferred the second place in 66%"), ({"first_won": 64}, ""),
        ({"first_won": 19, "decided": 19, "pairs": 19, "contradictions": 19}, ""),
    ],
)  # fmt: skip
def test_a_judge_that_goes_by_the_place_is_an_alarm(counts, says):
    row = {**PLACE, "genrm/j/first_won": 50, **{f"genrm/j/{name}": count for name, count in counts.items()}}
    changes = changes_of([{STEP: i, **row} for i in range(1, 4)], Rules(iterations=3))
    assert [each.alarm for each in changes] == ([Alarm.JUDGE_PLACE] if says else [])
    assert all(says in each.message and "in the last 3 iterations" in each.message for each in changes)


@pytest.mark.parametrize(("confidence", "is_alarm"), [(0.69, True), (0.7, False)])
def test_a_judge_whose_soft_verdicts_say_little_is_an_alarm(confidence, is_alarm):
    """A function may have a number of this name, which is no judge's."""
    row = {"critic/score/j/confidence/mean": confidence, "critic/score/j/elsewhere/mean": 0.1}
    row["critic/score/function/confidence/mean"] = 0.0
    changes = changes_of([{STEP: i, **row} for i in range(1, 4)], Rules(iterations=3))
    assert [each.alarm for each in changes] == ([Alarm.JUDGE_UNSURE] if is_alarm else [])
    assert all("verdicts of 'j' (0.69)" in each.message for each in changes)


def growing(lengths: list[float], share: float) -> list[Row]:
    return [
        {
            STEP: i,
            "response_length/mean": length,
            "critic/score/j/longer_wins/mean": share,
            "critic/score/function/longer_wins/mean": 1.0,
            "rollout/groups": 4,
        }
        for i, length in enumerate(lengths, 1)
    ]


@pytest.mark.parametrize(
    ("lengths", "share", "is_alarm"),
    [
        ([100] * 8 + [130] * 8, 0.8, True),
        ([100] * 8 + [130] * 8, 0.75, False),
        ([100] * 8 + [119] * 8, 0.8, False),
        ([130] * 8 + [100] * 8, 0.8, False),
        ([60, *[100] * 12], 0.8, False),
    ],
)
def test_a_judge_that_likes_length_is_an_alarm_once_completions_grow(lengths, share, is_alarm):
    changes = changes_of(growing(lengths, share), Rules(iterations=3, judges=("j",)))
    assert [each.alarm for each in changes] == ([Alarm.JUDGE_LENGTH] if is_alarm else [])
    assert all("had the higher score: 'j' in 80% of the pairs" in each.message for each in changes)


def same_share(share: float, groups: int = 16) -> Row:
    return {
        "rollout/groups": groups,
        "critic/score/j/same/mean": share,
        "critic/score/function/same/mean": 1.0,
    }


@pytest.mark.parametrize(
    ("row", "alarms"),
    [
        (same_share(0.95), [Alarm.JUDGE_SAME]),
        (same_share(0.9), []),
        (same_share(1.0, groups=3), []),
        ({**same_share(1.0), "training/flat_groups": 1.0}, [Alarm.GROUPS_FLAT]),
        ({**same_share(1.0), "genrm/j/asked": 10, "genrm/j/unparsable": 3}, [Alarm.JUDGE_UNREADABLE]),
    ],
)
def test_a_judge_that_says_the_same_of_all_completions_is_an_alarm_unless_that_has_a_reason(row, alarms):
    changes = changes_of([{STEP: i, **row} for i in range(1, 4)], Rules(iterations=3, judges=("j",)))
    assert [each.alarm for each in changes] == alarms


@pytest.mark.parametrize("sign", [same_share(0.95), {**PLACE, "genrm/j/first_won": 90}])
def test_a_sign_of_a_judge_is_no_reason_for_a_gradient_of_zero(sign):
    changes = changes_of(
        [{STEP: i, "actor/grad_norm": 0.0, **sign} for i in range(1, 4)], Rules(iterations=3)
    )
    assert Alarm.NO_GRADIENT in [each.alarm for each in changes]


def same_in(same: int, groups: int, name: str = "right") -> Row:
    place = f"genrm/a/b/criterion/{name}"
    return {f"{place}/groups": groups, f"{place}/same": same}


@pytest.mark.parametrize(("same", "groups", "is_alarm"), [(16, 16, True), (15, 16, False), (3, 3, False)])
def test_a_criterion_that_never_differs_is_named(same, groups, is_alarm):
    """One is named as a counter of drops is, which says nothing of the judge."""
    row = {**same_in(same, groups), **same_in(groups - 1, groups, "truncated")}
    changes = changes_of([{STEP: i, **row} for i in range(1, 4)], Rules(iterations=3))
    assert [each.alarm for each in changes] == ([Alarm.JUDGE_CRITERION] if is_alarm else [])
    assert all("'right' of GenRM 'a/b' differed in no prompt group" in each.message for each in changes)


def test_another_criterion_in_each_iteration_is_no_streak():
    rows = [{STEP: i, **same_in(8, 8, f"c{i}")} for i in range(1, 6)]
    assert changes_of(rows, Rules(iterations=3)) == []


def test_a_row_without_numbers_gives_no_alarm():
    assert (
        changes_of([{STEP: i, "actor/grad_norm": None, "critic/rewards/max": None} for i in range(1, 9)])
        == []
    )
