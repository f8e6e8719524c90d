"""Simulated batches and iterations: conservation, arithmetic, and the policy in them."""

import random
import statistics
from dataclasses import replace

import pytest

from yatt.core.gpus.batch_loop import BatchSample
from yatt.core.gpus.engine_model import EngineSpeed
from yatt.core.gpus.placement import ROLLOUT
from yatt.core.gpus.prediction import NEVER_S, BatchDemand, predicted_seconds
from yatt.core.gpus.tail import RoleSpeed
from yatt.forecast.time.groups import Workload
from yatt.forecast.time.iterations import colocated_iterations, partial_iterations
from yatt.forecast.time.sampling import (
    SWITCHING,
    BatchTrace,
    SimulatedBatch,
    SimulatedOutcome,
    SimulatedSetting,
)

JUDGE = "genrm:judge"
ROLES = {
    ROLLOUT: RoleSpeed(speed=EngineSpeed(16 / 1200, 1 / 1200), room=128, engines=4),
    JUDGE: RoleSpeed(speed=EngineSpeed(16 / 1760, 1 / 1760), room=128),
}
NUM_SLABS = 6


def draw(numbers: random.Random, _: int) -> BatchSample:
    tokens = min(max(numbers.lognormvariate(7.0, 0.8), 16), 8192)
    return BatchSample(tokens, {JUDGE: 600 + 0.15 * tokens})


def samples_of(seed: int, num: int = 512) -> list[BatchSample]:
    numbers = random.Random(seed)
    return [draw(numbers, 0) for _ in range(num)]


def simulated(
    split: dict[str, int], seed: int, *, is_dynamic: bool, switch_s: float = 15.0
) -> SimulatedOutcome:
    setting = SimulatedSetting(roles=ROLES, switch_s=15.0, is_dynamic=is_dynamic)
    return SimulatedBatch(setting, split, lambda _: ()).run(samples_of(seed))


def asking(questions: int) -> dict[str, RoleSpeed]:
    """The same roles, with so many questions about a completion."""
    return {**ROLES, JUDGE: replace(ROLES[JUDGE], questions=questions)}


@pytest.mark.parametrize(("num_judges", "questions"), [(1, 1), (3, 1), (5, 1), (1, 3), (4, 8)])
def test_no_token_is_lost_or_made_twice_though_slabs_move(num_judges: int, questions: int):
    split = {ROLLOUT: NUM_SLABS - num_judges, JUDGE: num_judges}
    setting = SimulatedSetting(roles=asking(questions), switch_s=15.0, is_dynamic=True)
    samples = samples_of(1)
    outcome = SimulatedBatch(setting, split, lambda _: ()).run(samples)
    assert outcome.tokens[ROLLOUT] == pytest.approx(sum(each.tokens for each in samples))
    assert outcome.tokens[JUDGE] == pytest.approx(sum(each.verdicts[JUDGE] for each in samples))
    assert len({slab for _, slab, _ in outcome.moves}) == len(outcome.moves)  # none moves on
    assert outcome.sampled_s <= outcome.seconds


def test_one_completion_takes_its_steps_and_those_of_its_verdict():
    setting = SimulatedSetting(roles=ROLES, switch_s=1.0)
    outcome = SimulatedBatch(setting, {ROLLOUT: 1, JUDGE: 1}, lambda _: ()).run(
        [BatchSample(100, {JUDGE: 50})]
    )
    assert outcome.sampled_s == pytest.approx(100 * 17 / 1200)
    assert outcome.seconds == pytest.approx(100 * 17 / 1200 + 50 * 17 / 1760)


