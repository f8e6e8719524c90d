"""A process that calls the user's functions on the first rows, as a reward process does.

python -m yatt.reward.tried_calls FOLDER, started by `yatt.launch.checks.score_trial`: what ends or blocks it,
or is raised, is found before a run is queued.
"""

import asyncio
import json
import os
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from yatt.adapters.inputs.data_rows import Row, called_columns, prompt_text
from yatt.adapters.inputs.dataset import read_data_rows
from yatt.adapters.inputs.user_module import where_raised
from yatt.adapters.processes.trial import read_arguments
from yatt.config.load import parse_resolved
from yatt.config.schema import RunConfig
from yatt.errors import ConfigError, words_of
from yatt.records.episode import ENVIRONMENT
from yatt.reward.environment import Episode, call_step, checked_images, load_environment
from yatt.reward.functions import RewardFunction, ScoredSample, call_reward, load_reward
from yatt.reward.results import encodable_text
from yatt.reward.tried import CALLS, Shown, TriedCall, tried_keys

NUM_ROWS, NUM_HELD_OUT = 5, 2
"""Number of training rows and held-out rows that a function is called on."""

TRIAL_S = 30.0
"""No call begins later than this."""

MISTAKES = (AttributeError, ConfigError, KeyError, NameError, TypeError)
"""Errors that usually come for any completion and on any machine. Others may be of this machine (no route, no
library), or of a completion that is not in the form that the function wants."""


def is_mistake(error: BaseException) -> bool:
    """Whether the error would come again for any completion, on any machine. Not if a pattern did not match
    (None has no group), or a variable of the environment is missing, which a job may have."""
    if not isinstance(error, MISTAKES) or isinstance(error, UnboundLocalError) or "NoneType" in str(error):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return not (frames and frames[-1].filename in (os.__file__, "<frozen os>"))


@dataclass(frozen=True, slots=True)
class _Case:
    row: Row
    place: str
    shown: Shown

    @property
    def completion(self) -> str:
        return str(self.row.ground_truth) if self.shown == "truth" else ""

    def sample(self, config: RunConfig) -> ScoredSample:
        count = len(self.completion.split())
        return ScoredSample(
            prompt=prompt_text(self.row.prompt),
            completion=self.completion,
            data_source=self.row.data_source,
            ground_truth=self.row.ground_truth,
            extra_info=self.row.raw.get("extra_info"),
            row=self.row.raw,
            facts={
                "finish_reason": "stop",
                "num_prompt_tokens": len(prompt_text(self.row.prompt).split()),
                "num_completion_tokens": count,
                "max_response_tokens": config.rollout.max_response_tokens,
            },
        )

    def episode(self, function: RewardFunction) -> Episode:
        row = self.row
        return Episode(
            prompt=prompt_text(row.prompt),
            turns=(("assistant", self.completion),),
            data_source=row.data_source,
            ground_truth=row.ground_truth,
            extra_info=row.raw.get("extra_info"),
            row=row.raw,
            kwargs=function.kwargs,
        )


def _cases(config: RunConfig) -> list[list[_Case]]:
    """Returns the cases of each row. A ground truth that is a list or a dictionary is no completion."""
    data = config.data
    read = partial(read_data_rows, data=data, is_whole=called_columns(config) is None)
    rows = list(islice(read(data.train_files), NUM_ROWS))
    rows += islice(read(data.val_files), NUM_HELD_OUT)
    found = []
    for row, place in rows:
        has_text = isinstance(row.ground_truth, str | int | float)
        kinds: tuple[Shown, ...] = ("truth", "empty") if has_text else ("empty",)
        found.append([_Case(row, place, shown) for shown in kinds])
    return found


def _calls(function: RewardFunction, by_row: list[list[_Case]]) -> Iterator[list[_Case]]:
    """Yields the cases of each call."""
    flat = [case for cases in by_row for case in cases]
    if function.scope == "group":
        yield from by_row
    elif function.scope == "batch":
        yield flat
    else:
        yield from ([case] for case in flat)


async def try_calls(config: RunConfig, without: Collection[str], write: Callable[[Any], None]) -> None:
    """Calls every function of `tried_keys` on the first rows.

    Args:
        without: keys of functions that are left out.
        write: is called with what is written as one line.
    """
    by_row, until_s = _cases(config), time.monotonic() + TRIAL_S
    rewards = {f"rewards[{reward.name}]": reward for reward in config.rewards}
    for key in tried_keys(config):
        if key in without:
            continue
        write({"begins": key, "shown": "", "place": ""})
        function = load_environment(config.environment) if key == ENVIRONMENT else load_reward(rewards[key])
        for cases in _calls(function, by_row):
            if time.monotonic() > until_s:
                return
            write({"begins": key, "shown": cases[0].shown, "place": cases[0].place})
            for result in await _results(key, function, cases, config):
                write(asdict(result))


async def _results(
    key: str, function: RewardFunction, cases: list[_Case], config: RunConfig
) -> list[TriedCall]:
    blank = [TriedCall(function=key, shown=case.shown, place=case.place) for case in cases]
    try:
        if key == ENVIRONMENT:
            answer = await call_step(function, cases[0].episode(function))
            if answer is not None:
                checked_images(answer, config)
            return [replace(blank[0], answer=None if answer is None else encodable_text(answer.text))]
        found = await call_reward(function, [case.sample(config) for case in cases], client=None)
    except BaseException as error:  # noqa: BLE001 (whatever a user's function raises)
        says = encodable_text(f"{words_of(error)} at {where_raised(error, function.path)}")
        return [replace(each, error=says, is_mistake=is_mistake(error)) for each in blank]
    return [replace(each, score=result.score) for each, result in zip(blank, found, strict=True)]


def main() -> None:
    """Entry point of the process."""
    folder, (text, without) = read_arguments()
    with Path(folder / CALLS).open("a") as file:

        def write(line: Any) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        asyncio.run(try_calls(parse_resolved(text), without, write))
    (folder / "found").write_text(json.dumps(("", None)))
    os._exit(0)  # does not wait for threads that a file has started


if __name__ == "__main__":
    main()
