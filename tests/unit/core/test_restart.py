"""When another attempt is worth it."""

import pytest

from yatt.core.restart import AttemptEnd, decide


@pytest.mark.parametrize("code", [0, 2, 75, 93])
def test_ends_that_mean_something_are_final(code: int) -> None:
    decision = decide([AttemptEnd(code, 3)], max_without_progress=3)
    assert (decision.again, decision.exit_code) == (False, code)


def test_crashes_that_get_further_go_on() -> None:
    assert decide([AttemptEnd(1, n) for n in range(50)], max_without_progress=3).again


def test_crashes_over_the_same_checkpoint_end_with_93_and_say_so() -> None:
    ends = [AttemptEnd(1, 2), AttemptEnd(1, 5), AttemptEnd(1, 5)]
    assert decide(ends, max_without_progress=3).again
    last = decide([*ends, AttemptEnd(1, 5)], max_without_progress=3)
    assert (last.again, last.exit_code) == (False, 93)
    assert last.reason == "3 attempts in a row ended without a checkpoint after iteration 5"
