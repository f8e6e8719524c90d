"""The policy of the split, alone; tests/unit/forecast has it in simulated runs."""

import itertools
import os
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from yatt.core.gpus.engine_model import EngineSpeed
from yatt.core.gpus.placement import ROLLOUT
from yatt.core.gpus.prediction import NEVER_S, BatchDemand, predicted_seconds
from yatt.core.gpus.split import DEAD_BAND, UNDO_BAND, believed_s, choose_split
from yatt.core.gpus.tail import BatchTail, RoleSpeed, tail_moves

JUDGE, CRITIC = "genrm:judge", "genrm:critic"
ENGINE = RoleSpeed(speed=EngineSpeed(16 / 1200, 1 / 1200), room=128, engines=4)
SCORER = RoleSpeed(speed=EngineSpeed(16 / 1760, 1 / 1760), room=128)
ROLES = {ROLLOUT: ENGINE, JUDGE: SCORER}


def demand_of(
    seed: int, *, mean: float = 1500, num: int = 256, judges: tuple[str, ...] = (JUDGE,)
) -> BatchDemand:
    draw = random.Random(seed)
    lengths = [min(16 + draw.expovariate(1 / 1500), 8192) for _ in range(num)]
    return BatchDemand(
        completions=lengths,
        verdicts={role: [600 + 0.15 * tokens for tokens in lengths] for role in judges},
        num_samples=num,
    )


def speeds() -> st.SearchStrategy[RoleSpeed]:
    return st.builds(
        lambda turn, each, room, engines, least: RoleSpeed(
            speed=EngineSpeed(turn, each), room=room, engines=engines, least=least
        ),
        st.floats(0.001, 0.05), st.floats(0.0001, 0.01), st.integers(4, 128), st.integers(1, 4),
        st.integers(1, 2),
    )  # fmt: skip


@given(st.lists(speeds(), min_size=3, max_size=3), st.integers(0, 999), st.integers(6, 12))
@settings(max_examples=int(os.environ.get("YATT_FUZZ", "8")), deadline=None)
def test_a_choice_is_nearly_the_best_of_all_splits_and_within_bounds(
    found: list[RoleSpeed], seed: int, num: int
):
    roles = dict(zip((ROLLOUT, JUDGE, CRITIC), found, strict=True))
    demand = demand_of(seed, num=64, judges=(JUDGE, CRITIC))
    allowed = [
        dict(zip(roles, counts, strict=True))
        for counts in itertools.product(range(1, num), repeat=3)
        if sum(counts) == num and all(n >= r.least for n, r in zip(counts, found, strict=True))
    ]
    start = allowed[seed % len(allowed)]
    chosen = choose_split([start], demand, roles, ROLLOUT, 15.0)
    assert chosen in allowed
    turns = {ROLLOUT: num, JUDGE: 0, CRITIC: 0}
    either = choose_split([start], demand, roles, ROLLOUT, 15.0, may_turn=True)
    turns_s = believed_s(turns, demand, roles, ROLLOUT, 15.0)
    assert either in (chosen, turns)
    if turns_s < (1 - UNDO_BAND) * believed_s(chosen, demand, roles, ROLLOUT, 15.0):
        assert either == turns
    best_s = min(believed_s(each, demand, roles, ROLLOUT, 15.0) for each in allowed)
    assert believed_s(chosen, demand, roles, ROLLOUT, 15.0) <= best_s * (1 + 3 * DEAD_BAND)


def test_a_split_once_chosen_stays_for_batches_of_the_same_kind():
    split = choose_split([{ROLLOUT: 1, JUDGE: 15}], demand_of(0), ROLES, ROLLOUT, 15.0)
    assert split[ROLLOUT] > 1
    kept = [choose_split([split], demand_of(seed), ROLES, ROLLOUT, 15.0) == split for seed in range(1, 11)]
    assert sum(kept) >= 9


