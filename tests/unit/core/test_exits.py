"""Ends of processes in words."""

from yatt.core.attempts.exits import describe_exit


def test_every_end_has_words():
    assert [describe_exit(code) for code in (0, 3, -9, -40)] == [
        "exit code 0", "exit code 3", "killed by SIGKILL", "killed by signal 40",
    ]  # fmt: skip
