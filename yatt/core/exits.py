"""How processes end, in words."""

import signal


def describe_exit(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal has no name
        return f"killed by signal {-returncode}"
