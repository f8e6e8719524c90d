"""Loads the user's reward functions by path and name, and calls them in verl's or TRL's style.

verl: ``compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)`` returns a number
or a dict with `score`; its other numbers are metrics. TRL: ``fn(prompts, completions, **columns)`` returns a
list of one number. A GenRM's function is `async`, in verl's style, and also receives `prompt` and `client`.
"""

import asyncio
import functools
import inspect
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from yatt.adapters.user_module import load_module
from yatt.config.schema import GenRMSection, RewardSection, RunConfig
from yatt.errors import ConfigError, DeadlineExceeded
from yatt.reward.builtins import BUILTINS

if TYPE_CHECKING:
    from yatt.reward.genrm_client import GenRMClient

_BUILTIN = "builtin:"
MOST_SCORE = 1e9
"""Maximum absolute score. Above it, sums of rewards and their squares may not be finite in float32."""


CANCEL_S = 1.0
"""Longest time for an asynchronous function to end after it was cancelled."""


class CallStuck(DeadlineExceeded):
    """An asynchronous call that took too long and continues after it was cancelled.

    Attributes:
        task: the task in which it runs.
        limit_s: the function's time limit.
    """

    def __init__(self, message: str, task: "asyncio.Task[Any]", limit_s: float) -> None:
        super().__init__(message)
        self.task, self.limit_s = task, limit_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSample:
    """Inputs of a reward function; `row` is the data row as it was read."""

    prompt: str
    completion: str
    data_source: str
    ground_truth: Any
    extra_info: Any
    row: dict[str, Any]
    facts: dict[str, Any]
    """The sampler's `finish_reason`, `num_prompt_tokens`, `num_completion_tokens`, and
    `max_response_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """One loaded function and how to call it."""

    name: str
    call: Callable[..., Any]
    place: str
    """File and function, for messages."""

    path: Path | None
    """The user's file; None for a built-in function."""

    style: Literal["verl", "trl", "genrm"]
    kwargs: dict[str, Any]
    timeout_s: float
    limit_factor: int = 1
    """Multiplies `timeout_s` for an asynchronous call."""

    @property
    def is_async(self) -> bool:
        """Whether its calls must be awaited."""
        return is_async(self.call)


def is_builtin(path: str) -> bool:
    """Whether the path of a reward names a function that ships with yatt."""
    return path.startswith(_BUILTIN)


def load_rewards(config: RunConfig) -> dict[str, RewardFunction]:
    """Loads every function of the run file, by the name of its reward or GenRM.

    Raises:
        ConfigError: one of them cannot be loaded.
    """
    functions = {reward.name: load_reward(reward) for reward in config.rewards}
    return functions | {genrm.name: load_genrm_function(genrm) for genrm in config.genrms if genrm.path}


def load_reward(reward: RewardSection) -> RewardFunction:
    """Loads the function of one entry of `rewards`.

    Raises:
        ConfigError: the file, the function, or a module that the file imports, is missing.
    """
    key = f"rewards[{reward.name}]"
    if is_builtin(reward.path):
        name = reward.path.removeprefix(_BUILTIN)
        if name not in BUILTINS:
            raise ConfigError(f"{key}.path: no built-in {name!r}; there are {', '.join(sorted(BUILTINS))}.")
        call: Callable[..., Any] = BUILTINS[name]
        path: Path | None = None
    else:
        name, path = reward.function, Path(reward.path).absolute()
        call = load_function(path, name, key)
    return RewardFunction(
        name=reward.name,
        call=call,
        place=f"{reward.path}:{name}",
        path=path,
        style=reward.style,
        kwargs=dict(reward.kwargs),
        timeout_s=reward.timeout_s,
    )


def load_genrm_function(genrm: GenRMSection) -> RewardFunction:
    """Loads the function of an entry of `genrms` that has a path.

    Raises:
        ConfigError: as in `load_reward`, or the function is not async.
    """
    path = Path(genrm.path).absolute()
    call = load_function(path, genrm.function, f"genrms[{genrm.name}]", must_be_async=True)
    return RewardFunction(
        name=genrm.name,
        call=call,
        place=f"{genrm.path}:{genrm.function}",
        path=path,
        style="genrm",
        kwargs={},
        timeout_s=genrm.timeout_s,
    )


def load_function(path: Path, name: str, key: str, *, must_be_async: bool = False) -> Callable[..., Any]:
    """Loads the callable of this name from a user's file.

    Args:
        key: key of the run file's entry, for messages.

    Raises:
        ConfigError: the file cannot be loaded, or has no such function.
    """
    module = load_module(path, key)
    function = getattr(module, name, None)
    if not callable(function):
        known = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(
            f"{key}.function: {path} has no function {name!r} (it has: {', '.join(known) or 'none'})."
        )
    if must_be_async and not is_async(function):
        raise ConfigError(
            f"{key}.function: {name} of {path} must be `async def`; it awaits client.complete(...)."
        )
    return function  # type: ignore[no-any-return]  # callable() was checked above


def is_async(call: Callable[..., Any]) -> bool:
    """Whether calls return a coroutine: `async def`, an object with such a `__call__`, a partial of these."""
    while isinstance(call, functools.partial):
        call = call.func
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


