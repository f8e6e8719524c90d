"""Loads a user's function in a separate process, to find mistakes before a run starts."""

from pathlib import Path

from yatt.adapters.inputs.data_rows import raw_rows
from yatt.adapters.processes.trial import answer_trial, run_trial
from yatt.errors import ConfigError
from yatt.reward.functions import load_function
from yatt.reward.signature import ExpectedCall, check_parameters


def try_function(path: Path, name: str, key: str, call: ExpectedCall, *, limit_s: float) -> None:
    """Loads the function in a child process, and checks that it can be called.

    Args:
        key: key of the run file's entry, for messages.
        limit_s: longest time for loading.

    Raises:
        ConfigError: as in `load_function`, `check_parameters` and `run_trial`.
    """
    arguments = [str(path), name, key, call.is_async, list(call.given), call.columns_of]
    run_trial("yatt.reward.trial", arguments, path=path, key=f"{key}.path", limit_s=limit_s)


def _check(path: str, name: str, key: str, is_async: bool, given: list[str], columns_of: str) -> None:
    function = load_function(Path(path), name, key, must_be_async=is_async)
    columns = []
    if columns_of:
        try:
            row = next((raw for raw, _ in raw_rows(Path(columns_of))), {})
        except (ConfigError, OSError):
            return  # told by another check
        columns = [name for name in row if name not in (*given, "prompt", "completion")]
    check_parameters(function, [*given, *columns], f"{key}.function: {name} of {path}")


if __name__ == "__main__":
    answer_trial(_check)
