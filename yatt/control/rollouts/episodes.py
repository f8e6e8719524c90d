"""Continues samples turn by turn: completions from the engines, observations from the user's environment.

Without an environment a sample has one turn of the policy. An environment keeps no state: it gets all turns
at each call, so an interrupted episode continues on any process and after any restart.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import msgspec

from yatt.adapters.inputs.data_rows import ASSISTANT
from yatt.adapters.inputs.encoded_prompt import encode_observation
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.config.schema import RunConfig
from yatt.control.gpus.engines import ABORTED
from yatt.control.node import Node
from yatt.control.rollouts.groups.groups import TRUNCATED, SampleState
from yatt.control.rollouts.router import Router
from yatt.control.rollouts.scoring.judging import users_failure
from yatt.control.rollouts.scoring.subject import Subject
from yatt.core.figures.drop_counters import MEDIA_FAULTS
from yatt.core.gpus.placement import ROLLOUT
from yatt.core.samples.lengths import key_of
from yatt.core.samples.placeholders import PictureTokens, placed_in, with_placeholders
from yatt.core.samples.prompts import sample_seed
from yatt.core.samples.stop_text import stop_across
from yatt.errors import DeadlineExceeded, WorkerFailed
from yatt.models.pictures.tokens import picture_tokens
from yatt.records import message as m
from yatt.records.message import Turn, pack_ids, unpack_ids

CallStep = Callable[[m.Step], Awaitable[m.Message]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the policy samples. `prefix` begins the ids of requests; `seed_of` maps a prompt number to that of
    its seed."""

    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    prefix: str = ""
    seed_of: Callable[[int], int] = int


def rollout_sampling(config: RunConfig) -> Sampling:
    """Of samples to train on."""
    section = config.rollout
    return Sampling(
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        ignore_eos=section.ignore_eos,
    )


def validation_sampling(config: RunConfig) -> Sampling:
    """Of held-out prompts, with seeds of their own."""
    return Sampling(
        temperature=config.validation.temperature, prefix="val/", seed_of=lambda number: -1 - number
    )


def evaluation_sampling(config: RunConfig) -> Sampling:
    """Of an evaluation: with the seeds of a validation, and otherwise as samples to train on."""
    seeded, rollout = validation_sampling(config), rollout_sampling(config)
    return replace(rollout, temperature=seeded.temperature, prefix=seeded.prefix, seed_of=seeded.seed_of)


