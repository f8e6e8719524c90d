"""The common parts of all messages: the envelope, and for an order the type of its answer.

Every message is sent in a `Frame`. A receiver refuses a frame of an older attempt than its own, and one that
it has received already. Orders to a worker that use its GPUs are `under_lease`: their frame has the lease's
token, and `yatt.adapters.net.worker_link` refuses an old token.
"""

import functools
from typing import Annotated, Any, ClassVar, Generic, TypeVar, get_args

import msgspec

from yatt.errors import EXIT_FAILED, EXIT_USER_MISTAKE, WorkerFailed


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of every message; the class name is its tag."""

    under_lease: ClassVar[bool] = False
    """Whether a worker may carry it out only while it holds the lease (see
    `yatt.core.gpus.lease.WorkerLease`)."""

    passes_to_ranks: ClassVar[bool] = False
    """Whether a node only passes this order of the leader to its trainer ranks. It has Done as its answer."""


A = TypeVar("A", bound=Message)


class Order(Message, Generic[A], frozen=True, kw_only=True):
    """Base of every message with an answer: an `A`, or Failed."""


class Done(Message, frozen=True, kw_only=True):
    """The order was carried out; there is no result."""


class Failed(Message, frozen=True, kw_only=True):
    """The order failed. `error` is one sentence for people, `exit_code` ends the attempt if there is no
    recovery. `overran`: a reward function exceeded its limit; `waits`: a data file may be readable later."""

    error: str
    trace: str = ""
    exit_code: int = EXIT_FAILED
    overran: bool = False
    waits: bool = False

    @property
    def user(self) -> bool:
        """Whether it is a user's mistake."""
        return self.exit_code == EXIT_USER_MISTAKE


@functools.cache
def answer_type(order: type[Message]) -> Any:
    """Returns the answers that this class of orders can have, besides Failed; a type for `isinstance`.

    Raises:
        TypeError: it is no order.
    """
    for base in getattr(order, "__orig_bases__", ()):
        if getattr(base, "__origin__", None) is Order:
            return get_args(base)[0]
    raise TypeError(f"{order.__name__} is no order: it has no answer")


def as_answer(order: Order[A], got: Message | None, who: str) -> A | Failed:
    """Returns the answer of `who`. A message that is no answer to this order counts as a failed order."""
    if isinstance(got, Failed | answer_type(type(order))):
        return got
    name = type(got).__name__ if got is not None else "nothing"
    return Failed(error=f"{who} answered {type(order).__name__} by {name}")


def unless_failed(answer: A | Failed, who: str) -> A:
    """Returns the answer.

    Raises:
        WorkerFailed: it is Failed; the error has its `exit_code`.
    """
    if not isinstance(answer, Failed):
        return answer
    failure = WorkerFailed(f"{who}: {answer.error}")
    failure.exit_code = answer.exit_code
    raise failure


class Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Envelope. `token` is the token of the message's lease, or 0. `seq` rises by one with every frame to the
    same receiver; `reply_to` is the seq that it answers, or 0, or, below 0, a notice about a request
    (`yatt.records.codec`). The sender waits for no answer to a request below `waits_from` (0: not said)."""

    attempt: Annotated[int, msgspec.Meta(ge=0)]
    token: Annotated[int, msgspec.Meta(ge=0)]
    seq: Annotated[int, msgspec.Meta(ge=1)]
    reply_to: Annotated[int, msgspec.Meta(ge=-3)]
    waits_from: Annotated[int, msgspec.Meta(ge=0)]
    body: msgspec.Raw
