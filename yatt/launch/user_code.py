"""Checks of the user's Python files before anything starts."""

import symtable
from pathlib import Path

from yatt.config.schema import AlgorithmSection, GenRMSection, RewardSection, RunConfig
from yatt.errors import ConfigError
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
    try:
        names = symtable.symtable(path.read_text(), str(path), "exec").get_symbols()
    except OSError as error:
        raise ConfigError(f"algorithm.path: {path}: {error.strerror}.") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"algorithm.path: {path}: {error}.") from error
    bound = {name.get_name() for name in names if name.is_assigned() or name.is_imported()}
    if section.factory not in bound:
        raise ConfigError(f"algorithm.factory: {path} defines no function {section.factory}.")
