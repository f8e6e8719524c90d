"""The user's reward functions: found by path and name, called in verl's or TRL's style.

verl: ``compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)`` gives a number
or a dict with `score`; its other numbers are metrics. TRL: ``fn(prompts, completions, **columns)`` gives a
list of one number. A GenRM's function is `async`, in verl's style, and is handed `prompt` and `client`.
"""

import asyncio
import importlib.util
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from yatt.adapters.thread_call import call_in_thread
from yatt.config.schema import GenRMSection, RewardSection, RunConfig
from yatt.errors import ConfigError, DeadlineExceeded
from yatt.reward.builtins import BUILTINS

_BUILTIN = "builtin:"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSample:
    """What a reward function is told; `row` is the data row as it was read."""

    prompt: str
    completion: str
    data_source: str
    ground_truth: str
    extra_info: Any
    row: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """One loaded function and how to call it."""

    name: str
    call: Callable[..., Any]
    place: str
    """File and function, for messages."""

    path: Path | None
    """The user's file; None for one of ours."""

    style: Literal["verl", "trl", "genrm"]
    kwargs: dict[str, Any]
    timeout_s: float


def load_rewards(config: RunConfig) -> dict[str, RewardFunction]:
    """Every function of the run file, by the name of its reward or GenRM.

    Raises:
        ConfigError: one of them cannot be loaded.
    """
    functions = {reward.name: load_reward(reward) for reward in config.rewards}
    limit_s = asking_limit_s(config)
    return functions | {
        genrm.name: load_genrm_function(genrm, limit_s) for genrm in config.genrms if genrm.path
    }


def asking_limit_s(config: RunConfig) -> float:
    """How long a GenRM's answer may take: it may be asked for again from other engines."""
    return config.rollout.request_timeout_s * (config.rollout.max_retries + 1)


def load_reward(reward: RewardSection) -> RewardFunction:
    """The function of one entry of `rewards`.

    Raises:
        ConfigError: the file, the name, or what the file imports, is not there.
    """
    key = f"rewards[{reward.name}]"
    if reward.path.startswith(_BUILTIN):
        name = reward.path.removeprefix(_BUILTIN)
        if name not in BUILTINS:
            raise ConfigError(f"{key}.path: no built-in {name!r}; there are {', '.join(sorted(BUILTINS))}.")
        call: Callable[..., Any] = BUILTINS[name]
        path: Path | None = None
    else:
        path = Path(reward.path).absolute()
        call = _load_function(path, reward.function, key)
    return RewardFunction(
        name=reward.name,
        call=call,
        place=f"{reward.path}:{call.__name__}",
        path=path,
        style=reward.style,
        kwargs=dict(reward.kwargs),
        timeout_s=reward.timeout_s,
    )


def load_genrm_function(genrm: GenRMSection, timeout_s: float) -> RewardFunction:
    """The function of an entry of `genrms` that has a path.

    Raises:
        ConfigError: as `load_reward`, or the function is not async.
    """
    key, path = f"genrms[{genrm.name}]", Path(genrm.path).absolute()
    call = _load_function(path, genrm.function, key)
    if not inspect.iscoroutinefunction(call):
        raise ConfigError(
            f"{key}.function: {genrm.function} of {path} must be `async def`; it awaits client.complete(...)."
        )
    return RewardFunction(
        name=genrm.name,
        call=call,
        place=f"{genrm.path}:{genrm.function}",
        path=path,
        style="genrm",
        kwargs={},
        timeout_s=timeout_s,
    )


def _load_function(path: Path, name: str, key: str) -> Callable[..., Any]:
    module = _load_module(path, key)
    function = getattr(module, name, None)
    if not callable(function):
        known = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(
            f"{key}.function: {path} has no function {name!r} (it has: {', '.join(known) or 'none'})."
        )
    return function  # type: ignore[no-any-return]  # callable() was asked above


def _load_module(path: Path, key: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{key}.path: no file {path}; write the path of a Python file, or builtin:NAME.")
    spec = importlib.util.spec_from_file_location(f"yatt_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key}.path: {path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # a file beside it can be imported
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigError(f"{key}.path: {error.filename}:{error.lineno}: {error.msg}.") from error
    except Exception as error:
        raise ConfigError(
            f"{key}.path: {where_raised(error, path)}: {type(error).__name__}: {error}."
        ) from error
    return module


def where_raised(error: BaseException, path: Path | None) -> str:
    """file:line of the user's code that raised; the innermost line of all if none of it is the user's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if path is not None and Path(frame.filename) == path]
    if not frames:
        return str(path or "yatt")
    last = (own or frames)[-1]
    return f"{last.filename}:{last.lineno}"


async def call_reward(
    function: RewardFunction, sample: ScoredSample, *, client: object, threads: asyncio.Semaphore
) -> tuple[float, dict[str, float]]:
    """The score of one sample, and what else the function measured.

    Args:
        client: handed to a GenRM's function, unused for others.
        threads: bounds how many sync functions run at once.

    Raises:
        DeadlineExceeded: not there within the function's own limit, counted from when it starts.
        ValueError: its result is no score.
        Exception: whatever the function raises.
    """
    arguments = _arguments(function, sample, client)
    try:
        if inspect.iscoroutinefunction(function.call):
            async with asyncio.timeout(function.timeout_s) as limit:
                result = await function.call(**arguments)
        else:
            async with threads, asyncio.timeout(function.timeout_s) as limit:
                result = await call_in_thread(lambda: function.call(**arguments))
    except TimeoutError:
        if not limit.expired():  # the function's own
            raise
        raise DeadlineExceeded(
            f"{function.place} took longer than its timeout_s {function.timeout_s:g}"
        ) from None
    return _read_trl(result) if function.style == "trl" else _read_verl(result)


def _arguments(function: RewardFunction, sample: ScoredSample, client: object) -> dict[str, Any]:
    if function.style == "trl":
        return _trl_arguments(sample) | function.kwargs
    plain = {
        "data_source": sample.data_source,
        "solution_str": sample.completion,
        "ground_truth": sample.ground_truth,
        "extra_info": sample.extra_info,
    }
    if function.style == "genrm":
        return plain | {"prompt": sample.prompt, "client": client}
    return plain | function.kwargs


def _trl_arguments(sample: ScoredSample) -> dict[str, Any]:
    """Batches of one; chat rows as TRL gives them, messages instead of text."""
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
        str(name): float(value)
        for name, value in result.items()
        if name != "score" and isinstance(value, numbers.Real)
    }
    return _finite(result["score"]), extra


def _read_trl(result: Any) -> tuple[float, dict[str, float]]:
    if not isinstance(result, list | tuple) or len(result) != 1:
        raise ValueError(f"it must give a list of one number for one completion, not {result!r}")
    return _finite(result[0]), {}


def _finite(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"its score is {value!r}, not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"its score is {number}")
    return number
