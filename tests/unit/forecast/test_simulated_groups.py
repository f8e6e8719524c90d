"""The groups of simulated batches: which are opened, carried over, and awaited; and the tracks."""

import random
import statistics

import pytest

from yatt.core.gpus.batch_loop import BatchSample
from yatt.core.gpus.engine_model import EngineSpeed
from yatt.core.gpus.placement import ROLLOUT
from yatt.core.gpus.split import RoleSpeed
from yatt.forecast.time.comparing import track_times
from yatt.forecast.time.groups import SimulatedGroups, Workload
from yatt.forecast.time.iterations import colocated_iterations, partial_iterations
from yatt.forecast.time.sampling import SimulatedSetting

JUDGE = "genrm:judge"
ROLES = {role: RoleSpeed(speed=EngineSpeed(0.01, 0.001), room=64) for role in (ROLLOUT, JUDGE)}
SETTING = SimulatedSetting(roles=ROLES, switch_s=5.0)


def draw(numbers: random.Random, _: int) -> BatchSample:
    return BatchSample(min(max(numbers.lognormvariate(6.0, 1.0), 16), 4096), {JUDGE: 100.0})


def work(**changes: object) -> Workload:
    return Workload(**{"draw": draw, "num_groups": 16, "group_size": 4, **changes})


def test_settings_that_are_compared_sample_the_same_groups():
    few, many = (SimulatedGroups(work(oversample=over), 0, 3) for over in (1.0, 1.5))
    assert many.first()[: 16 * 4] == few.first()
    assert len(many.asked) == 24 * 4


def test_a_batch_is_full_with_exactly_its_target_and_counts_the_tokens_of_those():
    iterations = partial_iterations(SETTING, {ROLLOUT: 2, JUDGE: 1}, work(pass_rate=0.5), 4, 1)
    groups = SimulatedGroups(work(), 0, 1)
    whole = sum(each.tokens for each in groups.first())
    assert all(0.3 * whole < each.tokens < 3 * whole for each in iterations)
    fixed = partial_iterations(SETTING, {ROLLOUT: 2, JUDGE: 1}, work(), 1, 1)
    assert fixed[0].tokens == pytest.approx(whole)


def test_a_group_is_not_cut_more_often_than_its_age_allows():
    """One group is much longer than the others: it is cut once, and then awaited."""
    lengths = iter([5000.0] + [10.0] * 10_000)
    one = Workload(
        draw=lambda _, __: BatchSample(next(lengths), {}), num_groups=4, group_size=1, oversample=1.5,
        max_cuts=1,
    )  # fmt: skip
    alone = SimulatedSetting(roles={ROLLOUT: ROLES[ROLLOUT]}, switch_s=0.0)
    seconds = [each.seconds for each in partial_iterations(alone, {ROLLOUT: 1}, one, 3, 0)]
    assert seconds[0] < 1.0
    assert seconds[1] > 50.0
    assert seconds[2] < 1.0


@pytest.mark.parametrize("turns", [False, True])
def test_oversampling_does_not_wait_for_the_longest_completions(turns: bool):
    def mean_s(**changes: object) -> float:
        what = work(max_cuts=1, **changes)
        found = (
            colocated_iterations(SETTING, 3, what, 8, 2)
            if turns
            else partial_iterations(SETTING, {ROLLOUT: 2, JUDGE: 1}, what, 8, 2)
        )
        return statistics.mean(each.seconds for each in found[2:])

    assert mean_s(oversample=1.5) < 0.95 * mean_s(oversample=1.0)


def test_roles_that_take_turns_are_busy_with_all_tokens_of_a_batch():
    """With one sample at a time, an engine is busy for each token that it makes."""
    alone = {role: RoleSpeed(speed=EngineSpeed(1.0, 0.0), room=1) for role in (ROLLOUT, JUDGE)}
    what = work(num_groups=3, group_size=2)
    found = colocated_iterations(SimulatedSetting(roles=alone, switch_s=7.0), 1, what, 1, 5)[0]
    assert found.busy_s == pytest.approx({ROLLOUT: found.tokens, JUDGE: 600.0})
    assert found.seconds == pytest.approx(found.tokens + 600.0 + 2 * 7.0)
    assert found.switch_s == 14.0


def test_without_credit_sampling_and_training_take_turns():
    times = track_times([10.0, 12.0, 8.0], 9.0, ahead=0, max_age=1)
    assert [each.trained_s for each in times] == [19.0, 40.0, 57.0]
    assert {each.age for each in times} == {0}


@pytest.mark.parametrize(("train_s", "longer_s"), [(9.0, 10.0), (14.0, 14.0)])
def test_with_credit_an_iteration_takes_as_long_as_the_longer_track(train_s: float, longer_s: float):
    times = track_times([10.0] * 8, train_s, ahead=1, max_age=1)
    assert times[-1].trained_s - times[-2].trained_s == pytest.approx(longer_s)
    assert [each.age for each in times] == [0] + [1] * 7
    assert all(each.begin_s < each.sampled_s < each.trained_s for each in times)
