"""Checks of the user's Python files before anything starts."""

import ast
from pathlib import Path

from yatt.config.schema import AlgorithmSection, GenRMSection, RewardSection, RunConfig
from yatt.errors import ConfigError
from yatt.reward.functions import is_builtin, load_reward
from yatt.reward.trial import try_function


def check_function(config: RunConfig, section: RewardSection | GenRMSection) -> None:
    """Checks a function: a built-in one is looked up here, a user's file is loaded in a separate process."""
    if isinstance(section, RewardSection) and is_builtin(section.path):
        load_reward(section)
        return
    is_genrm = isinstance(section, GenRMSection)
    try_function(
        Path(section.path).absolute(), section.function,
        f"{'genrms' if is_genrm else 'rewards'}[{section.name}]",
        must_be_async=is_genrm, limit_s=config.launch.start_timeout_s,
    )  # fmt: skip


def check_algorithm(section: AlgorithmSection) -> None:
    """Reads the user's file, but does not import it: torch may be missing where a run is submitted."""
    path = Path(section.path).absolute()
    try:
        body = ast.parse(path.read_text()).body
    except OSError as error:
        raise ConfigError(f"algorithm.path: {path}: {error.strerror}.") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"algorithm.path: {path}: {error}.") from error
    kinds = (ast.FunctionDef, ast.ClassDef)
    if not any(isinstance(each, kinds) and each.name == section.factory for each in body):
        raise ConfigError(f"algorithm.factory: {path} defines no function {section.factory}.")