class Episodes:
    """Extends samples until their episodes end.

    Args:
        tokenizer: the policy's.
        call_step: calls the environment in one of this node's reward processes.
    """

    def __init__(
        self, node: Node, tokenizer: Tokenizer, router: Router, call_step: CallStep, sampling: Sampling
    ) -> None:
        self._run, self._section, self._router = node.config.run, node.config.rollout, router
        self._environment, self.tokenizer = node.config.environment, tokenizer
        self._is_rendered = node.config.data.apply_chat_template
        media = node.config.media
        self._most_pictures, limits = media.most_per_prompt, (media.min_pixels, media.max_pixels)
        self._tokens = picture_tokens(node.config.model.path, *limits) if self._environment.images else None
        self._call_step, self._sampling = call_step, sampling

    def text_of(self, sample: SampleState) -> str:
        """What the policy has said: its turns, with an empty line between them."""
        return "\n\n".join(text for role, text in self.turns_of(sample) if role == ASSISTANT)

    def turns_of(self, sample: SampleState) -> tuple[tuple[str, str], ...]:
        """Role and text of each turn after the prompt; the policy's role is assistant."""
        observations = iter(sample.observations)
        return tuple(
            (ASSISTANT, self.tokenizer.decode(unpack_ids(turn.token_ids)))
            if turn.is_sampled
            else (self._environment.role, next(observations))
            for turn in sample.turns
        )

    def with_turns(self, subject: Subject) -> Subject:
        """The subject with its turns as text, if there is an environment."""
        return replace(subject, turns=self.turns_of(subject.sample)) if self._environment.path else subject

    async def abort(self) -> None:
        """Aborts the policy's requests; their completions return with the tokens so far."""
        await self._router.abort(ROLLOUT)

    def expect(self, num_groups: int) -> None:
        """Tells the router how many groups are about to be opened."""
        self._router.expected = num_groups * self._section.n

    async def extend(self, subject: Subject, may_sample: Callable[[], bool]) -> None:
        """Continues one sample as far as it is allowed to sample. A failure is noted in the sample."""
        sample, where = subject.sample, subject.place
        try:
            while not sample.finish_reason and not sample.failed:
                if sample.is_turn_over:
                    await self._observe(subject)
                elif not may_sample() or not await self._complete(subject):
                    return
        except (WorkerFailed, DeadlineExceeded) as error:
            sample.fail_by_machines(f"{where}: {error}", deterministic=self._run.deterministic)

    async def _complete(self, subject: Subject) -> bool:
        """Requests the rest of the policy's turn; returns whether the sample may go on at once: the turn has
        ended, or its engine was put to sleep."""
        sample = subject.sample
        completed = await self._router.complete(ROLLOUT, self._request(subject))
        if completed.finish_reason == m.MEDIA_FAULT:
            subject.counters[MEDIA_FAULTS] += 1
        if completed.finish_reason in ("error", m.MEDIA_FAULT):  # refused: no engine can run it
            sample.fail(f"{subject.place}: {completed.error}", is_users=True)
            return False
        num_before = sample.turns[-1].num_tokens if sample.has_begun_turn else 0
        sample.extend(completed.token_ids, completed.logprobs, completed.policy_version)
        subject.counters["rollout/tokens"] += len(completed.token_ids) // 4
        if self._ends_across(sample, num_before):
            completed = msgspec.structs.replace(completed, finish_reason="stop")
        if completed.finish_reason == m.MOVED:
            return True
        if completed.finish_reason == ABORTED:
            if self._section.oversample > 1:
                subject.counters[key_of(sample.num_tokens, "cut")] += 1
            return False
        sample.end_turn(completed.finish_reason)
        is_last = not self._environment.path or sample.num_turns >= self._environment.max_turns
        if is_last or completed.finish_reason == TRUNCATED:
            sample.finish_reason = completed.finish_reason
        return True

    def _ends_across(self, sample: SampleState, num_before: int) -> bool:
        """Ends the present turn at a stop text of which a part was sampled before this request."""
        stops = self._section.stop
        if not stops or not num_before or sample.turns[-1].num_tokens == num_before:
            return False
        ids = unpack_ids(sample.turns[-1].token_ids)
        end = stop_across(ids, num_before, stops, self.tokenizer.decode)
        if end is None:
            return False
        sample.cut_turn(end)
        return True

    def _request(self, subject: Subject) -> m.SampleRequest:
        section, sampling, group, sample = self._section, self._sampling, subject.group, subject.sample
        num_tokens = sample.num_response_tokens
        return m.SampleRequest(
            request_id=f"{sampling.prefix}{group.number}/{sample.index}/{num_tokens}",
            prompt_ids=group.prompt + sample.response,
            seed=sample_seed(self._run.seed, sampling.seed_of(group.number), sample.index, num_tokens),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=section.max_response_tokens - num_tokens,
            stop=section.stop,
            media=placed_in((Turn(group.prompt, media=group.media), *sample.turns)),
            ignore_eos=sampling.ignore_eos,
            group=f"{sampling.prefix}{group.number}",
        )

    # ---- the environment ------------------------------------------------------------------------

    async def _observe(self, subject: Subject) -> None:
        """Asks the environment for its answer to the policy's turn."""
        sample = subject.sample
        answer = await self._call_step(self._step(subject))
        if not isinstance(answer, m.Stepped):
            subject.counters["environment/failed"] += 1
            sample.fail(f"environment, {subject.place}: {users_failure(answer).error}", is_users=True)
            return
        subject.counters["environment/steps"] += 1
        if answer.is_end:
            sample.finish_reason = sample.turns[-1].finish_reason
            return
        try:
            ids, media = self._observation(subject, answer)
        except ValueError as error:
            subject.counters["environment/failed"] += 1
            sample.fail(f"environment, {subject.place}: its answer cannot be encoded: {error}", is_users=True)
            return
        shown = (subject.group.media, *(turn.media for turn in sample.turns))
        num_pictures = sum(map(len, shown)) + len(media)
        has_room = sample.num_response_tokens + len(ids) < self._section.max_response_tokens
        if not has_room or (media and num_pictures > self._most_pictures):
            sample.finish_reason = TRUNCATED  # no room for another turn
            return
        sample.observe(pack_ids(ids), answer.observation, media)

    def _step(self, subject: Subject) -> m.Step:
        return m.Step(
            prompt=subject.group.prompt_text,
            turns=self.turns_of(subject.sample),
            row=subject.ref,
            is_held_out=subject.is_held_out,
        )

    def _observation(
        self, subject: Subject, answer: m.Stepped
    ) -> tuple[list[int], tuple[m.PlacedMedia, ...]]:
        """Returns the ids of an answer, with a token for each feature of its pictures, and their places."""
        if not answer.media:
            return self._observation_ids(subject, answer.observation, None), ()
        assert self._tokens is not None, "refused by the reward process without environment.images"
        ids = self._observation_ids(subject, answer.observation, self._tokens)
        return with_placeholders(ids, answer.media, self._tokens)

    def _observation_ids(self, subject: Subject, text: str, tokens: PictureTokens | None) -> list[int]:
        is_chat = self._is_rendered and not isinstance(subject.row.prompt, str)
        role = self._environment.role if is_chat else ""
        if tokens is not None:
            ids = encode_observation(text, tokens, self.tokenizer, role)
        else:
            ids = self.tokenizer.encode_answer(role, text) if role else self.tokenizer.encode_plain(text)
        if not is_chat:
            return ids
        last = unpack_ids(subject.sample.turns[-1].token_ids)[-1:]
        has_ended = bool(last) and last[0] in self.tokenizer.eos_ids
        return ids[1:] if has_ended and ids[:1] and ids[0] in self.tokenizer.eos_ids else ids
