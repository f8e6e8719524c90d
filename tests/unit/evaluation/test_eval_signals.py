"""Which signals end an evaluation."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from yatt.evaluation.evaluate import ended_by_signals


def test_under_nohup_the_end_of_the_terminal_ends_no_evaluation() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        handler: Callable[..., Any] = lambda *_: None  # noqa: E731
        signal.signal(signal.SIGHUP, handler)
        with pytest.raises(SystemExit, match="yatt: ended by SIGHUP"), ended_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)
