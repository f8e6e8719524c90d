"""The course of one batch: completions, then the verdicts on each, until its groups are full. Pure.

What works on the requests is a fleet: models of whole roles, by which a split is predicted
(`yatt.core.gpus.prediction`), or of every engine (`yatt simulate`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BatchSample:
    """One completion to be sampled: its tokens, and those of each GenRM's verdict on it, by role.

    With 0 tokens it is complete already, and only the verdicts are missing.
    """

    tokens: float
    verdicts: Mapping[str, float]


More = Callable[[int], Sequence[BatchSample] | None]
"""Called with a sample's number when its last verdict is there; returns more samples to be sampled, such as
those of groups that replace dropped ones, or None if the batch has all it needs."""


class Fleet(Protocol):
    """All engines, at a moment that only moves forward."""

    def submit(self, role: str, request: int, tokens: float, now_s: float, /) -> None:
        """Takes a request by its number: the completion of a sample, or a question about it."""

    def assign(self, batch: "BatchLoop") -> None:
        """Gives engines what waits, if `submit` does not."""

    def next_s(self) -> float:
        """When something happens next; infinity if nothing does."""

    def work(self, batch: "BatchLoop") -> None:
        """Moves to the batch's moment: calls `BatchLoop.ended` for each request that ends; moves slabs."""


class BatchLoop:
    """One batch.

    Args:
        rollout: the role of completions.
        judges: by role of a GenRM, the number of questions about a completion, which have equal shares of
            the tokens of its verdicts.
    """

    def __init__(self, fleet: Fleet, rollout: str, judges: Mapping[str, int], more: More) -> None:
        self._fleet, self._rollout, self._more, self._judges = fleet, rollout, more, judges
        self._unjudged, self._is_over = list[int](), False
        self.samples: list[BatchSample] = []
        """By number."""

        self.num_open = dict.fromkeys((rollout, *judges), 0)
        """Requests that have not ended, by role."""

        self.backlog = dict.fromkeys(judges, 0.0)
        """Tokens of verdicts that are not there yet, by role."""

        self.now_s = 0.0

    def run(self, limit_s: float = math.inf) -> float:
        """Samples and judges everything, or until it takes longer than the limit; returns the seconds."""
        while any(self.num_open.values()) and not self._is_over and self.now_s <= limit_s:
            self.now_s = self._fleet.next_s()
            self._fleet.work(self)
        return self.now_s

    def sample_of(self, request: int) -> int:
        """Returns the number of the sample that a request is about."""
        return request // self._most_requests

    @property
    def _most_requests(self) -> int:
        """Requests about one sample; the numbers of its requests are the next ones from a multiple of it."""
        return 1 + sum(self._judges.values())

    def verdict_tokens(self, role: str, number: int) -> float:
        """Returns the tokens of the answer to one question to a GenRM about a sample."""
        return self.samples[number].verdicts[role] / self._judges[role]

    def ended(self, role: str, request: int) -> None:
        """Handles the end of a completion or of the answer to a question."""
        number = self.sample_of(request)
        self.num_open[role] -= 1
        if role == self._rollout:
            self._ask(number)
        else:
            self.backlog[role] -= self.verdict_tokens(role, number)
            self._unjudged[number] -= 1
        if not self._unjudged[number]:
            samples = self._more(number)
            self._is_over = self._is_over or samples is None
            self.open(samples or ())

    def open(self, samples: Sequence[BatchSample]) -> None:
        """Asks for these completions, or for verdicts on them."""
        for sample in samples:
            number = len(self.samples)
            self.samples.append(sample)
            self._unjudged.append(sum(self._judges[role] for role in sample.verdicts))
            if sample.tokens > 0:
                self._submit(self._rollout, number * self._most_requests, sample.tokens)
            else:
                self._ask(number)
        self._fleet.assign(self)

    def _ask(self, number: int) -> None:
        """Asks all questions about a complete sample."""
        request = number * self._most_requests
        for judge in self.samples[number].verdicts:
            tokens = self.verdict_tokens(judge, number)
            for _ in range(self._judges[judge]):
                request += 1
                self.backlog[judge] += tokens
                self._submit(judge, request, tokens)

    def _submit(self, role: str, request: int, tokens: float) -> None:
        self.num_open[role] += 1
        self._fleet.submit(role, request, tokens, self.now_s)
