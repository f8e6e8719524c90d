"""What every kind of trainer rank does with orders. No torch."""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import structs

from yatt.errors import WorkerFailed
from yatt.records import cluster as c, message as m

Handlers = Mapping[type[m.Message], Callable[[Any], m.Message]]


def carried_out(handlers: Handlers, order: m.Message) -> m.Message:
    """Executes one order and returns its answer.

    Raises:
        WorkerFailed: the order is unknown, or comes too early.
    """
    handler = handlers.get(type(order))
    if handler is None:
        raise WorkerFailed(f"a trainer rank has no use for {type(order).__name__}")
    return handler(order)


class ArrivedSamples:
    """Samples of an iteration that arrive in portions before its Train order, which brings the last ones."""

    def __init__(self) -> None:
        self._iteration = 0
        self._samples: dict[int, m.Rollout] = {}

    def receive(self, order: c.SampleTransfer) -> m.Message:
        """Keeps a portion; those of another iteration are dropped."""
        kept = self._samples if self._iteration == order.iteration else {}
        self._samples = kept | {rollout.sample_id: rollout for rollout in order.rollouts}
        self._iteration = order.iteration
        return m.Done()

    def completed(self, order: m.Train) -> m.Train:
        """Returns the order with all samples of its iteration; none is kept."""
        samples = self._samples.values() if self._iteration == order.iteration else ()
        self._iteration, self._samples = 0, {}
        return structs.replace(order, rollouts=(*samples, *order.rollouts))
