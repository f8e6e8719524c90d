"""The model of an engine against steps that are counted one by one."""

import math
from collections.abc import Iterable

import pytest
from hypothesis import given, settings, strategies as st

from yatt.core.gpus.engine_model import EngineModel, EngineSpeed, Request

SPEED = EngineSpeed(0.02, 0.001)


def by_steps(arrivals: list[tuple[float, int]], speed: EngineSpeed, room: int) -> list[float]:
    """Ends of requests, with each step made: independent of the model."""
    now_s, waiting, running, ends = 0.0, list(arrivals), list[int](), list[float]()
    while waiting or running:
        if not running and waiting[0][0] > now_s:
            now_s = waiting[0][0]
        while waiting and waiting[0][0] <= now_s and len(running) < room:
            running.append(waiting.pop(0)[1])
        now_s += speed.step_s + speed.sequence_s * len(running)
        running = [left - 1 for left in running]
        ends += [now_s] * running.count(0)
        running = [left for left in running if left]
    return ends


def finish_times(arrivals: Iterable[tuple[float, float]], speed: EngineSpeed, room: int) -> list[float]:
    """When the requests of one engine end, in order of their ends.

    Args:
        arrivals: (second, tokens) of each request, in order of time.
    """
    engine, ends = EngineModel(speed, room), []
    for index, (second, tokens) in enumerate(arrivals):
        ends += [end_s for end_s, _ in engine.advance(second)]
        engine.add(Request(str(index), tokens), second)
    ends += [end_s for end_s, _ in engine.advance(math.inf)]
    return ends


def test_a_request_alone_takes_a_step_a_token():
    assert finish_times([(1.0, 100)], SPEED, room=4) == [pytest.approx(1.0 + 100 * 0.021)]


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 300)), min_size=1, max_size=40), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_requests_end_when_counted_steps_end_them(asked: list[tuple[float, int]], room: int):
    arrivals = sorted(asked)
    ends = finish_times(arrivals, SPEED, room)
    counted = by_steps(arrivals, SPEED, room)
    step_s = SPEED.token_s(room)  # of an arrival or an end within a step, the model sees the exact moment
    assert len(ends) == len(counted)
    for ours, theirs in zip(ends, counted, strict=True):
        assert abs(ours - theirs) <= step_s * (len(arrivals) + 1)
    assert abs(ends[-1] - counted[-1]) <= 0.02 * counted[-1] + step_s * len(arrivals)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=30), st.floats(0, 30), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_no_token_is_lost_or_made_twice_when_an_engine_is_emptied(lengths: list[int], at_s: float, room: int):
    engine = EngineModel(SPEED, room)
    for number, tokens in enumerate(lengths):
        engine.add(Request(str(number), tokens), 0.0)
    ended = engine.advance(at_s)
    left = engine.abort()
    assert engine.tokens + sum(request.tokens for request in left) == pytest.approx(sum(lengths))
    assert sorted([key for _, key in ended] + [request.key for request in left]) == sorted(
        map(str, range(len(lengths)))
    )
    assert engine.num_requests == 0 and engine.next_end_s() == math.inf


def ends_of(engine: EngineModel, lengths: list[int]) -> dict[str, float]:
    for number, tokens in enumerate(lengths):
        engine.add(Request(str(number), tokens), 0.0)
    return {key: second for second, key in engine.advance(math.inf)}


def test_several_engines_are_as_fast_as_each_with_its_share():
    """Four engines with the same requests each."""
    lengths = [100, 200, 300]
    one = ends_of(EngineModel(SPEED, 8), lengths)
    four = ends_of(EngineModel(SPEED, 32, engines=4.0), lengths * 4)
    for number in range(3):
        assert four[str(number)] == pytest.approx(one[str(number)])
    quarter = ends_of(EngineModel(SPEED, 2, engines=0.25), [100])
    assert quarter["0"] == pytest.approx(100 * SPEED.token_s(4))  # stands for four on one engine


def test_the_last_of_many_engines_have_more_than_the_mean():
    lengths = [100] * 30 + [400] * 2
    even, uneven = (EngineModel(SPEED, 64, engines=16.0, unevenness=each) for each in (0.0, 1.0))
    assert ends_of(uneven, lengths)["31"] > ends_of(even, lengths)["31"]
    alone_s = 100 * SPEED.token_s(2) + 300 * SPEED.token_s(1)
    assert ends_of(EngineModel(SPEED, 64, engines=16.0), lengths)["31"] == pytest.approx(alone_s)


def test_what_has_no_room_after_a_change_waits_and_keeps_its_tokens():
    engine = EngineModel(SPEED, 4)
    for number, tokens in enumerate([100, 200, 300, 400]):
        engine.add(Request(str(number), tokens), 0.0)
    half_s = 50 * SPEED.token_s(4)
    engine.advance(half_s)
    engine.resize(1.0, 2)
    assert (engine.num_running, engine.num_requests) == (2, 4)
    ended = engine.advance(math.inf)
    assert [key for _, key in ended] == ["0", "1", "2", "3"]
    assert engine.tokens == pytest.approx(1000)
    assert ended[0][0] == pytest.approx(half_s + 50 * SPEED.token_s(2))
