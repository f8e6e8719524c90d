"""Prompt groups of one controller: what was sampled and scored so far, and whether it may be trained on.

A prompt group lives on the controller that opened it until the iteration that trains on it is done.
Groups that are accepted beyond what an iteration needs, and groups broken off in the middle, are
carried to the next one; all of it is part of a checkpoint.
"""

import msgspec

from yatt.records.message import Rollout, SampleFact, pack_floats, pack_ids

EQUAL_REWARDS = 1e-6  # a group whose rewards differ by less teaches a group-relative estimator nothing


class SampleState(msgspec.Struct, kw_only=True):
    """One completion on its way. `finish_reason` is '' until it is complete."""

    index: int
    completion_ids: list[int] = []
    logprobs: list[float] = []
    spans: list[tuple[int, int, int]] = []
    finish_reason: str = ""
    text: str = ""
    scores: dict[str, float] = {}
    verdicts: dict[str, str] = {}
    failed: str = ""

    def extend(self, ids: list[int], logprobs: list[float], policy_version: int) -> None:
        """Append tokens that `policy_version` sampled."""
        start = len(self.completion_ids)
        self.completion_ids = self.completion_ids + ids
        self.logprobs = self.logprobs + logprobs
        if ids:
            self.spans = [*self.spans, (policy_version, start, start + len(ids))]

    def restart(self) -> None:
        """Forget what was sampled."""
        self.completion_ids, self.logprobs, self.spans, self.finish_reason = [], [], [], ""


class PromptGroup(msgspec.Struct, kw_only=True):
    """All completions of one prompt. `number` orders prompts over the whole run."""

    number: int
    row: int
    prompt_text: str
    prompt_ids: list[int]
    samples: list[SampleState]

    def is_sampled(self) -> bool:
        """Whether every completion is complete or has failed."""
        return all(s.finish_reason or s.failed for s in self.samples)

    def is_scored(self, names: tuple[str, ...]) -> bool:
        """Whether every completion has all scores, or has failed."""
        return all(s.failed or (s.finish_reason and set(names) <= set(s.scores)) for s in self.samples)

    def failure(self) -> str:
        """Why the group cannot be trained on whole, or ''."""
        return next((s.failed for s in self.samples if s.failed), "")

    def rewards(self, weights: dict[str, float]) -> list[float]:
        """Weighted sum of the scores of each completion."""
        return [sum(w * s.scores[name] for name, w in weights.items() if w) for s in self.samples]

    def is_flat(self, weights: dict[str, float]) -> bool:
        """Whether all rewards are equal."""
        rewards = self.rewards(weights)
        return max(rewards) - min(rewards) < EQUAL_REWARDS

    def sample_id(self, sample: SampleState) -> int:
        """Unique over the run."""
        return self.number * len(self.samples) + sample.index

    def facts(self, weights: dict[str, float]) -> tuple[SampleFact, ...]:
        """Metadata of the group's samples."""
        return tuple(
            SampleFact(self.sample_id(s), self.number, reward, len(self.prompt_ids), len(s.completion_ids))
            for s, reward in zip(self.samples, self.rewards(weights), strict=True)
        )

    def mean_scores(self) -> dict[str, float]:
        """Mean of each score over the completions."""
        names = sorted({name for s in self.samples for name in s.scores})
        return {n: sum(s.scores.get(n, 0.0) for s in self.samples) / len(self.samples) for n in names}

    def rollouts(self) -> dict[int, Rollout]:
        """What the trainer gets, by sample id."""
        prompt = pack_ids(self.prompt_ids)
        return {
            self.sample_id(s): Rollout(
                sample_id=self.sample_id(s),
                prompt_ids=prompt,
                completion_ids=pack_ids(s.completion_ids),
                sampler_logprobs=pack_floats(s.logprobs),
                policy_versions=tuple((v, a, b) for v, a, b in s.spans),
                finish_reason=s.finish_reason,
            )
            for s in self.samples
        }


class NodeState(msgspec.Struct, kw_only=True):
    """A controller's part of a checkpoint."""

    version: int = 1
    next_number: int
    accepted: list[PromptGroup]
    unfinished: list[PromptGroup]
