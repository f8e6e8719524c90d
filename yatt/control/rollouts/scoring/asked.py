"""One question to a GenRM: whom it is about, its tokens, and what is told and recorded of its answer."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from yatt.adapters.files.patience import with_retries
from yatt.adapters.inputs.encoded_prompt import encode_question
from yatt.adapters.inputs.text_parts import TextPart
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.config.schema import GenRMSection, RunConfig
from yatt.control.rollouts.groups.groups import TRUNCATED, SampleState
from yatt.control.rollouts.scoring.subject import Judged, Subject
from yatt.core.samples.reasons import CUT, NO_VERDICT, REASONING
from yatt.errors import ConfigError
from yatt.judging.protocol import Question
from yatt.judging.soft import SoftVerdict, first_tokens, place_of_token, soft_verdict
from yatt.judging.template import Shown, render_template
from yatt.models.pictures.tokens import picture_tokens
from yatt.records import message as m
from yatt.records.episode import MediaRef
from yatt.records.judged import Said
from yatt.records.message import unpack_floats, unpack_ids

T = TypeVar("T")
Parts = Sequence[TextPart | None]
"""A question's text, with `PICTURE` where a picture stands."""

Encoded = tuple[list[int], tuple[m.PlacedMedia, ...]]

MOST_SHOWN = 600
"""Characters of a GenRM's question and answer that a message shows: their ends."""

LONG = 4096
"""Characters of a question that is tokenised in a thread."""


class Unscored(Exception):
    """There is no score, for a reason that lies in the completion, the function or the GenRM's answer."""


class Refused(Unscored):
    """The GenRM cannot take this question: for example, its text is too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedQuestion:
    """One question to a GenRM, about completions of a group.

    Attributes:
        subjects: those that are judged together; the first one's counters count.
        number: of the question among those about them.
    """

    subjects: tuple[Subject, ...]
    question: Question
    number: int
    shown: Shown

    @property
    def first(self) -> Subject:
        """The first subject; its group gives the seed."""
        return self.subjects[0]

    @property
    def about(self) -> list[SampleState]:
        """The samples that the verdict is about, in the order in which they are shown."""
        return [self.subjects[place].sample for place in self.question.about]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """What is sent to a GenRM.

    Attributes:
        pictures: those that stand in the text.
        structure: see `m.SampleRequest`.
        is_soft: the answer's log-probs are wanted.
    """

    parts: Parts
    pictures: Sequence[MediaRef] = ()
    structure: str = ""
    is_soft: bool = False


def word_tokens(genrm: GenRMSection, tokenizer: Tokenizer) -> dict[str, tuple[int, ...]]:
    """Returns the tokens that the words of a soft verdict may begin with.

    Raises:
        ConfigError: they cannot be told apart, see `first_tokens`.
    """
    words, decode = list(genrm.verdict.scores), tokenizer.decode
    try:
        return first_tokens(words, tokenizer.encode_plain, decode, m.MOST_WATCHED)
    except ValueError as error:
        says = f"soft: {error} in the tokenizer of {genrm.model}; write other words."
        raise ConfigError(says, key=f"genrms[{genrm.name}].verdict.read") from error


class QuestionEncoder:
    """Tokenises questions to the GenRMs that have engines."""

    def __init__(self, config: RunConfig) -> None:
        opened = partial(with_retries, limit_s=config.launch.phase_timeout_s)
        self._tokenizers = {
            g.name: opened(partial(Tokenizer, g.model, config.data.template_time))
            for g in config.engine_genrms
        }
        limits = config.media.min_pixels, config.media.max_pixels
        self._pictures = {
            g.name: opened(partial(picture_tokens, g.model, *limits))
            for g in config.engine_genrms
            if g.sees != "none"
        }
        self._words = {
            g.name: word_tokens(g, self._tokenizers[g.name])
            for g in config.engine_genrms
            if g.verdict.read == "soft"
        }
        self._turn = asyncio.Lock()

    def watched(self, genrm: GenRMSection) -> tuple[int, ...]:
        """Returns the tokens that the words of a soft verdict may begin with."""
        return tuple(token for tokens in self._words[genrm.name].values() for token in tokens)

    async def soft(
        self, genrm: GenRMSection, said: Said, offset: int, temperature: float
    ) -> SoftVerdict | None:
        """Returns the soft verdict whose word stands at this place in what an engine said."""
        ids, watched = unpack_ids(said.token_ids), self.watched(genrm)
        decode = self._tokenizers[genrm.name].decode
        find = partial(place_of_token, offset, said.text, lambda count: decode(ids[:count]), len(ids))
        place = await self._in_turn(len(said.text), find)
        if ids[place] not in watched:
            return None  # a token with more than the word's beginning: its log-prob says nothing of the word
        row = unpack_floats(said.watched)[place * len(watched) : (place + 1) * len(watched)]
        logprobs = dict(zip(watched, row, strict=True))
        return soft_verdict(self._words[genrm.name], logprobs, genrm.verdict.scores, temperature)

    async def encode(self, genrm: GenRMSection, parts: Parts, pictures: Sequence[MediaRef]) -> Encoded:
        """Returns a question's token ids, and its pictures in their places.

        Raises:
            ValueError: the pictures cannot be shown.
        """
        length = sum(len(part.text) for part in parts if part is not None)
        return await self._in_turn(length, partial(self._prompt_ids, genrm, parts, pictures))

    async def encode_by(self, genrm: GenRMSection, ids: Callable[[Tokenizer], bytes], length: int) -> bytes:
        """Returns what `ids` makes of a text of about `length` characters with the GenRM's tokenizer."""
        return await self._in_turn(length, partial(ids, self._tokenizers[genrm.name]))

    def decode(self, genrm: GenRMSection, token_ids: bytes) -> str:
        """Returns the text of packed ids."""
        return self._tokenizers[genrm.name].decode(unpack_ids(token_ids))

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


def note_answer(
    genrm: str,
    asked: AskedQuestion,
    said: Said,
    tries: int,
    verdict: m.Scored | None,
    span_s: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Adds an answer to those that are recorded."""
    if asked.first.judged is not None:
        answer = Judged(
            genrm=genrm,
            about=tuple(sample.index for sample in asked.about),
            shown=asked.shown,
            answer=said.text,
            finish_reason=said.finish_reason,
            tries=tries,
            verdict=verdict,
            criteria=asked.question.criteria,
            num_tokens=len(said.token_ids) // 4 or len(said.listed),
            span_s=span_s,
        )
        asked.first.judged.append(answer)


def unreadable_message(genrm: GenRMSection, asked: AskedQuestion, said: Said) -> str:
    """Returns what a person is told of an answer without a verdict: answer, why it ended, and question."""
    about = [sample.index for sample in asked.about]
    which = f" about samples {', '.join(map(str, about))}" if len(about) > 1 else ""
    why = REASONING if said.has_reasoning and not said.text.strip() else ""
    if said.finish_reason == TRUNCATED:
        why = f"{CUT} (genrms[{genrm.name}].max_tokens is {genrm.max_tokens})"
    question = "".join(text for text, _ in render_template(genrm.template, asked.shown))
    return (
        f"{NO_VERDICT}{which} in {said.text[-MOST_SHOWN:]!r}{why}; the question was "
        f"{question[-MOST_SHOWN:]!r}"
    )