EVEN = BatchDemand(completions=[1500.0] * 64, verdicts={JUDGE: [800.0] * 64}, num_samples=1024, group_size=8)
"""Completions that all end together: nothing can be judged beside the rollout."""

TURNS = {ROLLOUT: 8, JUDGE: 0}


def test_a_batch_in_turns_takes_what_its_roles_take_one_after_the_other():
    """All slabs have 32 engines for 1,024 completions, and 8 for the verdicts, 128 at once: no rest waits."""
    sampling_s = 1500 * ENGINE.speed.token_s(1024 / 32)
    judging_s = 800 * SCORER.speed.token_s(1024 / 8)
    for switch_s in (0.0, 7.0):
        expected_s = sampling_s + judging_s + switch_s
        assert predicted_seconds(TURNS, EVEN, ROLES, ROLLOUT, switch_s) == pytest.approx(expected_s, rel=1e-6)


def test_roles_take_turns_where_that_is_faster_until_a_switch_takes_too_long():
    start = [{ROLLOUT: 7, JUDGE: 1}]
    assert choose_split(start, EVEN, ROLES, ROLLOUT, 5.0, may_turn=True) == TURNS
    split = choose_split(start, EVEN, ROLES, ROLLOUT, 5.0)
    assert split[JUDGE] > 1, "where they may not, the best split"
    later = choose_split([*start, TURNS], EVEN, ROLES, ROLLOUT, 200.0, may_turn=True)
    assert later[JUDGE] > 0, "the switch takes longer now"
    assert choose_split([TURNS], EVEN, ROLES, ROLLOUT, 5.0)[JUDGE] > 0, "an engine cannot be built any more"


def test_turns_are_taken_back_only_for_a_large_gain_or_later():
    near_s, split = 120.0, {ROLLOUT: 4, JUDGE: 4}
    turns_s, split_s = (believed_s(each, EVEN, ROLES, ROLLOUT, near_s) for each in (TURNS, split))
    assert DEAD_BAND < 1 - split_s / turns_s < UNDO_BAND
    before = [split, TURNS]
    assert choose_split(before, EVEN, ROLES, ROLLOUT, near_s, may_turn=True) == TURNS
    assert choose_split([TURNS] * 5, EVEN, ROLES, ROLLOUT, near_s, may_turn=True)[JUDGE] > 0


def test_a_ceiling_is_respected():
    roles = {ROLLOUT: ENGINE, JUDGE: RoleSpeed(speed=SCORER.speed, room=128, most=2)}
    assert choose_split([{ROLLOUT: 7, JUDGE: 1}], demand_of(0), roles, ROLLOUT, 1.0)[JUDGE] <= 2
    tail = tail_of({"a": 0, "b": 0}, split={JUDGE: 2})
    assert tail_moves(tail, roles, ROLLOUT) == []


def tail_of(running: dict[str, int], **more: object) -> BatchTail:
    given_ = {"num_waiting": 0, "backlog": {JUDGE: 1e6}, "split": {JUDGE: 1}, "switch_s": 1.0, **more}
    given_ = {"num_asked": dict.fromkeys(given_["backlog"], 10**9), **given_}
    return BatchTail(running=running, **given_)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tail", "moved"),
    [
        (tail_of({"a": 0, "b": 3, "c": 9}), ["a", "b"]),  # nine on the four engines of c: hardly slower
        (tail_of({"a": 0, "b": 3, "c": 9}, num_waiting=1), []),
        (tail_of({"a": 99, "b": 99, "c": 99}), []),  # not the tail
        (tail_of({"a": 0, "b": 3, "c": 9}, backlog={JUDGE: 1600.0}), []),  # a second of work
        (tail_of({"a": 0, "b": 3, "c": 9}, switch_s=1e6), []),
        (tail_of({"a": 0, "b": 3}, num_asked={JUDGE: 64}), []),  # half of the room: another takes none of it
        (tail_of({"a": 0}), []),  # the last slab stays
        (tail_of({}), []),
    ],
)
def test_slabs_move_only_in_the_tail_and_for_a_backlog(tail: BatchTail, moved: list[str]):
    moves = tail_moves(tail, ROLES, ROLLOUT)
    assert [(move.slab, move.role) for move in moves] == [(name, JUDGE) for name in moved]


