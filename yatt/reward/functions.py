"""Loads the user's reward functions by path and name, and calls them in verl's or TRL's style.

verl: ``compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)`` returns a number
or a dict with `score`; its other numbers are metrics. TRL: ``fn(prompts, completions, **columns)`` returns a
list. A function whose scope is batch or group gets lists of several samples. A GenRM's function is `async`,
in verl's style, and also receives `prompt` and `client`. The functions of `builtin:NAME` are here too.
"""

import asyncio
import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from yatt.adapters.inputs.data_rows import without_nulls
from yatt.adapters.inputs.user_module import load_module
from yatt.config.schema import GenRMSection, RewardSection, RunConfig
from yatt.errors import ConfigError, DeadlineExceeded
from yatt.reward.results import Result, read_list, read_one

_FINAL_ANSWER = re.compile(r"####\s*([^\n]+)")


def gsm8k(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:  # noqa: ARG001
    """1 if the last `#### answer` of the completion equals the ground truth; numbers compare by value."""
    answers = _FINAL_ANSWER.findall(solution_str)
    return float(bool(answers) and _normalised(answers[-1]) == _normalised(_last_answer(str(ground_truth))))


def exact(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:  # noqa: ARG001
    """1 if the completion, without surrounding whitespace, equals the ground truth."""
    return float(solution_str.strip() == str(ground_truth).strip())


BUILTINS: dict[str, Callable[..., float]] = {"gsm8k": gsm8k, "exact": exact}


def _last_answer(ground_truth: str) -> str:
    """Extracts the final answer. GSM8K's own answer column has the whole solution; verl's has the number."""
    answers = _FINAL_ANSWER.findall(ground_truth)
    return answers[-1] if answers else ground_truth


def _normalised(answer: str) -> str:
    """Normalises an answer: `$1,234.00.` and `1234` are equal."""
    text = answer.strip().replace(",", "").replace("$", "").rstrip(".%")
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if number.is_integer() else repr(number)


if TYPE_CHECKING:
    from yatt.reward.genrm_client import GenRMClient

_BUILTIN = "builtin:"
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
    `max_response_tokens`; with an environment, the messages of all `turns`."""

    turns: tuple[tuple[str, str], ...] = ()
    """With an environment: role and text of all turns after the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """One loaded function and how to call it."""

    name: str
    call: Callable[..., Any]
    place: str
    """File and function, for messages."""

    path: Path | None
    """The user's file; None for a built-in function."""

    style: Literal["verl", "trl", "genrm", "environment", "way"]
    scope: Literal["sample", "batch", "group"] = "sample"
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
    by_client = [genrm for genrm in config.genrms if genrm.asks_by_client]
    return functions | {genrm.name: load_genrm_function(genrm) for genrm in by_client}


def load_reward(reward: RewardSection) -> RewardFunction:
    """Loads the function of one entry of `rewards`.

    Raises:
        ConfigError: the file, the function, or a module that the file imports, is missing.
    """
    key = f"rewards[{reward.name}]"
    if is_builtin(reward.path):
        name = reward.path.removeprefix(_BUILTIN)
        if name not in BUILTINS:
            says = f"no built-in {name!r}; there are {', '.join(sorted(BUILTINS))}."
            raise ConfigError(says, key=f"{key}.path")
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
        scope=reward.effective_scope,
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
    module = load_module(path, f"{key}.path")
    function = getattr(module, name, None)
    if not callable(function):
        known = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        says = f"{path} has no function {name!r} (it has: {', '.join(known) or 'none'})."
        raise ConfigError(says, key=f"{key}.function")
    if must_be_async and not is_async(function):
        says = f"{name} of {path} must be `async def`; it awaits client.complete(...)."
        raise ConfigError(says, key=f"{key}.function")
    return function  # type: ignore[no-any-return]  # callable() was checked above


def is_async(call: Callable[..., Any]) -> bool:
    """Whether calls return a coroutine: `async def`, an object with such a `__call__`, a partial of these."""
    while isinstance(call, functools.partial):
        call = call.func
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


async def call_reward(
    function: RewardFunction, samples: Sequence[ScoredSample], *, client: "GenRMClient | None"
) -> list[Result]:
    """Calls the function once; returns one result per sample.

    Args:
        samples: one, unless the function's scope is batch or group.
        client: passed to a GenRM's function; None for others.

    Raises:
        ValueError: its result is not a score.
        Exception: as in `call_function`.
    """
    takes_lists = function.style == "trl" or function.scope != "sample"
    arguments = (
        _list_arguments(function, samples) if takes_lists else _arguments(function, samples[0], client)
    )
    result = await call_function(function, arguments, client)
    return read_list(result, len(samples)) if takes_lists else [read_one(result)]


async def call_function(
    function: RewardFunction, arguments: dict[str, Any], client: "GenRMClient | None"
) -> Any:
    """Calls the function and returns its result.

    A synchronous function runs in the process's main thread (some graders use signals) and blocks it; only
    the controller's SIGKILL limits its time. An asynchronous function has its own limit, without the time in
    which it waits for a GenRM.

    Args:
        client: passed to a GenRM's function; None for others.

    Raises:
        DeadlineExceeded: an asynchronous function took longer than its limit; a late result is ignored.
        CallStuck: it took longer, caught its cancellation and continues.
        Exception: any error that the function raises.
    """
    if function.is_async:
        return await _awaited(function, arguments, client)
    with _OF_FUNCTIONS.instead_of_ours():
        result = function.call(**arguments)
    if inspect.iscoroutine(result):
        result.close()
        raise ValueError("it gives a coroutine, which is not awaited here; write it as `async def`")
    return result


class _OwnLoop:
    """The event loop that synchronous functions find, made once and again if one has closed it."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextlib.contextmanager
    def instead_of_ours(self) -> Iterator[None]:
        """Lets a synchronous function run coroutines itself, by `asyncio.run` or with the thread's event
        loop, as where nothing else runs one."""
        ours = asyncio.get_running_loop()
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        asyncio.events._set_running_loop(None)
        asyncio.set_event_loop(self._loop)
        try:
            yield
        finally:
            asyncio.events._set_running_loop(ours)
            asyncio.set_event_loop(ours)


_OF_FUNCTIONS = _OwnLoop()


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
    plain = {
        "data_source": sample.data_source,
        "solution_str": sample.completion,
        "ground_truth": sample.ground_truth,
        "extra_info": _extra_info(sample),
    }
    if function.style == "genrm":
        return plain | {"prompt": sample.prompt, "client": client}
    return plain | function.kwargs


def _list_arguments(function: RewardFunction, samples: Sequence[ScoredSample]) -> dict[str, Any]:
    if function.style == "trl":
        return _trl_arguments(samples) | function.kwargs
    return {
        "data_sources": [sample.data_source for sample in samples],
        "solution_strs": [sample.completion for sample in samples],
        "ground_truths": [sample.ground_truth for sample in samples],
        "extra_infos": [_extra_info(sample) for sample in samples],
    } | function.kwargs


def _extra_info(sample: ScoredSample) -> Any:
    """Adds the facts to the row's own `extra_info`, whose keys win. A value that is no dict is unchanged."""
    own = sample.extra_info
    return {**sample.facts, **(own or {})} if own is None or isinstance(own, dict) else own


def _trl_arguments(samples: Sequence[ScoredSample]) -> dict[str, Any]:
    """Lists as in TRL: chat rows have messages instead of text. A column that only some rows have is None for
    the others."""
    rows = [{"ground_truth": s.ground_truth, "data_source": s.data_source} | s.row for s in samples]
    names = dict.fromkeys(name for row in rows for name in row if name not in ("prompt", "completion"))
    shown = [_trl_texts(sample) for sample in samples]
    return {name: [row.get(name) for row in rows] for name in names} | {
        "prompts": [prompt for prompt, _ in shown],
        "completions": [completion for _, completion in shown],
    }


def _trl_texts(sample: ScoredSample) -> tuple[Any, Any]:
    """Prompt and completion of one sample."""
    messages = sample.row.get("prompt")
    if not isinstance(messages, list):
        return sample.prompt, sample.completion
    return without_nulls(messages), messages_of(sample.turns or (("assistant", sample.completion),))


def messages_of(turns: tuple[tuple[str, str], ...]) -> list[dict[str, str]]:
    """Turns as chat messages."""
    return [{"role": role, "content": text} for role, text in turns]
