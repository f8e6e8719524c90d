"""Checks of the user's Python files before anything starts."""

import symtable
from pathlib import Path

from yatt.config.operation import TRACKERS
from yatt.config.schema import AlgorithmSection, GenRMSection, LoggingSection, RewardSection, RunConfig
from yatt.errors import ConfigError
from yatt.obs.trackers.tracker import FACTORY
from yatt.records.episode import ENVIRONMENT
from yatt.reward.functions import is_builtin, load_reward
from yatt.reward.signature import EPISODE, expected_call
from yatt.reward.trial import try_function


def check_function(config: RunConfig, section: RewardSection | GenRMSection) -> None:
    """Checks a function: a built-in one is looked up here, a user's file is loaded in a separate process."""
    if isinstance(section, RewardSection) and is_builtin(section.path):
        load_reward(section)
        return
    key = "genrms" if isinstance(section, GenRMSection) else "rewards"
    try_function(
        Path(section.path).absolute(), section.function, f"{key}[{section.name}]",
        expected_call(config, section), limit_s=config.launch.start_timeout_s,
    )  # fmt: skip


def check_environment(config: RunConfig) -> None:
    """Loads the environment's function in a separate process.

    Raises:
        ConfigError: it cannot be loaded.
    """
    section = config.environment
    try_function(
        Path(section.path).absolute(), section.function, ENVIRONMENT, EPISODE,
        limit_s=config.launch.start_timeout_s,
    )  # fmt: skip


def check_algorithm(section: AlgorithmSection) -> None:
    """Reads the user's file, but does not import it: torch may be missing where a run is submitted."""
    path = Path(section.path).absolute()
    if section.factory not in _names_of(path, "algorithm.path"):
        raise ConfigError(f"algorithm.factory: {path} defines no function {section.factory}.")


def check_trackers(section: LoggingSection) -> None:
    """Reads the files of the user's trackers, but does not import them: only the follower needs libraries.

    Raises:
        ConfigError: one cannot be read, or lacks its function.
    """
    for tracker in section.trackers:
        if tracker not in TRACKERS:
            path = Path(tracker).absolute()
            if FACTORY not in _names_of(path, "logging.trackers"):
                raise ConfigError(f"logging.trackers: {path} defines no function {FACTORY}.")


def _names_of(path: Path, key: str) -> set[str]:
    """Returns the names that a user's file binds at its top level."""
    try:
        names = symtable.symtable(path.read_text(), str(path), "exec").get_symbols()
    except OSError as error:
        raise ConfigError(f"{key}: {path}: {error.strerror}.") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{key}: {path}: {error}.") from error
    return {name.get_name() for name in names if name.is_assigned() or name.is_imported()}