async def call_reward(
    function: RewardFunction, sample: ScoredSample, *, client: "GenRMClient | None"
) -> tuple[float, dict[str, float]]:
    """Returns the score of one sample, and the function's other metrics.

    A synchronous function runs in the process's main thread (some graders use signals) and blocks it; only
    the controller's SIGKILL limits its time. An asynchronous function has its own limit, without the time in
    which it waits for a GenRM.

    Args:
        client: passed to a GenRM's function; None for others.

    Raises:
        DeadlineExceeded: an asynchronous function took longer than its limit; a late result is ignored.
        CallStuck: it took longer, caught its cancellation and continues.
        ValueError: its result is not a score.
        Exception: any error that the function raises.
    """
    arguments = _arguments(function, sample, client)
    if not function.is_async:
        result = function.call(**arguments)
        if inspect.iscoroutine(result):
            result.close()
            raise ValueError("it gives a coroutine, which is not awaited here; write it as `async def`")
    else:
        result = await _awaited(function, arguments, client)
    return _read_trl(result) if function.style == "trl" else _read_verl(result)


async def _awaited(function: RewardFunction, arguments: dict[str, Any], client: "GenRMClient | None") -> Any:
    """Awaits an asynchronous function within its limit; a later result is ignored.

    The function runs in a separate task, because it may catch its cancellation and continue.
    """
    task = asyncio.create_task(_outcome(function, arguments))
    try:
        async with asyncio.timeout(function.timeout_s * function.limit_factor) as limit:
            if client is not None:
                client.pauses(limit)
            result, error = await asyncio.shield(task)
    except TimeoutError:  # raised by the limit: `_outcome` raises nothing
        pass
    finally:
        task.cancel()
    if limit.expired():
        await asyncio.wait({task}, timeout=CANCEL_S)
        times = f"{function.limit_factor} times " if function.limit_factor > 1 else ""
        says = f"{function.place} took longer than {times}its timeout_s {function.timeout_s:g}"
        if task.done():
            raise DeadlineExceeded(says)
        raise CallStuck(f"{says} and goes on after it was cancelled", task, function.timeout_s)
    if error is not None:
        raise error
    return result


async def _outcome(function: RewardFunction, arguments: dict[str, Any]) -> tuple[Any, BaseException | None]:
    """Returns the function's result or error, because a SystemExit raised in a task ends the process."""
    try:
        return await function.call(**arguments), None
    except BaseException as error:  # noqa: BLE001 (raised again by the caller)
        return None, error


def _arguments(function: RewardFunction, sample: ScoredSample, client: object) -> dict[str, Any]:
    if function.style == "trl":
        return _trl_arguments(sample) | function.kwargs
    plain = {
        "data_source": sample.data_source,
        "solution_str": sample.completion,
        "ground_truth": sample.ground_truth,
        "extra_info": _extra_info(sample),
    }
    if function.style == "genrm":
        return plain | {"prompt": sample.prompt, "client": client}
    return plain | function.kwargs


def _extra_info(sample: ScoredSample) -> Any:
    """Adds the facts to the row's own `extra_info`, whose keys win. A value that is no dict is unchanged."""
    own = sample.extra_info
    return {**sample.facts, **(own or {})} if own is None or isinstance(own, dict) else own


def _trl_arguments(sample: ScoredSample) -> dict[str, Any]:
    """Arguments for a batch of one sample; chat rows have messages instead of text, as in TRL."""
    columns = {"ground_truth": sample.ground_truth, "data_source": sample.data_source} | sample.row
    messages = columns.pop("prompt", None)
    columns.pop("completion", None)
    is_chat = isinstance(messages, list)
    return {name: [value] for name, value in columns.items()} | {
        "prompts": [messages if is_chat else sample.prompt],
        "completions": [
            [{"role": "assistant", "content": sample.completion}] if is_chat else sample.completion
        ],
    }


def _read_verl(result: Any) -> tuple[float, dict[str, float]]:
    if not isinstance(result, dict):
        return _finite(result), {}
    if "score" not in result:
        raise ValueError(f"its dict has no 'score' (it has: {', '.join(map(str, result))})")
    extra = {
        encodable(str(name)): float(value)
        for name, value in result.items()
        if name != "score" and _is_measure(value)
    }
    return _finite(result["score"]), extra


def encodable(text: str) -> str:
    """Replaces each lone surrogate (half a character) in `text` by ?, because messages are UTF-8."""
    return text.encode(errors="replace").decode()


def _is_measure(value: Any) -> bool:
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # an int larger than any float
        return False


def _read_trl(result: Any) -> tuple[float, dict[str, float]]:
    if not isinstance(result, list | tuple) or len(result) != 1:
        raise ValueError(f"it must give a list of one number for one completion, not {result!r}")
    return _finite(result[0]), {}


def _finite(value: Any) -> float:
    """Converts a score to a finite float; scalars of numpy and torch are accepted."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"its score is {value!r}, not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"its score is {number}")
    if abs(number) > MOST_SCORE:
        raise ValueError(f"its score is {number:g}; more than {MOST_SCORE:g} is no reward")
    return number
