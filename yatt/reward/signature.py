"""The arguments with which functions are called, compared with their signatures before a run starts."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from yatt.config.schema import GenRMSection, RewardSection, RunConfig
from yatt.errors import ConfigError

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
VERL_LISTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
TRL = ("prompts", "completions", "ground_truth", "data_source")
"""Beside these a TRL-style function gets every column of the rows."""

GENRM = (*VERL, "prompt", "client")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedCall:
    """How a function is called.

    Attributes:
        given: names of the arguments.
        columns_of: a data file whose columns are given too; empty: none.
    """

    given: tuple[str, ...]
    columns_of: str = ""
    is_async: bool = False


EPISODE = ExpectedCall(given=("text", "episode"))
"""The call of an environment's function."""


def expected_call(config: RunConfig, section: RewardSection | GenRMSection) -> ExpectedCall:
    """The calls of a section's function."""
    if isinstance(section, GenRMSection):
        return ExpectedCall(given=GENRM, is_async=True)
    if section.style == "trl":
        return ExpectedCall(given=(*TRL, *section.kwargs), columns_of=config.data.train_files[0])
    names = VERL if section.effective_scope == "sample" else VERL_LISTS
    return ExpectedCall(given=(*names, *section.kwargs))


def check_parameters(function: Callable[..., Any], given: Sequence[str], place: str) -> None:
    """Checks that a function can be called with these keyword arguments.

    Args:
        place: key and function, for the message.

    Raises:
        ConfigError: it does not take one, or needs another one.
    """
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return  # written in C: it says so at the first call
    kinds = inspect.Parameter
    by_name = {p.name for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
    called = f"it is called with {', '.join(given)}, by name"
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    if untaken := [] if takes_any else [name for name in given if name not in by_name]:
        raise ConfigError(f"{place} has no parameter {untaken[0]}; {called}. Add it, or **kwargs.")
    several = (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
    for each in parameters:
        is_given = each.name in by_name and each.name in given
        if each.default is kinds.empty and each.kind not in several and not is_given:
            raise ConfigError(
                f"{place} needs a parameter {each.name}, which it does not get; {called}. Give it a default, "
                "or write its value in kwargs."
            )
