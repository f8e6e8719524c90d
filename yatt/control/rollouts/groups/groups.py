"""Prompt groups of one controller: their samples and scores so far, and whether they may be trained on.

A prompt group stays on the controller that opened it until the iteration that trains on it is done. Groups
that are accepted beyond the target of an iteration, and interrupted groups, are carried to the next one; all
are part of a checkpoint. Token ids and log-probs are packed: 8 bytes per token.
"""

import itertools
from collections.abc import Collection

import msgspec

from yatt.core.figures.evaluation import TRUNCATED as TRUNCATED
from yatt.core.figures.judge_signs import judge_measures, order_agreement
from yatt.core.samples.rewards import EQUAL_REWARDS, Shaping, shaped_reward
from yatt.errors import WorkerFailed
from yatt.records.cluster import GroupFact
from yatt.records.message import PlacedMedia, Rollout, SampleFact, Turn, pack_ids, unpack_ids

MOST_VERDICT = 2000
"""Number of characters of a verdict's end that are kept for people."""


class SampleState(msgspec.Struct, kw_only=True):
    """State of one completion. `finish_reason` is '' until it is complete."""

    index: int
    turns: list[Turn] = []
    """All turns after the prompt."""

    observations: list[str] = []
    """Text of the turns that are not the policy's."""

    finish_reason: str = ""
    text: str = ""
    """Decoded while the sample is scored; decoded again to show it."""

    scores: dict[str, float] = {}
    extras: dict[str, float] = {}
    """Other numbers of the reward functions, by 'name/key'."""

    verdicts: dict[str, str] = {}
    unmeasured: dict[str, str] = {}
    """Why scores are missing: those of weight 0, and those of functions that do not apply to the sample."""

    failed: str = ""
    is_users_failure: bool = False
    """Whether the user's code or the text of a GenRM caused `failed`, not a failure of a machine."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the policy has sampled."""
        return sum(turn.num_tokens for turn in self.turns if turn.is_sampled)

    @property
    def num_response_tokens(self) -> int:
        """Number of all tokens after the prompt."""
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def num_turns(self) -> int:
        """Number of the policy's turns."""
        return sum(turn.is_sampled for turn in self.turns)

    @property
    def is_taught(self) -> bool:
        """Whether a teacher has rewarded its tokens, or said which it would rather have written."""
        return any(turn.is_taught for turn in self.turns)

    @property
    def response(self) -> bytes:
        """Packed ids of all tokens after the prompt."""
        return b"".join(turn.token_ids for turn in self.turns)

    @property
    def token_ids(self) -> list[int]:
        """Ids of all tokens after the prompt."""
        return unpack_ids(self.response)

    @property
    def is_turn_over(self) -> bool:
        """Whether the policy has ended its turn, and nothing has answered yet."""
        return bool(self.turns) and bool(self.turns[-1].finish_reason)

    @property
    def has_begun_turn(self) -> bool:
        """Whether the policy has sampled a part of its present turn."""
        return bool(self.turns) and self.turns[-1].is_sampled and not self.is_turn_over

    def extend(self, ids: bytes, logprobs: bytes, policy_version: int) -> None:
        """Appends packed tokens that `policy_version` sampled to the policy's present turn."""
        has_begun = self.has_begun_turn
        turn = self.turns[-1] if has_begun else Turn(b"", is_sampled=True)
        self.turns = [*self.turns[: len(self.turns) - has_begun], turn.longer(ids, logprobs, policy_version)]

    def cut_turn(self, num_tokens: int) -> None:
        """Drops the tokens of the policy's present turn after its first `num_tokens`."""
        self.turns = [*self.turns[:-1], self.turns[-1].shorter(num_tokens)]

    def end_turn(self, finish_reason: str) -> None:
        """The policy has ended its present turn."""
        self.turns = [*self.turns[:-1], msgspec.structs.replace(self.turns[-1], finish_reason=finish_reason)]

    def observe(self, ids: bytes, text: str, media: tuple[PlacedMedia, ...] = ()) -> None:
        """Appends packed tokens that the policy is given, what they say, and their pictures' places."""
        self.turns, self.observations = [*self.turns, Turn(ids, media=media)], [*self.observations, text]

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
        spans = (span for turn in self.turns for span in turn.policy_versions)
        return min((version for version, _, _ in spans), default=now)


