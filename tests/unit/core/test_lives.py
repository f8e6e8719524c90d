"""When an engine node's controller is started again."""

import signal

import pytest

from yatt.core.attempts.lives import FAILED_S, FIRST_S, MOST_S, SHORT_S, Lives
from yatt.errors import (
    EXIT_DO_NOT_RESTART,
    EXIT_EXCLUDED,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_USER_MISTAKE,
    EXIT_WILL_CONTINUE,
)


def pauses(codes_and_seconds: list[tuple[int, float]]) -> list[float]:
    """The pauses after lives that ended with these codes after these seconds."""
    now_s, found = 100.0, []
    lives = Lives(began_s=now_s)
    for code, lasted_s in codes_and_seconds:
        lives = lives.ended(code, now_s + lasted_s)
        assert lives.due_s is not None
        found.append(lives.due_s - now_s - lasted_s)
        now_s = lives.due_s
        lives = lives.started(lives.life + 1, now_s)
    assert lives.life == 1 + len(codes_and_seconds)
    return found


def test_a_killed_or_excluded_controller_is_started_again_soon() -> None:
    assert pauses([(-signal.SIGKILL, SHORT_S), (EXIT_EXCLUDED, SHORT_S)]) == [FIRST_S, FIRST_S]


def test_pauses_of_one_that_fails_at_once_grow_and_are_forgotten_after_a_long_life() -> None:
    found = pauses([(-signal.SIGKILL, 0.0)] * 12 + [(-signal.SIGKILL, SHORT_S)])
    assert found[:4] == [FIRST_S * 2**n for n in range(4)]
    assert found[-3:] == [MOST_S, MOST_S, FIRST_S]


def test_a_life_that_failed_by_itself_waits_longer_for_its_next_start() -> None:
    assert pauses([(EXIT_FAILED, 60.0)]) == [FAILED_S]


@pytest.mark.parametrize(
    "code", [EXIT_FINISHED, EXIT_USER_MISTAKE, EXIT_WILL_CONTINUE, EXIT_DO_NOT_RESTART, 137]
)
def test_an_end_that_is_the_attempts_is_the_last(code: int) -> None:
    assert Lives(began_s=0.0).ended(code, 60.0).due_s is None
