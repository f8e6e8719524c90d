"""A model of one engine: how long it takes for the requests that it runs. Pure.

Each step of an engine gives every running sequence one token. A step with b sequences takes
``step_s + sequence_s * b`` seconds. So all running sequences progress alike, and one number, the tokens that
each sequence has received since the engine began, tells which one ends next.

The policy predicts with it, and the simulator runs it in place of real engines.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from yatt.records.load import StepSums

LEAST_S = 1e-9
LEAST_SPREAD = 0.05
"""Least ratio of the standard deviation of running sequences to their mean for which both numbers of a speed
are fitted."""


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Seconds of an engine's step: `step_s` whatever runs, and `sequence_s` for each running sequence."""

    step_s: float
    sequence_s: float

    def token_s(self, running: float) -> float:
        """Seconds that a token of each of `running` sequences takes."""
        return max(self.step_s + self.sequence_s * running, LEAST_S)

    def tokens_per_s(self, running: int) -> float:
        """Tokens per second of all running sequences together."""
        return running / self.token_s(running)


def fitted_speed(sums: StepSums) -> EngineSpeed | None:
    """Returns the speed that fits measured steps best (least squares, neither number below 0); None: there
    were none. If almost the same number of sequences ran in all steps, `sequence_s` is 0."""
    if sums.steps <= 0 or not math.isfinite(sums.seconds + sums.running_seconds):
        return None
    mean, mean_s = sums.running / sums.steps, sums.seconds / sums.steps
    variance = sums.running2 / sums.steps - mean * mean
    if variance <= (LEAST_SPREAD * mean) ** 2:
        return EngineSpeed(mean_s, 0.0)
    sequence_s = max((sums.running_seconds / sums.steps - mean * mean_s) / variance, 0.0)
    step_s = mean_s - sequence_s * mean
    if step_s >= 0:
        return EngineSpeed(step_s, sequence_s)
    return EngineSpeed(0.0, sums.running_seconds / sums.running2)


@dataclass(frozen=True, slots=True)
class Request:
    """A request with `tokens` tokens still to come."""

    key: str
    tokens: float


class _Running:
    """Running sequences, by the progress of the engine at which they end.

    Attributes:
        ends: a heap of (progress at the end, order, key).
        by_key: progress at the end.
        most: the highest number of them so far, at least 1.
    """

    def __init__(self) -> None:
        self.ends: list[tuple[float, int, str]] = []
        self.by_key: dict[str, float] = {}
        self.most, self._count = 1, 0

    def add(self, key: str, end: float) -> None:
        """Adds a sequence."""
        self._count += 1
        self.by_key[key] = end
        heapq.heappush(self.ends, (end, self._count, key))
        self.most = max(self.most, len(self.by_key))

    def remove_first(self) -> tuple[float, str]:
        """Removes the sequence that ends first; returns its end and key."""
        end, _, key = heapq.heappop(self.ends)
        del self.by_key[key]
        return end, key

    def keep_first(self, most: int) -> Iterator[tuple[float, str]]:
        """Removes all but so many, those that would end last; gives ends and keys, the last one first."""
        self.ends.sort()  # a heap too
        while len(self.ends) > most:
            end, _, key = self.ends.pop()
            del self.by_key[key]
            yield end, key


class EngineModel:
    """One engine at a moment `now_s`, which only moves forward; or several that share their requests evenly.

    Args:
        room: maximum number of sequences that run at once; further requests wait, in order.
        engines: number of engines; a part of one where a part of a system is modelled.
        unevenness: of several engines that got requests together, by how many sequences one that still has
            some is fuller than the mean when most have ended: 0 for one engine, 1 for very many.
    """

    def __init__(
        self,
        speed: EngineSpeed,
        room: int,
        now_s: float = 0.0,
        *,
        engines: float = 1.0,
        unevenness: float = 0.0,
    ) -> None:
        self._speed, self._room, self._engines = speed, room, engines
        self._unevenness = unevenness
        self._now_s, self._progress = now_s, 0.0
        self._running, self._waiting = _Running(), deque[Request]()
        self.tokens = 0.0
        """Number of tokens made so far."""

        self.busy_s = 0.0
        """Seconds so far in which any sequence ran."""

    @property
    def num_running(self) -> int:
        """Number of running sequences."""
        return len(self._running.by_key)

    @property
    def num_requests(self) -> int:
        """Number of requests that run or wait."""
        return len(self._running.by_key) + len(self._waiting)

    def add(self, request: Request, now_s: float) -> None:
        """Adds a request. The engine must have been advanced to `now_s`."""
        self._idle_until(now_s)
        self._waiting.append(request)
        self._fill()

    def next_end_s(self) -> float:
        """When the next sequence ends, if nothing else happens; infinity if nothing runs."""
        if not self._running.ends:
            return math.inf
        return self._now_s + (self._running.ends[0][0] - self._progress) * self._token_s()

    def advance(self, now_s: float) -> list[tuple[float, str]]:
        """Moves to `now_s`; returns what has ended until then, (second, key), in order."""
        ended: list[tuple[float, str]] = []
        running = self._running
        while running.ends and (end_s := self.next_end_s()) <= now_s:
            self._move(max(running.ends[0][0], self._progress), end_s)
            _, key = running.remove_first()
            ended.append((end_s, key))
            self._fill()
        if running.ends and now_s > self._now_s:
            more = (now_s - self._now_s) / self._token_s()
            self._move(self._progress + more, now_s)
        self._idle_until(now_s)
        return ended

    def abort(self) -> list[Request]:
        """Ends all requests; returns them with what each still needs."""
        left = [Request(key, max(end - self._progress, 0.0)) for key, end in self._running.by_key.items()]
        left += self._waiting
        self._running.by_key.clear()
        self._running.ends.clear()
        self._waiting.clear()
        return left

    def resize(self, engines: float, room: int) -> None:
        """Changes the number of engines. The model must have been advanced to this moment. Sequences that
        have no room any more wait, those that would end last; they keep their tokens."""
        self._engines, self._room = engines, room
        for end, key in self._running.keep_first(max(room, 0)):
            self._waiting.appendleft(Request(key, max(end - self._progress, 0.0)))
        self._fill()

    def _token_s(self) -> float:
        running = len(self._running.ends)
        fuller = self._unevenness * (1 - running / self._running.most)
        return self._speed.token_s(max(running / self._engines + fuller, 1.0))

    def _move(self, progress: float, now_s: float) -> None:
        self.tokens += (progress - self._progress) * len(self._running.ends)
        self.busy_s += now_s - self._now_s
        self._progress, self._now_s = progress, now_s

    def _idle_until(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)

    def _fill(self) -> None:
        while self._waiting and len(self._running.ends) < self._room:
            request = self._waiting.popleft()
            self._running.add(request.key, self._progress + request.tokens)
