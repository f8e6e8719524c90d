"""Verdicts of GenRMs: a question becomes text, the text goes to an engine or a service, a verdict comes back.

The answer is parsed in a reward process (`yatt.reward`), because a pattern may take too long. A question that
is not answered readably is asked again with another seed.
"""

import asyncio
import contextlib
import itertools
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from yatt.adapters.files.patience import with_retries
from yatt.adapters.inputs.encoded_prompt import encode_question
from yatt.adapters.inputs.text_parts import PICTURE, TextPart
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.adapters.net.judge_api import JudgeApi
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.config.schema import GenRMSection, RunConfig
from yatt.control.gpus.engines import ABORTED
from yatt.control.gpus.prepared_requests import MediaUnusable
from yatt.control.rollouts.groups.groups import MOST_VERDICT, TRUNCATED, SampleState
from yatt.control.rollouts.scoring.subject import Judged, Subject
from yatt.core.gpus.placement import genrm_role
from yatt.core.samples.prompts import sample_seed
from yatt.core.samples.reasons import CUT, NO_VERDICT, REASONING
from yatt.core.samples.verdict import (
    Shown,
    render_template,
    render_with_pictures,
    structure_of,
)
from yatt.errors import WorkerFailed
from yatt.models.pictures.tokens import picture_tokens
from yatt.records import message as m
from yatt.records.episode import MediaRef
from yatt.records.judged import REFUSED, Said
from yatt.records.message import pack_ids, unpack_ids

T = TypeVar("T")
Complete = Callable[[str, m.SampleRequest], Awaitable[m.Completed]]
Abort = Callable[[str, tuple[str, ...]], Awaitable[None]]
Parts = Sequence[TextPart | None]
"""A question's text, with `PICTURE` where a picture stands."""

Encoded = tuple[list[int], tuple[m.PlacedMedia, ...]]
FilesOf = Callable[[Sequence[MediaRef], str], Awaitable[Sequence[memoryview]]]
"""Gives the files of pictures, encoded for a GenRM behind a URL."""

CallReward = Callable[[m.Score | m.ScoreMany], Awaitable[m.Message]]


MOST_SHOWN = 600
"""Characters of a GenRM's question and answer that a message shows: their ends."""

LONG = 4096
"""Characters of a question that is tokenised in a thread."""


class Interrupted(Exception):
    """The question was ended by `Judge.interrupt` and has no answer. It is no failure."""


