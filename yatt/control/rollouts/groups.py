"""Prompt groups of one controller: their samples and scores so far, and whether they may be trained on.

A prompt group stays on the controller that opened it until the iteration that trains on it is done. Groups
that are accepted beyond the target of an iteration, and interrupted groups, are carried to the next one; all
are part of a checkpoint. Token ids and log-probs are packed: 8 bytes per token.
"""

import msgspec

from yatt.core.rewards import Shaping, shaped
from yatt.errors import WorkerFailed
from yatt.records.message import Rollout, SampleFact, pack_ids, unpack_ids

EQUAL_REWARDS = 1e-6  # below this difference of rewards a group-relative estimator learns nothing
TRUNCATED = "length"
"""Finish reason of a completion that was cut by the length limit."""

MOST_VERDICT = 2000
"""Number of characters of a verdict's end that are kept for people."""


class SampleState(msgspec.Struct, kw_only=True):
    """State of one completion. `finish_reason` is '' until it is complete."""

    index: int
    completion: bytes = b""
    """Token ids, little-endian int32."""

    logprobs: bytes = b""
    """Little-endian float32."""

    spans: list[tuple[int, int, int]] = []
    finish_reason: str = ""
    text: str = ""
    """Decoded while the sample is scored; decoded again to show it."""

    scores: dict[str, float] = {}
    extras: dict[str, float] = {}
    """Other numbers of the reward functions, by 'name/key'."""

    verdicts: dict[str, str] = {}
    unmeasured: dict[str, str] = {}
    """Why scores of weight 0 are missing."""

    failed: str = ""
    is_users_failure: bool = False
    """Whether the user's code or the text of a GenRM caused `failed`, not a failure of a machine."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens sampled so far."""
        return len(self.completion) // 4

    @property
    def token_ids(self) -> list[int]:
        """The token ids, unpacked."""
        return unpack_ids(self.completion)

    def extend(self, ids: bytes, logprobs: bytes, policy_version: int) -> None:
        """Appends packed tokens that `policy_version` sampled."""
        start = self.num_tokens
        self.completion += ids
        self.logprobs += logprobs
        if ids:
            self.spans = [*self.spans, (policy_version, start, self.num_tokens)]

    def restart(self) -> None:
        """Resets the sample: removes its tokens, scores and failure."""
        fresh = SampleState(index=self.index)
        for name in self.__struct_fields__:
            setattr(self, name, getattr(fresh, name))

    def fail(self, why: str, *, is_users: bool = False) -> None:
        """This sample cannot be trained on."""
        self.failed, self.is_users_failure = why, is_users

    def fail_by_machines(self, why: str, *, deterministic: bool) -> None:
        """Fails this sample after repeated ends of engines or processes.

        Raises:
            WorkerFailed: in deterministic mode, where machine failures must not decide what is trained on.
        """
        if deterministic:
            raise WorkerFailed(f"{why} (run.deterministic: a lost sample would change the results)")
        self.fail(why)

    def oldest_version(self, now: int) -> int:
        """Returns the policy version of its oldest token; `now` if it has none."""
        return min((version for version, _, _ in self.spans), default=now)


class PromptGroup(msgspec.Struct, kw_only=True):
    """All completions of one prompt. `number` orders prompts over the whole run."""

    number: int
    row: int
    prompt_text: str
    """For people and functions: without the model's control tokens."""

    prompt: bytes
    """Token ids, packed."""

    samples: list[SampleState]

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt) // 4

    def is_sampled(self) -> bool:
        """Whether every completion is complete or has failed."""
        return all(s.finish_reason or s.failed for s in self.samples)

    def is_scored(self, names: tuple[str, ...]) -> bool:
        """Whether every completion has failed, or has all scores (or the reason for none, with weight 0)."""
        wanted = set(names)
        return all(
            s.failed or (s.finish_reason and wanted <= s.scores.keys() | s.unmeasured.keys())
            for s in self.samples
        )

    def failure(self) -> SampleState | None:
        """Returns the first failed sample; a group with one is not trained on."""
        return next((s for s in self.samples if s.failed), None)

    def restart_older(self, oldest: int, now: int) -> bool:
        """Restarts completions with tokens of a policy before `oldest`; returns whether there were any."""
        old = [s for s in self.samples if s.oldest_version(now) < oldest]
        for sample in old:
            sample.restart()
        return bool(old)

    def rewards(self, weights: dict[str, float], shaping: Shaping) -> list[float]:
        """Returns the weighted sum of each completion's scores, minus the penalty for its length."""
        sums = (sum(w * s.scores[name] for name, w in weights.items() if w) for s in self.samples)
        return [shaped(reward, s.num_tokens, shaping) for reward, s in zip(sums, self.samples, strict=True)]

    def sample_id(self, sample: SampleState) -> int:
        """Returns the sample's number, unique over the run."""
        return self.number * len(self.samples) + sample.index

    def facts(self, weights: dict[str, float], shaping: Shaping) -> tuple[SampleFact, ...]:
        """Returns metadata of the group's samples."""
        rewards = self.rewards(weights, shaping)
        return tuple(
            SampleFact(
                sample_id=self.sample_id(s), prompt_group=self.number, reward=reward,
                num_prompt_tokens=self.num_prompt_tokens, num_completion_tokens=s.num_tokens,
                is_masked=shaping.masks_truncated and s.finish_reason == TRUNCATED,
                is_cut=s.finish_reason == TRUNCATED,
            )
            for s, reward in zip(self.samples, rewards, strict=True)
        )  # fmt: skip

    def mean_scores(self) -> dict[str, float]:
        """Returns the mean of each score and other number over the completions that have it."""
        found: dict[str, list[float]] = {}
        for sample in self.samples:
            for name, value in (*sample.scores.items(), *sample.extras.items()):
                found.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in sorted(found.items())}

    def rollouts(self) -> dict[int, Rollout]:
        """Returns the samples for the trainer, by sample id."""
        return {
            self.sample_id(s): Rollout(
                sample_id=self.sample_id(s),
                prompt_ids=self.prompt,
                completion_ids=s.completion,
                sampler_logprobs=s.logprobs,
                policy_versions=tuple((v, a, b) for v, a, b in s.spans),
                finish_reason=s.finish_reason,
            )
            for s in self.samples
        }


def is_flat(rewards: list[float]) -> bool:
    """Whether all rewards are equal."""
    return max(rewards) - min(rewards) < EQUAL_REWARDS


def new_group(number: int, row: int, text: str, ids: list[int], n: int) -> PromptGroup:
    """Returns a prompt group without any completion."""
    samples = [SampleState(index=index) for index in range(n)]
    return PromptGroup(number=number, row=row, prompt_text=text, prompt=pack_ids(ids), samples=samples)


class NodeState(msgspec.Struct, kw_only=True):
    """A controller's part of a checkpoint (`yatt.control.rollouts.carried` writes and reads it)."""

    data: str = ""
    """Fingerprint of the training files that contain the groups' rows; empty if unknown."""

    next_number: int
    accepted: list[PromptGroup]
    unfinished: list[PromptGroup]
