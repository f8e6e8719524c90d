"""The policy's prediction against the simulator, in workloads in which an earlier prediction was wrong."""

import functools
import itertools
import math
import random
import statistics
from dataclasses import dataclass

import pytest

from yatt.core.gpus.batch_loop import BatchSample
from yatt.core.gpus.engine_model import EngineSpeed
from yatt.core.gpus.placement import ROLLOUT
from yatt.core.gpus.prediction import NEVER_S, predicted_seconds
from yatt.core.gpus.split import believed_s, choose_split
from yatt.core.gpus.tail import RoleSpeed
from yatt.forecast.time.groups import Carried, SimulatedGroups, Workload
from yatt.forecast.time.iterations import batch_demand, colocated_iterations
from yatt.forecast.time.sampling import SimulatedBatch, SimulatedSetting

pytestmark = pytest.mark.slow
JUDGE, CRITIC = "genrm:judge", "genrm:critic"
WIDE = {
    ROLLOUT: RoleSpeed(speed=EngineSpeed(0.00333, 0.00021), room=128),
    JUDGE: RoleSpeed(speed=EngineSpeed(0.0091, 0.00057), room=128),
}
NARROW = {
    ROLLOUT: RoleSpeed(speed=EngineSpeed(16 / 1200, 1 / 1200), room=128, engines=4),
    JUDGE: RoleSpeed(speed=EngineSpeed(16 / 1760, 1 / 1760), room=128),
    CRITIC: RoleSpeed(speed=EngineSpeed(16 / 1760, 1 / 1760), room=128),
}
FEW_PLACES = {
    ROLLOUT: RoleSpeed(speed=EngineSpeed(0.0267, 0.00167), room=32, engines=2),
    JUDGE: RoleSpeed(speed=EngineSpeed(0.0079, 0.00099), room=32),
}


def draw(
    numbers: random.Random, _: int, *, mean: float, verdicts: dict[str, tuple[float, float]]
) -> BatchSample:
    tokens = min(max(numbers.lognormvariate(math.log(mean) - 0.32, 0.8), 16), 8192)
    return BatchSample(tokens, {role: base + each * tokens for role, (base, each) in verdicts.items()})


@dataclass(frozen=True)
class Case:
    """A workload; `splits` are (rollout, GenRMs ...) slabs, the best fixed one first."""

    roles: dict[str, RoleSpeed]
    work: Workload
    switch_s: float
    splits: tuple[tuple[int, ...], ...]
    num: int

    def split(self, counts: tuple[int, ...]) -> dict[str, int]:
        return dict(zip(self.roles, counts, strict=True))

    def simulated(self, counts: tuple[int, ...], *, is_dynamic: bool) -> float:
        setting = SimulatedSetting(
            roles=self.roles, switch_s=self.switch_s, is_dynamic=is_dynamic, num_late=self.demand.num_late
        )
        found = []
        for seed in range(self.num):
            groups = SimulatedGroups(self.work, 0, seed, self.warm)
            found.append(SimulatedBatch(setting, self.split(counts), groups.judged).run(groups.first()))
        return statistics.mean(each.seconds for each in found)

    @property
    def warm(self) -> Carried:
        """What is known of the groups that are kept before the first batch."""
        quota = SimulatedGroups(self.work, 0, 0).quota
        for number in range(400):
            is_kept = math.floor((number + 1) * self.work.pass_rate) > math.floor(
                number * self.work.pass_rate
            )
            quota = quota.opened(1).resolved(accepted=is_kept)
        return Carried(acceptance=quota.acceptance)

    @functools.cached_property
    def demand(self):
        groups = round(self.work.num_groups / self.work.pass_rate)
        whole = Workload(draw=self.work.draw, num_groups=groups, group_size=self.work.group_size)
        batches = [SimulatedGroups(whole, 0, seed).first() for seed in (100, 101)]
        return batch_demand(batches, self.work, [*self.roles])


def case(roles, mean, verdicts, groups, *, kept=1.0, switch_s=15.0, splits, num=1) -> Case:
    drawn = functools.partial(draw, mean=mean, verdicts=verdicts)
    work = Workload(draw=drawn, num_groups=groups, group_size=8, pass_rate=kept)
    return Case({role: roles[role] for role in (ROLLOUT, *verdicts)}, work, switch_s, splits, num)


