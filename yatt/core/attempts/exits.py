"""Descriptions of how processes end."""

import signal


def describe_exit(returncode: int) -> str:
    """Describes how a process ended."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal has no name
        return f"killed by signal {-returncode}"
