"""The user's environment: `step(text, episode)` answers one turn of the policy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yatt.config.sections.environment import EnvironmentSection
from yatt.records.episode import ENVIRONMENT
from yatt.reward.functions import RewardFunction, call_function, load_function

MOST_CHARACTERS = 1 << 20
"""Longest answer; it is tokenised by the controller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What an environment knows of a sample.

    Args:
        prompt: the prompt as text.
        turns: role and text of all turns after the prompt; the last one is the policy's, `assistant`.
        row: the data row as it was read; ground_truth, data_source and extra_info are from it.
        kwargs: `environment.kwargs` of the run file.
    """

    prompt: str
    turns: tuple[tuple[str, str], ...]
    data_source: str
    ground_truth: Any
    extra_info: Any
    row: dict[str, Any]
    kwargs: dict[str, Any]


def load_environment(section: EnvironmentSection) -> RewardFunction:
    """Loads the function.

    Raises:
        ConfigError: the file cannot be loaded, or has no such function.
    """
    path = Path(section.path).absolute()
    return RewardFunction(
        name=ENVIRONMENT,
        call=load_function(path, section.function, ENVIRONMENT),
        place=f"{section.path}:{section.function}",
        path=path,
        style="environment",
        kwargs=dict(section.kwargs),
        timeout_s=section.timeout_s,
    )


async def call_step(function: RewardFunction, episode: Episode) -> str | None:
    """Returns the answer to the last turn, None if the episode ends.

    Raises:
        ValueError: the function returned something else, or too long a text.
        Exception: as in `call_function`.
    """
    answer = await call_function(function, {"text": episode.turns[-1][1], "episode": episode}, None)
    if answer is None:
        return None
    if not isinstance(answer, str):
        raise ValueError(
            f"it must return the answer as text, or None at the end, not {type(answer).__name__}"
        )
    if len(answer) > MOST_CHARACTERS:
        raise ValueError(f"its answer has {len(answer)} characters; {MOST_CHARACTERS} is the most")
    return answer
