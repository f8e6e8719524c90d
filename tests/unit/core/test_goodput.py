"""Where a run's wall time went."""

import pytest

from yatt.core.figures.goodput import (
    QUEUE,
    RUN,
    START_UP,
    AttemptSpan,
    Now,
    PhaseSpan,
    attempt_gpu_seconds,
    goodput_seconds,
    goodput_share,
    running_share,
    step_metrics,
)


def attempt(begin_s, end_s, resumed, *phases, **more):
    spans = tuple(
        each
        if isinstance(each, PhaseSpan)
        else PhaseSpan(phase=each[0], iteration=each[1], begin_s=each[2], end_s=each[3])
        for each in phases
    )
    return AttemptSpan(begin_s=begin_s, end_s=end_s, resumed=resumed, phases=spans, **more)


def spent(attempts, now=None):
    return {name: seconds for name, seconds in goodput_seconds(attempts, now).items() if seconds}


def test_each_phase_has_its_category_and_they_add_up_to_the_wall_time():
    run = attempt(
        0, 100, 0,
        ("join", 0, 1, 20), ("build", 0, 20, 30), ("publish", 0, 30, 31), ("sync", 0, 31, 33),
        ("validate", 0, 33, 35), ("rollout", 1, 35, 60), ("score", 1, 60, 70), ("train", 1, 70, 85),
        ("save", 1, 85, 90), ("publish", 1, 90, 94), ("sync", 1, 94, 98), committed=1, is_over=True,
    )  # fmt: skip
    assert spent([run]) == {
        "start-up": 33, "validation": 2, "rollout": 25, "score": 10, "train": 15,
        "saving": 5, "weight update": 8, "other": 2,
    }  # fmt: skip
    assert goodput_share(goodput_seconds([run])) == pytest.approx(0.5)


def test_parts_of_phases_are_switches_and_engines_that_wake_for_a_sync_are_part_of_the_publication():
    def with_parts(phase, begin_s):
        parts = {"enter_s": begin_s + 1, "act_s": begin_s + 3}
        return PhaseSpan(phase=phase, iteration=1, begin_s=begin_s, end_s=begin_s + 10, **parts)

    run = attempt(0, 20, 0, with_parts("train", 0), with_parts("sync", 10), committed=1)
    assert spent([run]) == {"switch": 3 + 1, "train": 7, "weight update": 2 + 7}


def test_back_pressure_counts_as_saving_and_loading_a_checkpoint_as_restore():
    build = PhaseSpan(phase="build", iteration=0, begin_s=0, end_s=10, restore_s=4)
    rollout = PhaseSpan(phase="rollout", iteration=4, begin_s=10, end_s=20, act_s=14, enter_s=12, stall_s=7)
    run = attempt(0, 20, 3, build, rollout, committed=4)
    assert spent([run]) == {"start-up": 6, "restore": 4, "saving": 7, "switch": 3}
    too_long = PhaseSpan(phase="train", iteration=4, begin_s=0, end_s=2, stall_s=9, restore_s=9)
    assert sum(goodput_seconds([attempt(0, 2, 0, too_long, committed=4)]).values()) == 2


def test_lost_iterations_are_wasted_with_all_that_belongs_to_them():
    first = attempt(
        0, 55, 0, ("build", 0, 0, 10), ("rollout", 1, 10, 20), ("rollout", 2, 20, 50), ("save", 2, 50, 55)
    )
    second = attempt(80, 130, 1, ("build", 0, 80, 100), ("rollout", 2, 100, 130))
    assert spent([first, second], Now(at_s=135, doing=RUN)) == {
        "start-up": 10 + 20, "rollout": 10 + 30, "wasted": 30 + 5, "not running": 25, "other": 5,
    }  # fmt: skip


def test_work_is_wasted_also_when_the_attempt_after_the_next_one_goes_further_back():
    first = attempt(0, 10, 0, ("rollout", 5, 0, 10))
    second = attempt(10, 20, 5, ("rollout", 6, 10, 20))
    third = attempt(20, 30, 3, ("rollout", 4, 20, 30), committed=4)
    assert spent([first, second, third]) == {"wasted": 20, "rollout": 10}