@pytest.mark.parametrize(("room", "seconds"), [(4, 120.0), (2, 140.0), (1, 160.0)])
def test_questions_about_a_completion_are_answered_side_by_side_as_far_as_there_is_room(room, seconds):
    """Engines make a token a second, whatever runs: three answers of 20 tokens after 100 s."""
    one = RoleSpeed(speed=EngineSpeed(1.0, 0.0), room=room)
    roles = {ROLLOUT: one, JUDGE: replace(one, questions=3)}
    split = {ROLLOUT: 1, JUDGE: 1}
    batch = SimulatedBatch(SimulatedSetting(roles=roles, switch_s=0.0), split, lambda _: ())
    assert batch.run([BatchSample(100, {JUDGE: 60})]).seconds == pytest.approx(seconds)
    demand = BatchDemand(completions=[100.0], verdicts={JUDGE: [60.0]}, num_samples=1)
    assert predicted_seconds(split, demand, roles, ROLLOUT, NEVER_S) == pytest.approx(seconds)
    assert predicted_seconds({ROLLOUT: 2, JUDGE: 0}, demand, roles, ROLLOUT, 0.0) <= seconds
    work = Workload(draw=lambda *_: BatchSample(100, {JUDGE: 60}), num_groups=1, group_size=1)
    (turned,) = colocated_iterations(SimulatedSetting(roles=roles, switch_s=0.0), 1, work, 1, 0)
    assert turned.seconds == pytest.approx(seconds)


@pytest.mark.parametrize("num_judges", [1, 2, 4])
def test_predictions_are_near_what_is_simulated(num_judges: int):
    split = {ROLLOUT: NUM_SLABS - num_judges, JUDGE: num_judges}
    samples = samples_of(3)
    demand = BatchDemand(
        completions=[each.tokens for each in samples],
        verdicts={JUDGE: [each.verdicts[JUDGE] for each in samples]},
        num_samples=len(samples),
    )
    fixed_s = simulated(split, 3, is_dynamic=False).seconds
    moving_s = simulated(split, 3, is_dynamic=True).seconds
    never_s = 1e9  # no backlog is worth such a switch
    assert predicted_seconds(split, demand, ROLES, ROLLOUT, never_s) == pytest.approx(fixed_s, rel=0.15)
    assert predicted_seconds(split, demand, ROLES, ROLLOUT, 15.0) == pytest.approx(moving_s, rel=0.15)


def test_moves_within_a_batch_repair_the_worst_split():
    split = {ROLLOUT: NUM_SLABS - 1, JUDGE: 1}
    fixed_s = simulated(split, 2, is_dynamic=False).seconds
    assert simulated(split, 2, is_dynamic=True).seconds < 0.6 * fixed_s


def test_every_dropped_group_is_replaced_and_the_batch_ends_with_the_last_it_needs():
    work = Workload(draw=draw, num_groups=32, group_size=8, pass_rate=0.5)
    setting = SimulatedSetting(roles=ROLES, switch_s=15.0)
    few = partial_iterations(
        setting, {ROLLOUT: 3, JUDGE: 3}, Workload(draw=draw, num_groups=32, group_size=8), 3, 5
    )
    many = partial_iterations(setting, {ROLLOUT: 3, JUDGE: 3}, work, 3, 5)
    busy_s = [sum(each.busy_s[JUDGE] for each in found) for found in (few, many)]
    assert busy_s[1] > 1.4 * busy_s[0]
    assert sum(each.seconds for each in many) > sum(each.seconds for each in few)
    assert all(0.7 < other.tokens / one.tokens < 1.4 for one, other in zip(few, many, strict=True))


def test_idle_shares_are_those_of_a_case_computed_by_hand():
    """Engines make a token a second: the completion takes 100 s on one of two slabs, its verdict 50 s."""
    roles = {role: RoleSpeed(speed=EngineSpeed(1.0, 0.0), room=1) for role in (ROLLOUT, JUDGE)}
    batch = SimulatedBatch(SimulatedSetting(roles=roles, switch_s=0.0), {ROLLOUT: 2, JUDGE: 1}, lambda _: ())
    outcome = batch.run([BatchSample(100, {JUDGE: 50})])
    assert outcome.busy_s == pytest.approx({ROLLOUT: 100, JUDGE: 50})
    assert outcome.held_s == pytest.approx({ROLLOUT: 300, JUDGE: 150})


