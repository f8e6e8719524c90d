"""Verdicts of GenRMs: a question becomes text, the text goes to an engine or a service, a verdict comes back.

The answer is parsed in a reward process (`yatt.reward`), because a pattern may take too long. A question that
is not answered readably is asked again with another seed.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from yatt import clock
from yatt.adapters.inputs.text_parts import PICTURE, TextPart
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.adapters.net.judge_api import JudgeApi
from yatt.config.schema import GenRMSection, RunConfig
from yatt.control.gpus.engines import ABORTED
from yatt.control.gpus.prepared_requests import MediaUnusable
from yatt.control.rollouts.groups.groups import MOST_VERDICT, TRUNCATED
from yatt.control.rollouts.scoring.asked import (
    AskedQuestion,
    Encoded,
    OpenQuestions,
    QuestionEncoder,
    Refused,
    Rendered,
    Thought,
    note_answer,
    unreadable_message,
)
from yatt.core.gpus.placement import answering_role
from yatt.core.samples.prompts import sample_seed
from yatt.errors import WorkerFailed
from yatt.judging.protocol import Answer
from yatt.judging.reading import structure_of
from yatt.judging.soft import listed_at, on_grid, soft_verdict_of_texts
from yatt.judging.template import render_with_pictures
from yatt.judging.thinking import thought_room
from yatt.records import message as m
from yatt.records.episode import MediaRef
from yatt.records.judged import REFUSED, Said
from yatt.records.message import pack_ids

Complete = Callable[[str, m.SampleRequest], Awaitable[m.Completed]]
Abort = Callable[[str, tuple[str, ...]], Awaitable[None]]
FilesOf = Callable[[Sequence[MediaRef], str], Awaitable[Sequence[memoryview]]]
"""Gives the files of pictures, encoded for a GenRM behind a URL."""

CallReward = Callable[[m.Score | m.ScoreMany | m.JudgeGroup], Awaitable[m.Message]]


class Interrupted(Exception):
    """The question was ended by `Judge.interrupt` and has no answer. It is no failure."""


class Judge:
    """Asks the GenRMs of one node.

    Args:
        complete: sends a request to an engine of a role.
        abort: aborts requests to a role, by id.
        call_reward: calls one of this node's reward processes.
        num_nodes: nodes that share the rate limits of services.
        say: called with (name, error) when a service goes down, and with (name, "") when it recovers.
    """

    def __init__(
        self,
        config: RunConfig,
        complete: Complete,
        abort: Abort,
        call_reward: CallReward,
        num_nodes: int,
        say: Callable[[str, str], None],
    ) -> None:
        self._config, self._complete, self._abort, self._call_reward = config, complete, abort, call_reward
        self._encoder = QuestionEncoder(config)
        self._services = {
            g.name: JudgeApi(g, num_nodes, partial(say, g.name)) for g in config.genrms if g.api.url
        }
        self._structures = {g.name: structure_of(g.verdict) for g in config.genrms if g.template}
        self._files_of: FilesOf | None = None
        self._open = OpenQuestions()

    def show_with(self, files_of: FilesOf) -> None:
        """Sets what encodes pictures for judges behind URLs, in runs that have pictures."""
        self._files_of = files_of

    async def interrupt(self) -> None:
        """Ends all questions that are not answered; `answer` raises Interrupted.

        Questions of users' functions go on, because a part of an answer would change their scores; those to
        services too.
        """
        for role, keys in self._open.cut_all().items():
            await self._abort(role, keys)

    async def ask(self, genrm: GenRMSection, ask: m.Ask, sent: Rendered) -> Said:
        """Has a GenRM complete a text, in one request.

        Raises:
            WorkerFailed | DeadlineExceeded: it did not, after the retries.
        """
        if genrm.name in self._services:
            return await self._ask_service(genrm, ask, sent)
        encoded = await self._encoded(genrm, sent)
        return encoded if isinstance(encoded, Said) else await self._complete_text(genrm, ask, sent, encoded)

    async def _encoded(self, genrm: GenRMSection, sent: Rendered) -> Encoded | Said:
        """Returns the tokens of a question, or the reason why it cannot be asked."""
        try:
            encoded = await self._encoder.encode(genrm, sent.parts, sent.pictures)
        except ValueError as error:
            why = f"the pictures of the question to GenRM '{genrm.name}' cannot be shown: {error}"
            return Said(text="", finish_reason=REFUSED, error=why)
        if not encoded[0]:
            why = f"the question to GenRM '{genrm.name}' has no tokens; write words into its template"
            return Said(text="", finish_reason=REFUSED, error=why)
        return encoded

    async def _complete_text(
        self, genrm: GenRMSection, ask: m.Ask, sent: Rendered, encoded: Encoded, key: str = ""
    ) -> Said:
        """Has an engine continue tokens.

        Raises:
            WorkerFailed, DeadlineExceeded, Interrupted: see `ask`.
        """
        (prompt_ids, media), ends = encoded, sent.ends
        room = genrm.max_model_tokens - len(prompt_ids)
        if room < 1:  # the policy's engines, which may be asked, take more
            limit = f"genrms[{genrm.name}].max_model_tokens is {genrm.max_model_tokens}"
            why = f"the question has {len(prompt_ids)} tokens, and {limit}"
            return Said(text="", finish_reason=REFUSED, error=why)
        sample = m.SampleRequest(
            request_id=key or self._open.new_key(genrm), prompt_ids=pack_ids(prompt_ids),
            seed=ask.seed, temperature=ask.temperature, top_p=1.0, top_k=-1,
            max_tokens=min(ask.max_tokens, room),
            stop=ends.stop if ends else genrm.stop, stop_ids=ends.tokens if ends else (),
            structure=sent.structure, media=media,
            watched=self._encoder.watched(genrm) if sent.is_soft else (),
        )  # fmt: skip
        if self._open.is_cut(key):
            raise Interrupted
        completed = await self._complete(answering_role(genrm), sample)
        if completed.finish_reason == m.MEDIA_FAULT:
            return Said(text="", finish_reason=REFUSED, error=completed.error)
        text = await self._encoder.decode(genrm, completed.token_ids)
        return Said(
            text=text,
            finish_reason=completed.finish_reason,
            error=completed.error,
            token_ids=completed.token_ids,
            watched=completed.watched,
        )

    async def _answer_after_thought(
        self, genrm: GenRMSection, ask: m.Ask, sent: Rendered, encoded: Encoded, keys: Sequence[str]
    ) -> Said:
        """Has a GenRM think, then answer; see `yatt.judging.thinking`.

        Raises:
            WorkerFailed, DeadlineExceeded, Interrupted: see `ask`.
        """
        (ids, media), end, thought = encoded, self._encoder.thought_end(genrm), Thought()
        others = len(ids) + len(end.ids) + genrm.max_tokens
        room = thought_room(genrm.think.budget, limit=genrm.max_model_tokens, others=others)
        if room:
            first = msgspec.structs.replace(ask, max_tokens=room)
            free = Rendered(parts=(), ends=end)
            said = await self._complete_text(genrm, first, free, encoded, keys[0])
            if said.finish_reason in (ABORTED, REFUSED):
                return said
            thought = await self._encoder.thought(genrm, said)
        if thought.is_cut and genrm.think.on_cut == "unreadable":
            return _after_thought(Said(text="", finish_reason=TRUNCATED), thought)
        last = msgspec.structs.replace(ask, seed=sample_seed(ask.seed, 0, "verdict"))
        continued = [*ids, *thought.ids, *end.ids], media  # pictures keep their places
        said = await self._complete_text(genrm, last, sent, continued, keys[1])
        return _after_thought(said, thought)

    async def _ask_service(self, genrm: GenRMSection, ask: m.Ask, sent: Rendered) -> Said:
        complete = partial(self._services[genrm.name].complete, wants_logprobs=sent.is_soft)
        if not sent.pictures:
            text = "".join(part.text for part in sent.parts if part is not None)
            return await complete(text, ask, sent.structure)
        assert self._files_of is not None, "set in runs that have pictures"
        content = [part if part is None else part.text for part in sent.parts]
        try:
            files = partial(self._files_of, sent.pictures, genrm.name)
            return await complete(content, ask, sent.structure, files)
        except MediaUnusable as error:
            return Said(text="", finish_reason=REFUSED, error=str(error))

    async def answer(self, genrm: GenRMSection, asked: AskedQuestion) -> Answer | None:
        """Returns the readable verdicts of all votes; None if there is none.

        Raises:
            Interrupted: see `interrupt`.
            Refused: the GenRM does not take the question.
            WorkerFailed | DeadlineExceeded: it could not answer, after the retries.
        """
        votes = (self._vote(genrm, asked, vote) for vote in range(genrm.votes))
        found = await asyncio.gather(*votes, return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        verdicts = [each for each in found if isinstance(each, m.Scored)]
        if not verdicts:
            return None
        if asked.question.criteria:
            return Answer(values=tuple(each.extra for each in verdicts))
        if asked.question.num_ranked:
            return Answer(rankings=tuple(each.ranking for each in verdicts))
        measures = {
            key: math.fsum(each.extra[key] for each in verdicts) / len(verdicts) for key in verdicts[0].extra
        }
        return Answer(votes=tuple(each.score for each in verdicts), measures=measures)

    async def _vote(self, genrm: GenRMSection, asked: AskedQuestion, vote: int) -> m.Scored | None:
        subject, criteria = asked.first, asked.question.criteria
        of_prompt = [each.ref for each in subject.group.media] if genrm.sees != "none" else []
        rendered = render_with_pictures(genrm.template, asked.shown, of_prompt)
        sent = Rendered(
            parts=[PICTURE if isinstance(part, MediaRef) else TextPart(*part) for part in rendered],
            pictures=[part for part in rendered if isinstance(part, MediaRef)],
            structure=structure_of(genrm.verdict, criteria) if criteria else self._structures[genrm.name],
            is_soft=genrm.verdict.read == "soft",
        )
        for retry in range(genrm.retries + 1):
            attempt = vote * (genrm.retries + 1) + retry
            ask = m.Ask(
                genrm=genrm.name,
                text="",
                max_tokens=genrm.max_tokens,
                seed=sample_seed(self._config.run.seed, subject.group.number, asked.question.key, attempt),
                temperature=max(genrm.temperature, genrm.retry_temperature) if retry else genrm.temperature,
            )
            subject.counters[f"genrm/{genrm.name}/asked"] += 1
            asked_s = clock.monotonic_s()
            said = await self._ask_until_interrupted(genrm, ask, sent)
            span_s = asked_s, clock.monotonic_s()
            if said.finish_reason == ABORTED:
                raise WorkerFailed(f"GenRM '{genrm.name}' was interrupted")
            if said.finish_reason == REFUSED:
                raise Refused(said.error)
            verdict = await self._read(genrm, asked, said, ask.temperature)
            note_answer(genrm.name, asked, said, attempt + 1, verdict, span_s)
            if verdict is not None:
                return verdict
            why = unreadable_message(genrm, asked, said)
            subject.note_unreadable(genrm.name, (asked.number, attempt), why)
        return None

    async def _ask_until_interrupted(self, genrm: GenRMSection, ask: m.Ask, sent: Rendered) -> Said:
        if genrm.api.url:
            return await self.ask(genrm, ask, sent)
        with self._open.opened(genrm) as keys:
            encoded = await self._encoded(genrm, sent)
            if isinstance(encoded, Said):
                return encoded
            if genrm.think.budget:
                said = await self._answer_after_thought(genrm, ask, sent, encoded, keys)
            else:
                said = await self._complete_text(genrm, ask, sent, encoded, keys[0])
            if self._open.is_cut(keys[0]) and said.finish_reason == ABORTED:
                raise Interrupted
            return said

    async def scored(
        self, genrm: GenRMSection, ids: Callable[[Tokenizer], bytes], length: int, scored_from: int = 0
    ) -> m.Completed:
        """Returns the answer of an engine that writes nothing.

        Args:
            ids: gives the packed ids of the text, from the GenRM's tokenizer.
            length: characters of the text, at least about.
            scored_from: see `m.SampleRequest`.

        Raises:
            Interrupted, Refused, WorkerFailed, DeadlineExceeded: see `answer`.
        """
        with self._open.opened(genrm) as (key,):
            packed = await self._encoder.encode_by(genrm, ids, length)
            if not packed:
                raise Refused(f"the text for GenRM '{genrm.name}' has no tokens")
            if self._open.is_cut(key):
                raise Interrupted
            request = m.SampleRequest(
                request_id=key,
                prompt_ids=packed,
                seed=0,
                temperature=0.0,
                top_p=1.0,
                top_k=-1,
                max_tokens=1,
                scored_from=scored_from,
            )
            completed = await self._complete(answering_role(genrm), request)
            if completed.finish_reason == ABORTED:
                if self._open.is_cut(key):
                    raise Interrupted
                raise WorkerFailed(f"GenRM '{genrm.name}' was interrupted")
        if completed.finish_reason == REFUSED:
            raise Refused(completed.error)
        return completed

    async def _read(
        self, genrm: GenRMSection, asked: AskedQuestion, said: Said, temperature: float
    ) -> m.Scored | None:
        """Returns the verdict. A cut text has none: its end might have changed the verdict."""
        counters = asked.first.counters
        _note_said(genrm, asked, said)
        if said.has_reasoning and not said.text.strip():
            counters[f"genrm/{genrm.name}/only_reasoning"] += 1
        if said.finish_reason == TRUNCATED:
            counters[f"genrm/{genrm.name}/truncated"] += 1
            return None
        question = asked.question
        order = asked.first.order(
            genrm.name, said.text, num_ranked=question.num_ranked, criteria=question.criteria
        )
        answer = await self._call_reward(order)
        found = answer if isinstance(answer, m.Scored) else None
        if found is None:
            users_failure(answer)
        elif genrm.verdict.read == "soft":
            found = await self._soft(genrm, said, found.at, temperature)
        if found is None:
            counters[f"genrm/{genrm.name}/unparsable"] += 1
        return found

    async def _soft(
        self, genrm: GenRMSection, said: Said, offset: int, temperature: float
    ) -> m.Scored | None:
        """Returns the soft verdict whose word stands at this place of the text.

        Raises:
            Refused: a service gives no log-probs.
        """
        scores = genrm.verdict.scores
        if not genrm.api.url:
            soft = await self._encoder.soft(genrm, said, offset, temperature)
        elif said.lacks_logprobs:
            raise Refused(f"{genrm.api.url} {said.lacks_logprobs}, which verdict.read: soft needs")
        else:
            place = listed_at(offset, said.listed)
            soft = None if place is None else soft_verdict_of_texts(place, scores)
        if soft is None:
            return None
        score = on_grid(soft.score, genrm.verdict.grid, list(scores.values()))
        measures = {"confidence": soft.confidence, "elsewhere": soft.elsewhere}
        return m.Scored(score=score, extra=measures)


def _after_thought(said: Said, thought: Thought) -> Said:
    return replace(
        said, thought=thought.text, is_thought_cut=thought.is_cut, num_thought_tokens=len(thought.ids)
    )


def _note_said(genrm: GenRMSection, asked: AskedQuestion, said: Said) -> None:
    """Notes an answer for people, and whether the thought before it was cut."""
    texts = {genrm.name: said.text[-MOST_VERDICT:]}
    if genrm.think.budget:
        texts[f"{genrm.name}/thought"] = said.thought[-MOST_VERDICT:]
        asked.first.counters[f"genrm/{genrm.name}/thought_cut"] += said.is_thought_cut
    for sample in asked.about:
        sample.verdicts = {**sample.verdicts, **texts}


def users_failure(answer: m.Message) -> m.Failed:
    """Returns the failure of a reward process if the sample or the function caused it.

    Raises:
        WorkerFailed: a machine caused it.
    """
    if isinstance(answer, m.Failed) and answer.user:
        return answer
    raise WorkerFailed(answer.error if isinstance(answer, m.Failed) else repr(answer))
