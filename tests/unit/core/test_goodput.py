"""Where a run's wall time went."""

import pytest

from yatt.core.goodput import AttemptSpan, PhaseSpan, goodput, goodput_share, gpu_seconds, running_share


def attempt(begin_s, end_s, resumed, *phases):
    spans = tuple(PhaseSpan(phase=p, iteration=i, begin_s=b, end_s=e) for p, i, b, e in phases)
    return AttemptSpan(begin_s=begin_s, end_s=end_s, resumed=resumed, phases=spans)


def spent(attempts):
    return {name: seconds for name, seconds in goodput(attempts).items() if seconds}


def test_each_phase_has_its_category_and_they_add_up_to_the_wall_time():
    run = attempt(
        0, 100, 0,
        ("join", 0, 1, 20), ("build", 0, 20, 30), ("publish", 0, 30, 31), ("sync", 0, 31, 33),
        ("validate", 0, 33, 35), ("rollout", 1, 35, 60), ("score", 1, 60, 70), ("train", 1, 70, 85),
        ("save", 1, 85, 90), ("publish", 1, 90, 94), ("sync", 1, 94, 98),
    )  # fmt: skip
    assert spent([run]) == {
        "start-up": 32, "validation": 2, "sampling": 25, "scoring": 10, "training": 15,
        "checkpoint": 5, "weight transfer": 8, "other": 3,
    }  # fmt: skip
    assert goodput_share(goodput([run])) == pytest.approx(0.5)


def test_iterations_that_are_done_again_and_later_start_ups_are_lost_and_the_queue_is_not_running():
    first = attempt(0, 50, 0, ("build", 0, 0, 10), ("rollout", 1, 10, 20), ("rollout", 2, 20, 50))
    second = attempt(80, 130, 1, ("build", 0, 80, 100), ("rollout", 2, 100, 130))
    assert spent([first, second]) == {
        "start-up": 10, "sampling": 10 + 30, "lost to restarts": 30 + 20, "not running": 30,
    }  # fmt: skip


def test_work_is_lost_also_when_the_attempt_after_the_next_one_goes_further_back():
    first = attempt(0, 10, 0, ("rollout", 5, 0, 10))
    second = attempt(10, 20, 5, ("rollout", 6, 10, 20))
    third = attempt(20, 30, 3, ("rollout", 4, 20, 30))
    assert spent([first, second, third]) == {"lost to restarts": 20, "sampling": 10}


def test_an_attempt_that_never_got_to_its_checkpoint_takes_nothing_from_the_one_before():
    first = attempt(0, 10, 0, ("rollout", 1, 0, 10))
    second = attempt(10, 15, None, ("join", 0, 10, 15))
    assert spent([first, second]) == {"sampling": 10, "lost to restarts": 5}


def test_clocks_that_disagree_between_hosts_never_give_negative_time():
    first = attempt(0, 10, 0, ("rollout", 1, 0, 10))
    second = attempt(9, 20, 1, ("rollout", 2, 9, 20))
    assert spent([first, second]) == {"sampling": 21}


def test_gpu_seconds_are_those_of_attempts_and_the_queue_costs_none():
    first = attempt(0, 50, 0, ("rollout", 1, 10, 40))
    second = attempt(80, 130, 1, ("rollout", 2, 80, 130))
    assert gpu_seconds([first, second], [8, 4]) == 50 * 8 + 50 * 4
    assert running_share(goodput([first, second])) == pytest.approx(0.8)


def test_nothing_ran_yet():
    assert goodput_share(goodput([])) == 0