def test_moves_stop_when_the_backlog_is_shared_out():
    tail = tail_of({f"s{i}": 0 for i in range(20)}, backlog={JUDGE: 1564 * 12.0}, switch_s=2.0)
    moves = tail_moves(tail, ROLES, ROLLOUT)  # each judge makes 1,564 tokens a second: 12 s for one of them
    assert len(moves) == 2  # 12 s and 6 s are more than 1.5 x 2 + 2 s, 4 s are not


def test_the_genrm_with_the_longest_backlog_is_helped_first():
    roles = {**ROLES, CRITIC: SCORER}
    tail = tail_of(
        {f"s{i}": 0 for i in range(3)}, backlog={JUDGE: 2e4, CRITIC: 5e4}, split={JUDGE: 1, CRITIC: 1}
    )
    assert [move.role for move in tail_moves(tail, roles, ROLLOUT)] == [CRITIC, CRITIC]


@pytest.mark.parametrize(("since", "is_kept"), [(1, True), (3, True), (4, False)])
def test_a_change_is_taken_back_only_for_a_large_gain_or_later(since: int, is_kept: bool):
    demand, splits = demand_of(0), [{ROLLOUT: 16 - num, JUDGE: num} for num in range(1, 16)]
    cost_s = [believed_s(split, demand, ROLES, ROLLOUT, 15.0) for split in splits]
    best = min(range(15), key=lambda i: cost_s[i])
    gains = [1 - cost_s[best] / each_s for each_s in cost_s]
    near = next(i for i in range(15) if DEAD_BAND < gains[i] < UNDO_BAND)
    before = [splits[best], *[splits[near]] * since]
    chosen = choose_split(before, demand, ROLES, ROLLOUT, 15.0)
    if is_kept:
        assert chosen == splits[near]
    else:
        assert believed_s(chosen, demand, ROLES, ROLLOUT, 15.0) < cost_s[near] * (1 - DEAD_BAND)


@pytest.mark.parametrize("start", [1, 1024, 2047])
def test_a_large_system_gets_the_ratio_of_a_small_one(start: int):
    small, large = (replace(demand_of(0), num_samples=num) for num in (128 * 8, 128 * 2048))
    best = min(
        range(1, 8), key=lambda num: believed_s({ROLLOUT: 8 - num, JUDGE: num}, small, ROLES, ROLLOUT, 15.0)
    )
    split = choose_split([{ROLLOUT: 2048 - start, JUDGE: start}], large, ROLES, ROLLOUT, 15.0)
    assert sum(split.values()) == 2048
    assert abs(split[JUDGE] / 256 - best) < 1
    assert predicted_seconds(split, large, ROLES, ROLLOUT, 15.0) <= 1.02 * predicted_seconds(
        {ROLLOUT: 2048 - 256 * best, JUDGE: 256 * best}, large, ROLES, ROLLOUT, 15.0
    )


def test_groups_that_are_dropped_are_paid_for_and_a_batch_ends_without_those_that_it_does_not_need():
    split = {ROLLOUT: 4, JUDGE: 4}
    few = replace(demand_of(0), num_samples=512, group_size=8)
    many = replace(few, num_samples=1024, kept=0.5)
    cost_s = [predicted_seconds(split, each, ROLES, ROLLOUT, NEVER_S) for each in (few, many)]
    assert cost_s[1] > 1.2 * cost_s[0]
    assert cost_s[1] < 1.2 * predicted_seconds(split, replace(many, kept=1.0), ROLES, ROLLOUT, NEVER_S)
