"""Who is declared lost, and that an observer that stood still itself blames nobody."""

import pytest
from hypothesis import given, strategies as st

from yatt.core.requests.liveness import AwakeClock, Watched, tick, watch, watch_again

PERIOD_S, LIMIT_S = 1.0, 10.0


def watching(*peers: int, now_s: float = 0.0) -> Watched:
    """All of them heard of just now."""
    return watch(frozenset(peers), now_s, grace_s=0.0)


def ticked(watched: Watched, now_s: float, *heard: int) -> tuple[Watched, list[int]]:
    return tick(watched, now_s, heard, period_s=PERIOD_S, limit_s=LIMIT_S)


def test_a_silent_peer_is_lost_once() -> None:
    watched = watching(1, 2, now_s=100.0)
    fallen = {}
    for second in range(1, 40):
        watched, lost = ticked(watched, 100.0 + second, 2)
        fallen.update(dict.fromkeys(lost, second))
    assert fallen == {1: 10}
    assert watched.silence_s(1) == 39.0
    assert watched.silence_s(7) == 0.0, "not under watch"


def test_before_its_first_word_a_peer_has_a_grace() -> None:
    for first_word_s, lost_s in ((None, 60), (20, 30)):
        watched, fallen = watch(frozenset({1}), 0.0, grace_s=50.0), {}
        for second in range(1, 100):
            spoke = [1] if first_word_s is not None and second == first_word_s + 1 else []
            watched, lost = ticked(watched, float(second), *spoke)
            fallen.update(dict.fromkeys(lost, second))
            if second in (10, 40) and first_word_s is None:
                assert watched.silence_s(1) == 0.0
        assert fallen == {1: lost_s}


def test_a_later_process_of_a_lost_peer_is_watched_from_its_beginning() -> None:
    watched = watching(1, 2)
    for second in range(1, 15):
        watched, _ = ticked(watched, float(second), 2)
    assert watched.lost == {1}
    watched, fallen = watch_again(watched, 1, grace_s=0.0), {}
    for second in range(15, 40):
        watched, lost = ticked(watched, float(second), 2)
        fallen.update(dict.fromkeys(lost, second))
    assert fallen == {1: 24}, "ten seconds after it began"


def test_who_was_declared_lost_stays_lost() -> None:
    watched = watching(1)
    for second in range(1, 12):
        watched, _ = ticked(watched, float(second))
    assert watched.lost == {1}
    for second in range(12, 30):
        watched, lost = ticked(watched, float(second), *[1] * (second == 12))
        assert not lost


def test_an_observer_that_stood_still_first_reads_what_was_said_meanwhile() -> None:
    watched = watching(1)
    for second in range(1, 10):
        watched, _ = ticked(watched, float(second))
    watched, lost = ticked(watched, 500.0)
    assert not lost, "its own tick came late"
    watched, lost = ticked(watched, 501.0, 1)
    assert not lost


@given(st.lists(st.floats(0.1, 60.0), min_size=1, max_size=60))
def test_nobody_that_speaks_between_every_two_ticks_is_ever_lost(steps_s: list[float]) -> None:
    watched, now_s = watching(1), 0.0
    for step_s in steps_s:
        now_s += step_s
        watched, lost = ticked(watched, now_s, 1)
        assert not lost


@given(st.lists(st.floats(0.9, 1.9), min_size=15, max_size=30))
def test_who_says_nothing_is_lost_in_time_however_ticks_fall(steps_s: list[float]) -> None:
    watched, now_s = watching(1), 0.0
    for step_s in steps_s:
        now_s += step_s
        watched, lost = ticked(watched, now_s)
        if lost:
            assert LIMIT_S <= now_s < LIMIT_S + 2 * PERIOD_S
            return
    raise AssertionError(f"not lost after {now_s:g} s")


def test_an_awake_clock_counts_no_standstill() -> None:
    clock = AwakeClock(real_s=10.0)
    for now_s in (10.1, 10.2, 21.7, 21.8):  # stood still for 11.5 s
        clock = clock.tick(now_s, period_s=0.1)
    assert clock.awake_s == pytest.approx(0.1 + 0.1 + 0.2 + 0.1)
    assert clock.at(21.85, period_s=0.1) == pytest.approx(clock.awake_s + 0.05)
    assert clock.at(30.0, period_s=0.1) == pytest.approx(clock.awake_s + 0.2)
    assert clock.at(21.0, period_s=0.1) == clock.awake_s, "it never goes back"