def test_before_anything_resumed_the_last_commit_decides():
    cut = attempt(0, 20, 0, ("rollout", 1, 0, 10), ("rollout", 2, 10, 20), committed=1)
    assert spent([cut]) == {"rollout": 10, "wasted": 10}, "the run is over"
    assert spent([cut], Now(at_s=20, doing=RUN)) == {"rollout": 20}, "it may still be committed"
    waits = {"rollout": 10, "wasted": 10, "queue": 5}
    assert spent([cut], Now(at_s=25, doing=QUEUE)) == waits
    second = attempt(20, 25, None, ("join", 0, 20, 25))
    assert spent([cut, second], Now(at_s=25, doing=RUN)) == {"rollout": 10, "wasted": 10, "start-up": 5}


def test_an_open_phase_lasts_until_its_attempt_ends():
    train = PhaseSpan(phase="train", iteration=1, begin_s=0, end_s=3, is_open=True)
    assert spent([attempt(0, 9, 0, train)]) == {"wasted": 9}, "as the launcher recorded its end"
    assert spent([attempt(0, 3, 0, train)], Now(at_s=50, doing=RUN)) == {"train": 50}
    second = attempt(20, 30, 0, ("rollout", 1, 20, 30), committed=1)
    assert spent([attempt(0, 3, 0, train), second]) == {"wasted": 3, "not running": 17, "rollout": 10}


def test_a_gap_is_a_queue_from_when_the_job_was_queued():
    first = attempt(0, 10, 0, ("rollout", 1, 0, 10), committed=1)
    second = attempt(100, 110, 1, ("rollout", 2, 100, 110), committed=2, queued_s=30)
    assert spent([first, second]) == {"rollout": 20, "not running": 20, "queue": 70}
    early = attempt(100, 110, 1, ("rollout", 2, 100, 110), committed=2, queued_s=-5)
    assert spent([first, early]) == {"rollout": 20, "queue": 90}
    assert spent([first], Now(at_s=14, doing=START_UP)) == {"rollout": 10, "start-up": 4}


def test_clocks_that_disagree_between_hosts_and_stale_attempts_count_no_time_twice():
    first = attempt(0, 10, 0, ("rollout", 1, 0, 10), committed=1)
    second = attempt(9, 20, 1, ("rollout", 2, 9, 20), committed=2)
    assert spent([first, second]) == {"rollout": 20}
    earlier = attempt(-5, 20, 1, ("rollout", 2, -5, 20), committed=2)
    assert spent([first, earlier]) == {"rollout": 20}
    assert spent([first], Now(at_s=3, doing=RUN)) == {"rollout": 10}, "this host's clock is slow"


def test_gpu_seconds_are_those_of_attempts_and_the_queue_costs_none():
    first = attempt(0, 50, 0, ("rollout", 1, 10, 40), committed=1)
    second = attempt(80, 130, 1, ("rollout", 2, 80, 130), committed=2)
    assert attempt_gpu_seconds([first, second], [8, 4]) == 50 * 8 + 50 * 4
    assert running_share(goodput_seconds([first, second])) == pytest.approx(0.8)


def test_nothing_ran_yet():
    assert goodput_share(goodput_seconds([])) == 0
    assert sum(goodput_seconds([], Now(at_s=5, doing=RUN)).values()) == 0


def test_the_metrics_of_an_iteration_add_up_to_its_time():
    found = step_metrics({"rollout": 4.0, "start-up": 1.0, "saving": 2.0}, 10.0)
    assert {name: value for name, value in found.items() if value} == {
        "goodput/rollout_s": 4.0, "goodput/start_up_s": 1.0, "goodput/saving_s": 2.0,
        "goodput/other_s": 3.0, "goodput/productive": 0.4,
    }  # fmt: skip
    assert found["goodput/train_s"] == found["goodput/validation_s"] == 0, "a column is never missing"