class PromptGroup(msgspec.Struct, kw_only=True):
    """All completions of one prompt. `number` orders prompts over the whole run."""

    number: int
    row: int
    prompt_text: str
    """For people and functions: without the model's control tokens."""

    prompt: bytes
    """Token ids, packed."""

    samples: list[SampleState]
    media: tuple[PlacedMedia, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt) // 4

    def is_sampled(self) -> bool:
        """Whether every completion is complete or has failed."""
        return all(s.finish_reason or s.failed for s in self.samples)

    def is_scored(self, names: tuple[str, ...]) -> bool:
        """Whether every completion has failed, or has all scores (or the reason for none)."""
        wanted = set(names)
        return all(
            s.failed or (s.finish_reason and wanted <= s.scores.keys() | s.unmeasured.keys())
            for s in self.samples
        )

    def refuse_scoreless(self, weights: dict[str, float]) -> None:
        """Fails samples to which no function that counts and no teacher applies: a sum of nothing is no
        reward."""
        names = [name for name, weight in weights.items() if weight]
        for sample in self.samples:
            if not (sample.failed or sample.is_taught) and all(name in sample.unmeasured for name in names):
                sample.fail(f"prompt {self.number}: no reward function has a score for it", is_users=True)

    def failure(self) -> SampleState | None:
        """Returns the first failed sample; a group with one is not trained on."""
        return next((s for s in self.samples if s.failed), None)

    def teaches_nothing(self, weights: dict[str, float], shaping: Shaping, by: str) -> bool:
        """Whether all rewards are equal and no teacher adds to them; or all scores of `by`, if named and
        each completion has it."""
        known = [s.scores[by] for s in self.samples if by in s.scores and by not in s.unmeasured]
        is_same = len(known) == len(self.samples) and is_flat(known)
        is_taught = any(sample.is_taught for sample in self.samples)
        return is_same or (is_flat(self.rewards(weights, shaping)) and not is_taught)

    def restart_older(self, oldest: int, now: int) -> bool:
        """Restarts completions with tokens of a policy before `oldest`; returns whether there were any."""
        old = [s for s in self.samples if s.oldest_version(now) < oldest]
        for sample in old:
            sample.restart()
        return bool(old)

    def oldest_version(self, now: int) -> int:
        """Returns the policy version of its oldest token; `now` if it has none."""
        return min(sample.oldest_version(now) for sample in self.samples)

    def rewards(self, weights: dict[str, float], shaping: Shaping) -> list[float]:
        """Returns the weighted sum of each completion's scores, minus the penalty for its length."""
        sums = (
            sum(w * s.scores[name] for name, w in weights.items() if w and name not in s.unmeasured)
            for s in self.samples
        )
        return [
            shaped_reward(reward, s.num_response_tokens, shaping)
            for reward, s in zip(sums, self.samples, strict=True)
        ]

    def sample_id(self, sample: SampleState) -> int:
        """Returns the sample's number, unique over the run."""
        return self.number * len(self.samples) + sample.index

    def facts(self, weights: dict[str, float], shaping: Shaping) -> tuple[SampleFact, ...]:
        """Returns metadata of the group's samples."""
        rewards = self.rewards(weights, shaping)
        return tuple(
            SampleFact(
                sample_id=self.sample_id(s),
                prompt_group=self.number,
                reward=reward,
                num_prompt_tokens=self.num_prompt_tokens,
                num_completion_tokens=s.num_tokens,
                is_masked=shaping.masks_truncated and s.finish_reason == TRUNCATED,
                is_cut=s.finish_reason == TRUNCATED,
                num_observation_tokens=s.num_response_tokens - s.num_tokens,
                num_turns=s.num_turns,
            )
            for s, reward in zip(self.samples, rewards, strict=True)
        )

    def fact(
        self,
        weights: dict[str, float],
        shaping: Shaping,
        now: int,
        judges: Collection[str] = (),
        watched: Collection[str] = (),
    ) -> GroupFact:
        """Returns metadata of an accepted group; `now` is the policy version that samples.

        Args:
            judges: scores of which the metadata says too how they go with the length, and with those that
                are only `watched`.
        """
        return GroupFact(
            number=self.number,
            samples=self.facts(weights, shaping),
            scores=self.mean_scores() | self._of_judges(judges) | self._agreements(judges, watched),
            ages=tuple(now - sample.oldest_version(now) for sample in self.samples),
        )

    def mean_scores(self) -> dict[str, float]:
        """Returns the mean of each score and other number over the completions that have it."""
        found: dict[str, list[float]] = {}
        for sample in self.samples:
            for name, value in (*sample.scores.items(), *sample.extras.items()):
                found.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in sorted(found.items())}

    def _of_judges(self, judges: Collection[str]) -> dict[str, float]:
        found = dict[str, float]()
        for judge in judges:
            scored = [sample for sample in self.samples if judge in sample.scores]
            if len(scored) > 1:
                scores, lengths = [s.scores[judge] for s in scored], [s.num_tokens for s in scored]
                found |= {f"{judge}/{key}": value for key, value in judge_measures(scores, lengths).items()}
        return found

    def _agreements(self, judges: Collection[str], watched: Collection[str]) -> dict[str, float]:
        found = dict[str, float]()
        for judge, other in itertools.product(judges, watched):
            both = [s.scores for s in self.samples if judge in s.scores and other in s.scores]
            share = order_agreement([each[judge] for each in both], [each[other] for each in both])
            if share is not None:
                found[f"{judge}/agrees/{other}"] = share
        return found

    def rollouts(self) -> dict[int, Rollout]:
        """Returns the samples for the trainer, by sample id."""
        prompt = Turn(self.prompt, media=self.media)
        return {
            self.sample_id(s): Rollout(sample_id=self.sample_id(s), turns=(prompt, *s.turns))
            for s in self.samples
        }