class Refused(Exception):
    """The GenRM cannot take this question: for example, its text is too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question to a GenRM.

    Args:
        subject: the sample in question; its group gives the seed, and its counters count.
        about: the samples that the verdict is shown with.
        number: distinguishes the questions about a group, for the seed.
        num_ranked: number of completions that a listwise verdict ranks.
    """

    subject: Subject
    shown: Shown
    about: tuple[SampleState, ...]
    number: int
    num_ranked: int = 0


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
        self, config: RunConfig, complete: Complete, abort: Abort, call_reward: CallReward, num_nodes: int,
        say: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        self._config, self._complete, self._abort, self._call_reward = config, complete, abort, call_reward
        opened = partial(with_retries, limit_s=config.launch.phase_timeout_s)
        self._tokenizers = {
            g.name: opened(partial(Tokenizer, g.model, config.data.template_time))
            for g in config.engine_genrms
        }
        self._services = {
            g.name: JudgeApi(g, num_nodes, partial(say, g.name)) for g in config.genrms if not g.has_engine
        }
        self._structures = {g.name: structure_of(g.verdict) for g in config.genrms if g.template}
        limits = config.media.min_pixels, config.media.max_pixels
        self._pictures = {
            g.name: opened(partial(picture_tokens, g.model, *limits))
            for g in config.engine_genrms
            if g.sees != "none"
        }
        self._files_of: FilesOf | None = None
        self._requests = itertools.count(1)
        self._turn = asyncio.Lock()
        self._open: dict[str, str] = {}  # role of each question of the templates that is not answered, by id
        self._cut: set[str] = set()

    def show_with(self, files_of: FilesOf) -> None:
        """Sets what encodes pictures for judges behind URLs, in runs that have pictures."""
        self._files_of = files_of

    async def interrupt(self) -> None:
        """Ends all questions that are not answered; `verdicts` raises Interrupted.

        Questions of users' functions go on, because a part of an answer would change their scores; those to
        services too.
        """
        cut = dict(self._open)
        self._cut |= cut.keys()
        for role in sorted(set(cut.values())):
            await self._abort(role, tuple(key for key, its_role in cut.items() if its_role == role))

    async def ask(
        self, genrm: GenRMSection, ask: m.Ask, parts: Parts, request_id: str = "",
        pictures: Sequence[MediaRef] = (),
    ) -> Said:  # fmt: skip
        """Has a GenRM complete a text.

        Args:
            pictures: those that stand in the text.

        Raises:
            WorkerFailed | DeadlineExceeded: it did not, after the retries.
            Interrupted: the request was ended before it was sent.
        """
        if genrm.name in self._services:
            return await self._ask_service(genrm, ask, parts, pictures)
        try:
            prompt_ids, media = await self._encoded(genrm, parts, pictures)
        except ValueError as error:
            why = f"the pictures of the question to GenRM '{genrm.name}' cannot be shown: {error}"
            return Said(text="", finish_reason=REFUSED, error=why)
        if not prompt_ids:
            why = f"the question to GenRM '{genrm.name}' has no tokens; write words into its template"
            return Said(text="", finish_reason=REFUSED, error=why)
        sample = m.SampleRequest(
            request_id=request_id or self._new_id(genrm), prompt_ids=pack_ids(prompt_ids),
            seed=ask.seed, temperature=ask.temperature, top_p=1.0, top_k=-1,
            max_tokens=min(ask.max_tokens, max(1, genrm.max_model_tokens - len(prompt_ids))),
            stop=genrm.stop, structure=self._structure(genrm), media=media,
        )  # fmt: skip
        if request_id in self._cut:
            raise Interrupted
        completed = await self._complete(genrm_role(genrm.name), sample)
        if completed.finish_reason == m.MEDIA_FAULT:
            return Said(text="", finish_reason=REFUSED, error=completed.error)
        text = self._tokenizers[genrm.name].decode(unpack_ids(completed.token_ids))
        return Said(text=text, finish_reason=completed.finish_reason, error=completed.error)

    async def _ask_service(
        self, genrm: GenRMSection, ask: m.Ask, parts: Parts, pictures: Sequence[MediaRef]
    ) -> Said:
        service, structure = self._services[genrm.name], self._structure(genrm)
        if not pictures:
            text = "".join(part.text for part in parts if part is not None)
            return await service.complete(text, ask, structure)
        assert self._files_of is not None, "set in runs that have pictures"
        content = [part if part is None else part.text for part in parts]
        try:
            return await service.complete(
                content, ask, structure, partial(self._files_of, pictures, genrm.name)
            )
        except MediaUnusable as error:
            return Said(text="", finish_reason=REFUSED, error=str(error))

    def _structure(self, genrm: GenRMSection) -> str:
        return "" if genrm.path else self._structures[genrm.name]

    async def verdicts(self, genrm: GenRMSection, question: Question) -> list[m.Scored]:
        """Returns the readable verdicts of all votes; empty if there is none.

        Raises:
            Interrupted: see `interrupt`.
            Refused: the GenRM does not take the question.
            WorkerFailed | DeadlineExceeded: it could not answer, after the retries.
        """
        votes = (self._vote(genrm, question, vote) for vote in range(genrm.votes))
        found = await asyncio.gather(*votes, return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return [each for each in found if isinstance(each, m.Scored)]

    async def _vote(self, genrm: GenRMSection, question: Question, vote: int) -> m.Scored | None:
        subject = question.subject
        of_prompt = [each.ref for each in subject.group.media] if genrm.sees != "none" else []
        rendered = render_with_pictures(genrm.template, question.shown, of_prompt)
        pictures = [part for part in rendered if isinstance(part, MediaRef)]
        parts = [PICTURE if isinstance(part, MediaRef) else TextPart(*part) for part in rendered]
        for retry in range(genrm.retries + 1):
            attempt = vote * (genrm.retries + 1) + retry
            ask = m.Ask(
                genrm=genrm.name, text="", max_tokens=genrm.max_tokens,
                seed=sample_seed(self._config.run.seed, subject.group.number, question.number, attempt),
                temperature=max(genrm.temperature, genrm.retry_temperature) if retry else genrm.temperature,
            )  # fmt: skip
            subject.counters[f"genrm/{genrm.name}/asked"] += 1
            said = await self._ask_until_interrupted(genrm, ask, parts, pictures)
            if said.finish_reason == ABORTED:
                raise WorkerFailed(f"GenRM '{genrm.name}' was interrupted")
            if said.finish_reason == REFUSED:
                raise Refused(said.error)
            verdict = await self._read(genrm, question, said)
            note_answer(genrm.name, question, said, attempt + 1, verdict)
            if verdict is not None:
                return verdict
            why = unreadable_message(genrm, question, said)
            subject.note_unreadable(genrm.name, (question.number, attempt), why)
        return None

    async def _ask_until_interrupted(
        self, genrm: GenRMSection, ask: m.Ask, parts: Parts, pictures: Sequence[MediaRef]
    ) -> Said:
        if not genrm.has_engine:
            return await self.ask(genrm, ask, parts, pictures=pictures)
        with self._opened(genrm) as key:
            said = await self.ask(genrm, ask, parts, key, pictures)
            if key in self._cut and said.finish_reason == ABORTED:
                raise Interrupted
            return said

    @contextlib.contextmanager
    def _opened(self, genrm: GenRMSection) -> Iterator[str]:
        """Context manager: a question that `interrupt` may end; gives its id."""
        key = self._new_id(genrm)
        self._open[key] = genrm_role(genrm.name)
        try:
            yield key
        finally:
            del self._open[key]
            self._cut.discard(key)

    async def scored(
        self, genrm: GenRMSection, ids: Callable[[Tokenizer], bytes], length: int, scored_from: int = 0
    ) -> m.Completed:
        """Returns the answer of an engine that writes nothing.

        Args:
            ids: gives the packed ids of the text, from the GenRM's tokenizer.
            length: characters of the text, at least about.
            scored_from: see `m.SampleRequest`.

        Raises:
            Interrupted, Refused, WorkerFailed, DeadlineExceeded: see `verdicts`.
        """
        with self._opened(genrm) as key:
            packed = await self._in_turn(length, partial(ids, self._tokenizers[genrm.name]))
            if not packed:
                raise Refused(f"the text for GenRM '{genrm.name}' has no tokens")
            if key in self._cut:
                raise Interrupted
            request = m.SampleRequest(
                request_id=key, prompt_ids=packed, seed=0, temperature=0.0, top_p=1.0, top_k=-1,
                max_tokens=1, scored_from=scored_from,
            )  # fmt: skip
            completed = await self._complete(genrm_role(genrm.name), request)
            if completed.finish_reason == ABORTED:
                raise (
                    Interrupted if key in self._cut else WorkerFailed(f"GenRM '{genrm.name}' was interrupted")
                )
        if completed.finish_reason == REFUSED:
            raise Refused(completed.error)
        return completed

    def _new_id(self, genrm: GenRMSection) -> str:
        return f"{genrm.name}/{next(self._requests)}"

    async def _read(self, genrm: GenRMSection, question: Question, said: Said) -> m.Scored | None:
        """Returns the verdict. A cut text has none: its end might have changed the verdict."""
        for sample in question.about:
            sample.verdicts = {**sample.verdicts, genrm.name: said.text[-MOST_VERDICT:]}
        counters = question.subject.counters
        if said.has_reasoning and not said.text.strip():
            counters[f"genrm/{genrm.name}/only_reasoning"] += 1
        if said.finish_reason == TRUNCATED:
            counters[f"genrm/{genrm.name}/truncated"] += 1
            return None
        answer = await self._call_reward(
            question.subject.order(genrm.name, said.text, num_ranked=question.num_ranked)
        )
        if isinstance(answer, m.Scored):
            return answer
        users_failure(answer)
        counters[f"genrm/{genrm.name}/unparsable"] += 1
        return None

    async def _encoded(self, genrm: GenRMSection, parts: Parts, pictures: Sequence[MediaRef]) -> Encoded:
        length = sum(len(part.text) for part in parts if part is not None)
        return await self._in_turn(length, partial(self._prompt_ids, genrm, parts, pictures))

    async def _in_turn(self, length: int, encode: Callable[[], T]) -> T:
        """Tokenises; in a thread if it is long, and one question at a time, so that the event loop runs."""
        async with self._turn:
            if length > LONG:
                found: T = await call_in_thread(encode)
                return found
            await asyncio.sleep(0)
            return encode()

    def _prompt_ids(self, genrm: GenRMSection, parts: Parts, pictures: Sequence[MediaRef]) -> Encoded:
        tokenizer = self._tokenizers[genrm.name]
        if pictures:
            tokens = self._pictures[genrm.name]
            return encode_question(parts, pictures, tokens, tokenizer, is_chat=genrm.chat)
        texts = [part for part in parts if part is not None]
        if not genrm.chat:
            return tokenizer.encode_parts(texts, adds_special=True), ()
        return tokenizer.encode_chat([{"role": "user", "content": texts}]), ()


def note_answer(genrm: str, question: Question, said: Said, tries: int, verdict: m.Scored | None) -> None:
    """Adds an answer to those that are recorded."""
    if question.subject.judged is not None:
        answer = Judged(
            genrm=genrm, about=tuple(sample.index for sample in question.about),
            shown=question.shown, answer=said.text, finish_reason=said.finish_reason, tries=tries,
            verdict=verdict,
        )  # fmt: skip
        question.subject.judged.append(answer)


def unreadable_message(genrm: GenRMSection, question: Question, said: Said) -> str:
    """Returns what a person is told of an answer without a verdict: answer, why it ended, and question."""
    about = [sample.index for sample in question.about]
    which = f" about samples {', '.join(map(str, about))}" if len(about) > 1 else ""
    why = REASONING if said.has_reasoning and not said.text.strip() else ""
    if said.finish_reason == TRUNCATED:
        why = f"{CUT} (genrms[{genrm.name}].max_tokens is {genrm.max_tokens})"
    asked = "".join(text for text, _ in render_template(genrm.template, question.shown))
    return (
        f"{NO_VERDICT}{which} in {said.text[-MOST_SHOWN:]!r}{why}; the question was {asked[-MOST_SHOWN:]!r}"
    )


def mean_score(verdicts: Sequence[m.Scored]) -> float:
    """The mean of all votes."""
    return math.fsum(verdict.score for verdict in verdicts) / len(verdicts)


def users_failure(answer: m.Message) -> m.Failed:
    """Returns the failure of a reward process if the sample or the function caused it.

    Raises:
        WorkerFailed: a machine caused it.
    """
    if isinstance(answer, m.Failed) and answer.user:
        return answer
    raise WorkerFailed(answer.error if isinstance(answer, m.Failed) else repr(answer))
