"""Loads a user's function in a separate process, to find mistakes before a run starts."""

from pathlib import Path

from yatt.adapters.trial import answer_trial, run_trial
from yatt.reward.functions import load_function


def try_function(path: Path, name: str, key: str, *, must_be_async: bool, limit_s: float) -> None:
    """Loads the function in a child process.

    Args:
        key: key of the run file's entry, for messages.
        limit_s: longest time for loading.

    Raises:
        ConfigError: as in `load_function` and `run_trial`.
    """
    arguments = [str(path), name, key, must_be_async]
    run_trial("yatt.reward.trial", arguments, path=path, key=f"{key}.path", limit_s=limit_s)


def _check(path: str, name: str, key: str, must_be_async: bool) -> None:
    load_function(Path(path), name, key, must_be_async=must_be_async)


if __name__ == "__main__":
    answer_trial(_check)