CASES = {
    "verdicts that run cannot go to another engine": case(
        WIDE, 1500, {JUDGE: (825, 0)}, 512, splits=((14, 18), (18, 14), (20, 12))
    ),
    "two GenRMs, half of the groups dropped": case(
        NARROW, 1500, {JUDGE: (600, 0.15), CRITIC: (300, 0.1)}, 64, kept=0.5, num=8,
        splits=((6, 4, 2), (7, 3, 2), (8, 3, 1)),
    ),
    "more samples than places, 60% dropped": case(
        FEW_PLACES, 500, {JUDGE: (317, 0.3)}, 152, kept=0.4, switch_s=0.0, num=2,
        splits=((10, 9), (13, 6), (18, 1)),
    ),
    "few slabs, a long switch, 40% dropped": case(
        NARROW, 1500, {JUDGE: (600, 0.15)}, 128, kept=0.6, switch_s=30.0, num=2, splits=((4, 4), (6, 2)),
    ),
}  # fmt: skip


@functools.cache
def simulated_s(name: str, counts: tuple[int, ...], is_dynamic: bool) -> float:
    """Several tests need the same simulation."""
    return CASES[name].simulated(counts, is_dynamic=is_dynamic)


@pytest.mark.parametrize("name", CASES)
def test_a_fixed_split_takes_about_what_is_predicted(name):
    found = CASES[name]
    for counts in found.splits:
        predicted_s = predicted_seconds(found.split(counts), found.demand, found.roles, ROLLOUT, NEVER_S)
        assert predicted_s == pytest.approx(simulated_s(name, counts, False), rel=0.12), counts


@pytest.mark.parametrize("name", CASES)
def test_a_plan_with_moves_is_not_believed_to_be_much_faster_than_it_is(name):
    found = CASES[name]
    for counts in found.splits:
        seconds = believed_s(found.split(counts), found.demand, found.roles, ROLLOUT, found.switch_s)
        assert seconds > 0.85 * simulated_s(name, counts, True), counts


@pytest.mark.parametrize("name", CASES)
def test_the_split_that_is_chosen_is_as_good_as_the_best_fixed_one(name):
    found = CASES[name]
    best_s = simulated_s(name, found.splits[0], False)
    for counts in (found.splits[-1], found.splits[0]):
        split = choose_split([found.split(counts)], found.demand, found.roles, ROLLOUT, found.switch_s)
        chosen = tuple(split[role] for role in found.roles)
        assert simulated_s(name, chosen, True) <= 1.04 * best_s, (counts, chosen)


@functools.cache
def turned_s(name: str) -> float:
    """Simulated seconds of a batch in turns. The first one, which knows nothing of dropped groups, is left
    out; chance decides whether groups are missing after the first turns."""
    found = CASES[name]
    setting = SimulatedSetting(roles=found.roles, switch_s=found.switch_s)
    each = colocated_iterations(setting, sum(found.splits[0]), found.work, 1 + 2 * max(found.num, 3), 0)[1:]
    return statistics.mean(one.seconds for one in each) - found.switch_s  # the last switch is the trainer's


def turns_of(found: Case) -> dict[str, int]:
    return {**dict.fromkeys(found.roles, 0), ROLLOUT: sum(found.splits[0])}


@pytest.mark.parametrize("name", CASES)
def test_a_batch_in_turns_takes_about_what_is_predicted(name):
    found = CASES[name]
    seconds = predicted_seconds(turns_of(found), found.demand, found.roles, ROLLOUT, found.switch_s)
    assert seconds == pytest.approx(turned_s(name), rel=0.15)


@pytest.mark.parametrize(("name", "is_faster"), [([*CASES][0], True), ([*CASES][3], False)])  # noqa: RUF015
def test_roles_take_turns_just_where_the_simulation_is_faster(name, is_faster):
    """Where groups are dropped, turns take up to twice as long, whatever a switch takes."""
    found, chosen = CASES[name], {}
    for switch_s in (0.5, 40.0):
        before = [found.split(found.splits[0])]
        split = choose_split(before, found.demand, found.roles, ROLLOUT, switch_s, may_turn=True)
        chosen[switch_s] = split == turns_of(found)
    assert chosen == {0.5: is_faster, 40.0: False}
    num_switches = 1 if is_faster else 0
    least_s = min(simulated_s(name, counts, True) for counts in found.splits)
    assert (turned_s(name) - num_switches * (found.switch_s - 0.5) < least_s) == is_faster


def test_cases_differ_enough_that_a_wrong_choice_would_be_seen():
    for name, found in itertools.islice(CASES.items(), 3):
        worst_s, best_s = (simulated_s(name, found.splits[i], False) for i in (-1, 0))
        assert worst_s > 1.2 * best_s, name
