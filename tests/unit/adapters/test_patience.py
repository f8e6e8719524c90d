"""Waiting for something that does not answer: again and again, bounded, and ended by a signal."""

import errno
import itertools
import threading

import pytest

from tests.runs import HANG_S
from yatt.adapters.files.patience import exit_code_of, until_answered, with_retries
from yatt.errors import ConfigError


class Down(Exception):
    pass


def failing(times: int):
    """Work that fails so many times, then gives 7."""
    calls = []

    def work() -> int:
        calls.append(1)
        if len(calls) <= times:
            raise Down(f"call {len(calls)}")
        return 7

    return work


def test_what_answers_at_once_is_given_without_a_word():
    said = []
    assert until_answered(failing(0), errors=(Down,), limit_s=HANG_S, say=said.append) == 7
    assert said == []


def test_what_answers_late_is_waited_for_and_that_is_said_once():
    said = []
    assert until_answered(failing(3), errors=(Down,), limit_s=HANG_S, say=said.append) == 7
    assert said == ["call 1"]


def test_the_wait_is_bounded_and_ends_with_the_last_error():
    with pytest.raises(Down, match="call"):
        until_answered(failing(10**6), errors=(Down,), limit_s=0.5)


def test_a_hanging_call_is_bounded():
    gate = threading.Event()
    try:
        with pytest.raises(TimeoutError):
            until_answered(gate.wait, errors=(Down,), limit_s=0.5)
    finally:
        gate.set()


def test_a_signal_ends_the_wait_also_while_a_call_hangs():
    gate, looks = threading.Event(), itertools.count()
    try:
        is_told = lambda: next(looks) > 3  # noqa: E731
        assert until_answered(gate.wait, errors=(Down,), limit_s=3600, is_told=is_told) is None
    finally:
        gate.set()


def test_another_error_is_no_reason_to_wait():
    def broken() -> int:
        raise KeyError("a defect")

    with pytest.raises(KeyError):
        until_answered(broken, errors=(Down,), limit_s=600)


def passing(in_words: bool, times: list[int]):
    """Fails once as a stale handle does, as it is or told as a mistake in a file."""
    times.append(1)
    if len(times) > 1:
        return "answer"
    error = OSError(errno.ESTALE, "stale")
    if in_words:
        raise ConfigError("cannot be read") from error
    raise error


@pytest.mark.parametrize("in_words", [False, True])
def test_a_passing_error_is_tried_again_in_whatever_words(in_words):
    times: list[int] = []
    assert with_retries(lambda: passing(in_words, times)) == "answer"
    assert len(times) == 2


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "none"), ConfigError("a mistake"), ValueError("x")])
def test_what_will_not_pass_is_told_at_once(error):
    times = []

    def work():
        times.append(1)
        raise error

    with pytest.raises(type(error)):
        with_retries(work)
    assert len(times) == 1


@pytest.mark.parametrize(("number", "code"), [(errno.EIO, 1), (errno.ENOSPC, 1), (errno.EACCES, 2)])
def test_what_may_pass_never_has_the_exit_code_of_a_mistake(number, code):
    error = ConfigError("config.yaml: cannot be read")
    error.__cause__ = OSError(number, "weather")
    assert exit_code_of(error) == code
    assert exit_code_of(ConfigError("rollout.n is 0")) == 2
