"""The client that a GenRM's Python function receives: `await client.complete(text)`.

A request goes to the controller, which sends it to the least busy engine of that GenRM. The seed is derived
from (run seed, text, number of the call), so a rerun requests the same completions.
"""

import asyncio
import contextlib
import hashlib
import numbers
import operator
from collections.abc import Iterator
from typing import Any

from yatt.adapters.net.channel import Channel
from yatt.config.schema import GenRMSection
from yatt.config.sections.ranges import MOST
from yatt.errors import EXIT_USER_MISTAKE, DeadlineExceeded, WorkerFailed
from yatt.printable import value_in_words
from yatt.records import message as m

CONTROLLER = "controller"
MOST_TEMPERATURE = 100.0
"""Same limit as in the run file."""

MOST_ASKS = 1000
"""Maximum calls per sample. Waiting for a GenRM does not count against a function's time limit, so that limit
does not stop an endless loop of calls."""


class GenRMClient:
    """Client of one GenRM, for one sample.

    Args:
        limit_s: longest time without a message from the controller about one completion.
    """

    def __init__(self, channel: Channel, genrm: GenRMSection, *, run_seed: int, limit_s: float) -> None:
        self._channel, self._genrm = channel, genrm
        self._run_seed, self._limit_s = run_seed, limit_s
        self.asked = 0
        """Number of completions that the function has requested."""
        self.failure: m.Failed | None = None
        """Why a request has failed. It overrides the function's result, because a function may catch the
        exception and return a score."""
        self._function_limit: asyncio.Timeout | None = None
        self._under_way, self._left_s = 0, 0.0

    def pauses(self, limit: asyncio.Timeout) -> None:
        """Pauses this time limit of the function while it waits for the GenRM."""
        self._function_limit = limit

    async def complete(
        self, text: str, *, max_tokens: int | None = None, temperature: float | None = None
    ) -> str:
        """Returns the GenRM's completion of `text`; the run file gives default length and temperature.

        Raises:
            ValueError: an argument is of the wrong type or out of range, or the GenRM cannot take this text
                (for example, it is too long).
            RuntimeError: the function called it more than `MOST_ASKS` times.
            WorkerFailed: the GenRM could not answer, or not in time.
        """
        await asyncio.sleep(0)  # so that the time limit can cancel a function that retries in a loop
        text = _text(text)
        most = self._genrm.max_tokens if max_tokens is None else _max_tokens(max_tokens)
        warmth = self._genrm.temperature if temperature is None else _temperature(temperature)
        if self.asked >= MOST_ASKS:
            says = f"client.complete was called {MOST_ASKS} times for this sample; that is the most"
            self.failure = self.failure or m.Failed(error=says, exit_code=EXIT_USER_MISTAKE)
            raise RuntimeError(says)
        number, self.asked = self.asked, self.asked + 1
        seed = _seed(self._run_seed, text, number)
        ask = m.Ask(genrm=self._genrm.name, text=text, seed=seed, max_tokens=most, temperature=warmth)
        try:
            with self._paused():
                answer = await self._channel.request(CONTROLLER, ask, self._limit_s)
        except DeadlineExceeded as error:  # of the request, not the function's own limit
            raise self._failed(str(error)) from error
        if isinstance(answer, m.Failed) and answer.user:
            raise ValueError(f"GenRM '{self._genrm.name}' refuses this text: {answer.error}")
        if isinstance(answer, m.Failed):
            raise self._failed(f"GenRM '{self._genrm.name}' could not answer: {answer.error}")
        return answer.text

    def _failed(self, says: str) -> WorkerFailed:
        self.failure = self.failure or m.Failed(error=says)
        return WorkerFailed(says)

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        limit, loop = self._function_limit, asyncio.get_running_loop()
        self._under_way += 1
        if limit is not None and self._under_way == 1:
            self._left_s = (limit.when() or loop.time()) - loop.time()
            limit.reschedule(None)
        try:
            yield
        finally:
            self._under_way -= 1
            if limit is not None and not self._under_way and not limit.expired():
                limit.reschedule(loop.time() + self._left_s)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"client.complete: text must be a str, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"client.complete: text has half a character (a lone surrogate, at {error.start}), which no "
            "tokenizer takes; clean it with text.encode(errors='replace').decode()"
        ) from None
    return str(value)


def _max_tokens(value: Any) -> int:
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not 1 <= number <= MOST:
        raise ValueError(f"client.complete: max_tokens is {value_in_words(value)}; write an int, 1 or more")
    return number


def _temperature(value: Any) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MOST_TEMPERATURE:  # also false for NaN
        raise ValueError(
            f"client.complete: temperature is {value_in_words(value)}; "
            f"write a number from 0 to {MOST_TEMPERATURE:g}"
        )
    return float(value)


def _seed(run_seed: int, text: str, call: int) -> int:
    digest = hashlib.blake2b(f"{run_seed}/{call}/{text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
