"""Engines without processes: they answer what is sent to them, in the event loop of the test."""

import asyncio
from collections.abc import Callable
from typing import Any

from yatt.records import message as m

Answer = Callable[[str, m.SampleRequest], m.Completed | None]
"""Gives what an engine completes; None keeps it busy."""


def completion(
    sample: m.SampleRequest, tokens: list[int], reason: str = "stop", version: int = 0
) -> m.Completed:
    return m.Completed(
        request_id=sample.request_id, token_ids=m.pack_ids(tokens),
        logprobs=m.pack_floats([-0.5] * len(tokens)), finish_reason=reason, policy_version=version,
        watched=rows_of(sample, tokens),
    )  # fmt: skip


def rows_of(sample: m.SampleRequest, tokens: list[int]) -> bytes:
    """Log-probs of watched tokens, which show what token they stand at."""
    return m.pack_floats([-token - each / 8 for token in tokens for each in sample.watched])


class Engines:
    """In place of the socket to this node's workers.

    Attributes:
        sent: what every engine was sent, with the token of its lease.
        partial: tokens that an aborted request has by then.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer, self.partial = answer, [7, 8]
        self.sent: list[tuple[str, m.Message, int]] = []
        self.busy: dict[str, m.SampleRequest] = {}
        self.completed: Callable[[str, m.Completed], None] = lambda *_: None

    async def tell(self, to: str, body: m.Message, *, token: int = 0) -> None:
        self.sent.append((to, body, token))
        loop = asyncio.get_running_loop()
        if isinstance(body, m.SampleRequest):
            given = self.answer(to, body)
            if given is None:
                self.busy[body.request_id] = body
            else:
                loop.call_soon(self.completed, to, given)
        if isinstance(body, m.Abort):
            for request_id in body.request_ids:
                if sample := self.busy.pop(request_id, None):  # else its answer is under way
                    loop.call_soon(self.completed, to, completion(sample, self.partial, "abort"))

    async def request(self, to: str, body: m.Message, limit_s: float, **_: Any) -> m.Message:
        raise AssertionError(f"{to} is not asked for {body} here")

    def asked(self) -> list[str]:
        """The request ids that engines were sent, without the numbers that this node adds."""
        return [b.request_id.partition("#")[0] for _, b, _ in self.sent if isinstance(b, m.SampleRequest)]
