"""When a request that has used its tries is repeated: only while nobody is answered."""

from functools import partial

import pytest
from hypothesis import given, strategies as st

from yatt.core.requests.outage import Outage

LIMIT_S = 100.0


@pytest.mark.parametrize(
    ("answered_s", "silent_s", "since_s", "now_s", "waits"),
    [
        ([], [1.0], 1.0, 5.0, True),  # never heard
        ([0.0], [1.0], 1.0, 5.0, True),
        ([0.0], [1.0], 1.0, 101.5, False),  # too long
        ([0.0], [50.0], 50.0, 140.0, True),  # silence while nobody asked is no outage
        ([3.0], [1.0], 1.0, 5.0, False),  # others are answered
        ([], [], 1.0, 5.0, False),  # it was answered, though with an error
    ],
)
def test_cases(
    answered_s: list[float], silent_s: list[float], since_s: float, now_s: float, waits: bool
) -> None:
    outage = Outage(LIMIT_S)
    for at_s, note in sorted(
        [(each, outage.answered) for each in answered_s]
        + [(each, partial(outage.unanswered, request=1, is_down=True)) for each in silent_s],
        key=lambda pair: pair[0],
    ):
        note(at_s)
    assert outage.is_waited_for(since_s, now_s) is waits


@given(st.lists(st.tuples(st.floats(0.1, 30.0), st.booleans()), max_size=60), st.floats(0.0, 60.0))
def test_no_outage_is_waited_for_longer_than_the_limit_nor_beside_an_answer(
    tries: list[tuple[float, bool]], back_s: float
) -> None:
    outage, now_s, last_s, first_silent_s = Outage(LIMIT_S), 0.0, -1.0, None
    for pause_s, is_answered in tries:
        now_s += pause_s
        if is_answered:
            outage.answered(now_s)
            last_s, first_silent_s = now_s, None
        else:
            outage.unanswered(now_s, 1, is_down=True)
            first_silent_s = now_s if first_silent_s is None else first_silent_s
        since_s = now_s - back_s
        waits = outage.is_waited_for(since_s, now_s)
        assert not (waits and last_s >= since_s)
        assert waits == (first_silent_s is not None and last_s < since_s and now_s - first_silent_s < LIMIT_S)


def test_one_slow_request_is_no_outage_and_two_are() -> None:
    outage = Outage(LIMIT_S)
    for _ in range(5):
        outage.unanswered(1.0, 7, is_down=False)
    assert not outage.is_waited_for(1.0, 5.0)
    outage.unanswered(2.0, 8, is_down=False)
    assert outage.is_waited_for(1.0, 5.0)
    outage.answered(6.0)
    outage.unanswered(7.0, 8, is_down=False)
    assert not outage.is_waited_for(7.0, 9.0), "an answer forgets the others"
