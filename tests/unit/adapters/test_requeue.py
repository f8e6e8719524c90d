"""What Slurm says about a start, read."""

import pytest

from yatt.adapters.slurm.requeue import start_state
from yatt.core.attempts.deadman import Job


@pytest.mark.parametrize(
    ("state", "exit_code", "said"),
    [
        ("RUNNING", "0:0", Job.SAME),
        ("COMPLETING", "0:0", Job.OVER),  # cancelled, out of time, preempted: its steps are being ended
        ("COMPLETING", "0:15", Job.OVER),
        ("COMPLETING", "75:0", Job.OVER),
        ("COMPLETING", "0:9", Job.DIED),
        ("FAILED", "0:9", Job.DIED),
        ("FAILED", "137:0", Job.DIED),  # a template's shell around the launcher
        ("FAILED", "143:0", Job.OVER),
        ("FAILED", "255:0", Job.OVER),
        ("FAILED", "1:0", Job.OVER),
        ("OUT_OF_MEMORY", "0:125", Job.DIED),
        ("CANCELLED", "0:9", Job.OVER),
        ("PENDING", "0:9", Job.OVER),
        ("COMPLETING", "", Job.OVER),
    ],
)
def test_a_killed_batch_process_is_told_from_every_other_end(state: str, exit_code: str, said: Job) -> None:
    fields = {"JobState": f"{state} Reason=None", "Restarts": "2", "ExitCode": exit_code}
    assert start_state([fields], 2) is said
    assert start_state([{**fields, "Restarts": "3"}], 2) is Job.OVER


def test_no_answer_is_not_the_end() -> None:
    assert start_state(None, 0) is Job.UNKNOWN
    assert start_state([], 0) is Job.OVER
