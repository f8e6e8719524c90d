"""Runs the sampling track of real runs (`yatt.core.sampling_track`) against a clock that jumps.

The durations of sampling and of training are given for each batch. Loading and publishing weights take no
time of their own here: a run counts them in its seconds of training.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from yatt.core.sampling_track import (
    Action,
    Event,
    Grant,
    Loaded,
    LoadVersion,
    SampleBatch,
    Sampled,
    Track,
    TrackResumed,
    TrackRules,
    VersionPublished,
    WantBatch,
    WantPublishing,
    step,
)


@dataclass(frozen=True, slots=True)
class TrackTimes:
    """When one batch was sampled and trained, in seconds; `age` in policy versions when it was begun."""

    begin_s: float
    sampled_s: float
    trained_s: float
    age: int


class _Tracks:
    def __init__(self, sampling_s: Sequence[float], train_s: float, rules: TrackRules) -> None:
        self._sampling_s, self._train_s, self._rules = sampling_s, train_s, rules
        self._track, self._now_s, self._order = Track(), 0.0, itertools.count()
        self._events: list[tuple[float, int, Event]] = []
        self._training = self._wants()
        self.begins: dict[int, tuple[float, int]] = {}
        self.sampled: dict[int, float] = {}
        self.trained: dict[int, float] = {}

    def run(self) -> list[TrackTimes]:
        self._handle(TrackResumed(0))
        self._handle(next(self._training))
        while self._events and len(self.trained) < len(self._sampling_s):
            self._now_s, _, event = heapq.heappop(self._events)
            if isinstance(event, Sampled):
                self.sampled[event.batch] = self._now_s
            elif isinstance(event, WantPublishing):
                self.trained[len(self.trained) + 1] = self._now_s
            self._handle(event)
        return [
            TrackTimes(begin_s, self.sampled[batch], self.trained[batch], age)
            for batch, (begin_s, age) in sorted(self.begins.items())
            if batch in self.trained
        ]

    def _wants(self) -> Iterator[Event]:
        """The training track's events, each after the one before was granted."""
        for batch in itertools.count():
            yield from (VersionPublished(batch), WantBatch(batch + 1), WantPublishing())

    def _handle(self, event: Event) -> None:
        self._track, actions = step(self._track, event, self._rules)
        waiting = deque[Action](actions)
        while waiting:
            self._act(waiting.popleft())

    def _act(self, action: Action) -> None:
        match action:
            case SampleBatch(batch, version):
                self.begins[batch] = self._now_s, batch - 1 - version
                self._at(self._sampling_s[batch - 1], Sampled(batch, is_whole=True))
            case LoadVersion(version):
                self._at(0.0, Loaded(version))
            case Grant():
                event = next(self._training)
                self._at(self._train_s if isinstance(event, WantPublishing) else 0.0, event)

    def _at(self, after_s: float, event: Event) -> None:
        heapq.heappush(self._events, (self._now_s + after_s, next(self._order), event))


def track_times(sampling_s: Sequence[float], train_s: float, *, ahead: int, max_age: int) -> list[TrackTimes]:
    """Returns the times of all batches, in order.

    Args:
        sampling_s: seconds that the sampling of each batch takes.
        train_s: seconds from a batch that is complete to the publication of the policy trained on it.
        ahead: see `rollout.ahead`.
        max_age: see `rollout.max_policy_age`.
    """
    rules = TrackRules(total_iterations=len(sampling_s), ahead=ahead, max_age=max_age)
    return _Tracks(sampling_s, train_s, rules).run()