def test_a_slab_that_switches_is_held_by_no_role():
    outcome = simulated({ROLLOUT: NUM_SLABS - 1, JUDGE: 1}, 2, is_dynamic=True)
    engines = {ROLLOUT: ROLES[ROLLOUT].engines, JUDGE: 1}
    slabs_s = sum(held_s / engines[role] for role, held_s in outcome.held_s.items())
    last_s = [min(15.0, outcome.seconds - at_s) for at_s, _, _ in outcome.moves]
    assert outcome.moves
    assert slabs_s + sum(last_s) == pytest.approx(NUM_SLABS * outcome.seconds)
    assert all(outcome.busy_s[role] <= held_s for role, held_s in outcome.held_s.items())


@pytest.mark.parametrize(("is_dynamic", "questions"), [(False, 1), (True, 1), (False, 3), (True, 3)])
def test_what_a_batch_cuts_keeps_its_tokens_and_each_token_is_made_once(is_dynamic: bool, questions: int):
    """Three batches, each cut when half of its samples are judged; the last one runs to its end."""
    setting = SimulatedSetting(roles=asking(questions), switch_s=15.0, is_dynamic=is_dynamic)
    left, made, done = samples_of(4), 0.0, 0
    for most in (256, 128, 10_000):
        judged = [0]

        def more(_: int, most: int = most, judged: list[int] = judged) -> tuple[()] | None:
            judged[0] += 1
            return None if judged[0] == most else ()

        batch = SimulatedBatch(setting, {ROLLOUT: 5, JUDGE: 1}, more)
        made += batch.run(left).tokens[ROLLOUT]
        done, left = done + judged[0], [*batch.unfinished().values()]
        assert all(0 < each.verdicts[JUDGE] <= 600 + 0.15 * 8193 for each in left), (
            "no answer is missing twice"
        )
    assert (done, left) == (512, [])
    assert made == pytest.approx(sum(each.tokens for each in samples_of(4)))


def test_a_trace_covers_the_whole_batch_of_each_slab():
    trace = BatchTrace()
    setting = SimulatedSetting(roles=ROLES, switch_s=15.0, is_dynamic=True)
    outcome = SimulatedBatch(setting, {ROLLOUT: 5, JUDGE: 1}, lambda _: (), trace).run(samples_of(2))
    switching = [
        (at_s, slab) for slab, each in trace.states.items() for at_s, what in each if what == SWITCHING
    ]
    assert sorted(switching) == sorted((at_s, slab) for at_s, slab, _ in outcome.moves)
    assert all(changes[0][0] == 0 for changes in trace.states.values())
    assert len(trace.states) == NUM_SLABS
    assert trace.counts[0] == (0.0, ROLLOUT, 512, 0)
    assert all(num == (0, 0) for num in [each[2:] for each in trace.counts[-2:]])


@pytest.mark.slow
def test_from_any_split_the_policy_is_soon_as_good_as_the_best_fixed_one():
    work = Workload(draw=draw, num_groups=64, group_size=8)
    fixed, dynamic = (SimulatedSetting(roles=ROLES, switch_s=15.0, is_dynamic=is_) for is_ in (False, True))

    def mean_s(setting: SimulatedSetting, num_judges: int) -> float:
        split = {ROLLOUT: NUM_SLABS - num_judges, JUDGE: num_judges}
        return statistics.mean(each.seconds for each in partial_iterations(setting, split, work, 4, 7)[1:])

    best_s = min(mean_s(fixed, num) for num in range(1, NUM_SLABS))
    for num in (1, NUM_SLABS - 1):
        assert mean_s(dynamic, num) <= 1.02 * best_s
    turns = colocated_iterations(fixed, NUM_SLABS, work, 4, 7)
    assert best_s < statistics.mean(each.seconds for each in turns[1:])
