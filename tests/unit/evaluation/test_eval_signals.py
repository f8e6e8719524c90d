"""Which signals end an evaluation."""

import signal

from yatt.evaluation.host import ENDINGS, ending_signals


def test_under_nohup_the_end_of_the_terminal_ends_no_evaluation() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert ending_signals() == [signal.SIGTERM, signal.SIGINT]
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert ending_signals() == list(ENDINGS)
    finally:
        signal.signal(signal.SIGHUP, before)
