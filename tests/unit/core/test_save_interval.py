"""The suggested interval of saves: Young's formula, its limits, and what is certain."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from yatt.core.figures.goodput import RUN, AttemptSpan, Now, PhaseSpan
from yatt.core.figures.save_interval import (
    ENOUGH,
    UPPER_LIMIT,
    SaveCosts,
    measured_saves,
    suggested_interval,
    young_s,
)

SEEN = SaveCosts(num_saves=10, stall_s=2.0, upload_s=0.0, step_s=30.0, failures=4, running_s=14_400.0)


def seen(**changes):
    return SaveCosts(**{name: getattr(SEEN, name) for name in SaveCosts.__slots__} | changes)


@given(st.floats(0.01, 100), st.floats(100, 1e6), st.floats(0.2, 5))
def test_no_other_interval_loses_less(cost_s, mtbf_s, factor):
    def lost_share(interval_s):
        return cost_s / interval_s + interval_s / (2 * mtbf_s)

    best_s = young_s(cost_s, mtbf_s)
    assert lost_share(best_s) <= lost_share(best_s * factor) * (1 + 1e-9)


def test_the_suggestion_is_the_formula_with_the_observed_rate():
    found = suggested_interval(SEEN, every=40, every_s=0)
    assert (found.mtbf_s, found.is_assumed) == (3600.0, False)
    assert found.interval_s == pytest.approx(math.sqrt(2 * 2 * 3600)) == pytest.approx(120)
    assert (found.iterations, found.present_s, found.is_far) == (4, 1200.0, True)
    assert not suggested_interval(SEEN, every=8, every_s=0).is_far, (
        "240 s is off by the factor 2, not by more"
    )
    assert suggested_interval(SEEN, every=40, every_s=100).present_s == 100, "whichever comes first"
    assert suggested_interval(SEEN, every=0, every_s=0).present_s == math.inf
    assert suggested_interval(SEEN, every=0, every_s=0).is_far


def test_an_interval_is_no_shorter_than_an_upload_and_an_iteration():
    slow = suggested_interval(seen(upload_s=500.0), every=1, every_s=0)
    assert (slow.interval_s, slow.present_s, slow.is_far) == (500.0, 500.0, False), "saves are postponed"
    assert suggested_interval(seen(step_s=1000.0), every=1, every_s=0).iterations == 1


@pytest.mark.parametrize("failures", range(ENOUGH))
def test_few_failures_are_a_limit_of_the_rate_so_only_too_short_is_certain(failures):
    few = seen(failures=failures)
    found = suggested_interval(few, every=1, every_s=0)
    assert found.is_assumed and found.mtbf_s == pytest.approx(14_400 / UPPER_LIMIT[failures])
    assert found.is_far, "30 s is too short even if failures are as frequent as they may be"
    assert not suggested_interval(few, every=1000, every_s=0).is_far, "perhaps nothing ever fails"


def test_the_limits_are_those_of_poisson():
    for count, mean in enumerate(UPPER_LIMIT):
        at_most = sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(count + 1))
        assert at_most == pytest.approx(0.05, abs=1e-4)


def test_without_a_save_or_an_iteration_nothing_is_suggested():
    for changes in ({"num_saves": 0}, {"step_s": 0.0}, {"running_s": 0.0}):
        assert suggested_interval(seen(**changes), every=1, every_s=0) is None


def test_measurements_count_failures_that_lost_work_and_the_time_that_saves_took():
    def phase(name, begin_s, end_s, **more):
        return PhaseSpan(phase=name, iteration=1, begin_s=begin_s, end_s=end_s, **more)

    def run(begin_s, exit_code, *, resumed=0, is_over=True):
        phases = (
            phase("rollout", begin_s + 10, begin_s + 20, stall_s=1.0),
            phase("train", begin_s + 20, begin_s + 40), phase("save", begin_s + 40, begin_s + 42),
            phase("save", begin_s + 50, begin_s + 90, is_open=True),
        )  # fmt: skip
        return AttemptSpan(
            begin_s=begin_s, end_s=begin_s + 100, resumed=resumed, phases=phases, is_over=is_over,
            exit_code=exit_code, uploads_s=(4.0, 8.0),
        )  # fmt: skip

    codes = [1, None, 75, 2, 93, 0, -9]
    attempts = [run(200 * index, code) for index, code in enumerate(codes)]
    attempts += [run(5000, 1, resumed=None), run(6000, None, is_over=False)]
    found = measured_saves(attempts, Now(at_s=6100, doing=RUN))
    assert found.failures == 3, "1, None and -9: the last one still runs, the one before had begun nothing"
    assert measured_saves(attempts, None).failures == 4, "a run that is over was cut off"
    assert (found.num_saves, found.stall_s, found.upload_s) == (9, 3.0, 6.0)
    assert (found.step_s, found.running_s) == (30.0, 900.0)
    assert measured_saves([], None).num_saves == 0


def test_nothing_is_concluded_from_a_short_run_without_a_failure() -> None:
    def is_founded(failures: int, running_s: float) -> bool:
        return suggested_interval(
            replace(SEEN, failures=failures, running_s=running_s), every=8, every_s=0
        ).is_founded

    assert not is_founded(0, 79.0) and is_founded(0, 3600.0) and is_founded(1, 79.0)