def groups_due(groups: dict[int, PromptGroup], now: int, max_age: int) -> set[int]:
    """Returns the numbers of groups that would be too old to be trained on after one more iteration."""
    return {n for n, group in groups.items() if group.oldest_version(now) <= min(now - max_age, now - 1)}


def is_flat(rewards: list[float]) -> bool:
    """Whether all rewards are equal."""
    return max(rewards) - min(rewards) < EQUAL_REWARDS


def new_group(
    number: int, row: int, text: str, ids: list[int], n: int, media: tuple[PlacedMedia, ...] = ()
) -> PromptGroup:
    """Returns a prompt group without any completion."""
    samples = [SampleState(index=index) for index in range(n)]
    return PromptGroup(
        number=number, row=row, prompt_text=text, prompt=pack_ids(ids), samples=samples, media=media
    )


class NodeState(msgspec.Struct, kw_only=True):
    """A controller's part of a checkpoint (`yatt.control.rollouts.groups.carried` writes and reads it)."""

    data: str = ""
    """Fingerprint of the training files that contain the groups' rows; empty if unknown."""

    next_number: int
    left: tuple[range, ...] = ()
    """Lower numbers that this node is to open (`yatt.core.samples.prompts.PromptNumbers`)."""

    accepted: list[PromptGroup] = []
    unfinished: list[PromptGroup] = []

    counters: dict[int, dict[str, int]] = {}
    """Counters for metrics that are in no row yet, by number of the group."""
