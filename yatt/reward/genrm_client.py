"""What a GenRM's Python function is handed: `await client.complete(text)`.

A request goes to the controller, which sends it to whichever engine of that GenRM has least to do.
The seed comes from (run seed, text, number of the call), so a rerun asks for the same completions.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Iterator

from yatt.adapters.wire import Channel
from yatt.config.schema import GenRMSection
from yatt.errors import DeadlineExceeded, WorkerFailed
from yatt.records import message as m

CONTROLLER = "controller"


class GenRMClient:
    """One GenRM, for one sample.

    Args:
        limit_s: how long the controller may be silent about one completion.
    """

    def __init__(self, channel: Channel, genrm: GenRMSection, *, run_seed: int, limit_s: float) -> None:
        self._channel, self._genrm = channel, genrm
        self._run_seed, self._limit_s = run_seed, limit_s
        self.asked = 0
        """Completions that the function asked for so far."""
        self._function_limit: asyncio.Timeout | None = None
        self._under_way, self._left_s = 0, 0.0

    def pauses(self, limit: asyncio.Timeout) -> None:
        """Stop this clock of the function while it waits for the GenRM."""
        self._function_limit = limit

    async def complete(
        self, text: str, *, max_tokens: int | None = None, temperature: float | None = None
    ) -> str:
        """The GenRM's completion of `text`; lengths and temperature are the run file's unless given.

        Raises:
            ValueError: the GenRM cannot take this text (it is too long, say).
            WorkerFailed: the GenRM could not answer, or not in time.
        """
        number, self.asked = self.asked, self.asked + 1
        ask = m.Ask(
            genrm=self._genrm.name,
            text=text,
            seed=_seed(self._run_seed, text, number),
            max_tokens=self._genrm.max_tokens if max_tokens is None else max_tokens,
            temperature=self._genrm.temperature if temperature is None else temperature,
        )
        try:
            with self._paused():
                answer = await self._channel.request(CONTROLLER, ask, self._limit_s)
        except DeadlineExceeded as error:  # the machines', not the function's own limit
            raise WorkerFailed(str(error)) from error
        if isinstance(answer, m.Failed) and answer.user:
            raise ValueError(f"GenRM '{self._genrm.name}' refuses this text: {answer.error}")
        if isinstance(answer, m.Failed):
            raise WorkerFailed(f"GenRM '{self._genrm.name}' could not answer: {answer.error}")
        assert isinstance(answer, m.Answered), f"an Ask is answered by Answered, not {answer!r}"
        return answer.text

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


def _seed(run_seed: int, text: str, call: int) -> int:
    digest = hashlib.blake2b(f"{run_seed}/{call}/{text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
