"""The events that the coordinator waits for: answers, failures, lost nodes, requests to stop."""

import asyncio
import math
from collections import deque

from yatt import clock
from yatt.core.phases import phases


class Inbox:
    """A queue of events. It exists before the coordinator runs, so that nothing that comes early is lost."""

    def __init__(self) -> None:
        self._events: deque[phases.Event] = deque()
        self._arrival = asyncio.Event()
        self.silences: dict[int, float] = {}
        """Seconds for which a lost node was silent, by its index."""

        self.ends_s = math.inf
        """When the attempt is ended by force, in monotonic seconds; infinite if that is not known."""

    def put(self, event: phases.Event) -> None:
        """Adds an event."""
        self._events.append(event)
        self._arrival.set()

    def stop(self, reason: str, left_s: float = math.inf) -> None:
        """Requests an early end; the run is continued later. `left_s`: time until it is ended by force."""
        self.ends_s = min(self.ends_s, clock.monotonic_s() + left_s)
        self.put(phases.StopWanted(reason))

    def fail(self, error: str, exit_code: int, *, is_symptom: bool = False) -> None:
        """Reports a failure that ends the attempt. A symptom waits for its cause."""
        self.put(phases.Failure(error, exit_code, is_symptom))

    def lose(self, index: int, life: int, why: str, silence_s: float = 0.0) -> None:
        """Reports a lost process of a node. `why` is the end of a sentence about the node."""
        self.silences[index] = silence_s
        self.put(phases.NodeLost(index, why, life))

    def silent(self, index: int, life: int, silence_s: float) -> None:
        """Reports a node that was silent for too long."""
        self.lose(index, life, f"was not heard of for {silence_s:.1f} s", silence_s)

    def gave_up(self, index: int, life: int, why: str) -> None:
        """Reports a node that only runs engines and cannot continue."""
        self.lose(index, life, f"gave up: {why}")

    def knocked(self, index: int, life: int) -> None:
        """Reports a newcomer."""
        self.put(phases.NodeKnocked(index, life))

    async def next(self) -> phases.Event:
        """Waits for the next event. One always comes: every order and act has a deadline of its own."""
        while not self._events:
            self._arrival.clear()
            await self._arrival.wait()
        return self._events.popleft()
