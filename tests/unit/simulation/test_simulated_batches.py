"""Simulated batches and iterations: conservation, arithmetic, and the policy in them."""

import random
import statistics

import pytest

from yatt.core.engine_model import EngineSpeed
from yatt.core.placement import ROLLOUT
from yatt.core.split import BatchDemand, RoleSpeed, predict
from yatt.simulation.iterations import Workload, colocated_iterations, partial_iterations
from yatt.simulation.sampling import SimulatedBatch, SimulatedOutcome, SimulatedSample, SimulatedSetting

JUDGE = "genrm:judge"
ROLES = {
    ROLLOUT: RoleSpeed(speed=EngineSpeed(16 / 1200, 1 / 1200), room=128, engines=4),
    JUDGE: RoleSpeed(speed=EngineSpeed(16 / 1760, 1 / 1760), room=128),
}
NUM_SLABS = 6


def draw(numbers: random.Random, _: int) -> SimulatedSample:
    tokens = min(max(numbers.lognormvariate(7.0, 0.8), 16), 8192)
    return SimulatedSample(tokens, {JUDGE: 600 + 0.15 * tokens})


def samples_of(seed: int, num: int = 512) -> list[SimulatedSample]:
    numbers = random.Random(seed)
    return [draw(numbers, 0) for _ in range(num)]


def simulated(
    split: dict[str, int], seed: int, *, is_dynamic: bool, switch_s: float = 15.0
) -> SimulatedOutcome:
    setting = SimulatedSetting(roles=ROLES, switch_s=15.0, is_dynamic=is_dynamic)
    return SimulatedBatch(setting, split, lambda _: ()).run(samples_of(seed))


@pytest.mark.parametrize("num_judges", [1, 3, 5])
def test_no_token_is_lost_or_made_twice_though_slabs_move(num_judges: int):
    outcome = simulated({ROLLOUT: NUM_SLABS - num_judges, JUDGE: num_judges}, 1, is_dynamic=True)
    samples = samples_of(1)
    assert outcome.tokens[ROLLOUT] == pytest.approx(sum(each.tokens for each in samples))
    assert outcome.tokens[JUDGE] == pytest.approx(sum(each.verdicts[JUDGE] for each in samples))
    assert len({slab for _, slab, _ in outcome.moves}) == len(outcome.moves)  # none moves on
    assert outcome.sampled_s <= outcome.seconds


def test_one_completion_takes_its_steps_and_those_of_its_verdict():
    setting = SimulatedSetting(roles=ROLES, switch_s=1.0)
    outcome = SimulatedBatch(setting, {ROLLOUT: 1, JUDGE: 1}, lambda _: ()).run(
        [SimulatedSample(100, {JUDGE: 50})]
    )
    assert outcome.sampled_s == pytest.approx(100 * 17 / 1200)
    assert outcome.seconds == pytest.approx(100 * 17 / 1200 + 50 * 17 / 1760)


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
    assert predict(split, demand, ROLES, ROLLOUT, never_s) == pytest.approx(fixed_s, rel=0.15)
    assert predict(split, demand, ROLES, ROLLOUT, 15.0) == pytest.approx(moving_s, rel=0.15)


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
    mean = [statistics.mean(each.seconds for each in found) for found in (few, many)]
    assert mean[1] > 1.3 * mean[0]


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
