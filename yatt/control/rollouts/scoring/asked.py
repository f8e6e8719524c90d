"""One question to a GenRM: whom it is about, its tokens, and what is told and recorded of its answer."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
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
from yatt.core.gpus.placement import answering_role
from yatt.core.samples.reasons import AFTER_THOUGHT, CUT, NO_VERDICT, REASONING
from yatt.errors import ConfigError
from yatt.judging.protocol import Question
from yatt.judging.soft import SoftVerdict, first_tokens, place_of_token, soft_verdict
from yatt.judging.template import Shown, render_template
from yatt.judging.thinking import ThoughtEnd, thought_end, thought_size
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
        ends: what ends a thought, if it is one that is asked for, instead of `genrms[].stop`.
    """

    parts: Parts
    pictures: Sequence[MediaRef] = ()
    structure: str = ""
    is_soft: bool = False
    ends: ThoughtEnd | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """What a GenRM has thought: its tokens as they were sampled, without what ended it, and their text;
    `is_cut`: nothing ended it but its largest length."""

    ids: tuple[int, ...] = ()
    text: str = ""
    is_cut: bool = True


def word_tokens(genrm: GenRMSection, tokenizer: Tokenizer) -> dict[str, tuple[int, ...]]:
    """Returns the tokens that the words of a soft verdict may begin with.

    Raises:
        ConfigError: they cannot be told apart, see `first_tokens`.
    """
    words, decode = list(genrm.verdict.scores), tokenizer.decode
    try:
        return first_tokens(words, tokenizer.encode_plain, decode, m.MOST_WATCHED)
    except ValueError as error:
        says = f"soft: {error} in the tokenizer of {tokenizer.folder}; write other words."
        raise ConfigError(says, key=f"genrms[{genrm.name}].verdict.read") from error


def thought_ending(genrm: GenRMSection, tokenizer: Tokenizer) -> ThoughtEnd:
    """Returns what ends the thoughts of a GenRM.

    Raises:
        ConfigError: its tokenizer cannot write `think.end`.
    """
    end = genrm.think.end
    found = thought_end(end, lambda text: tokenizer.encode_parts([TextPart(text, True)], adds_special=False))
    if found.text not in tokenizer.decode(list(found.ids), skip_special=False):
        says = f"{end!r} cannot be written in the tokenizer of {tokenizer.folder}; write another text."
        raise ConfigError(says, key=f"genrms[{genrm.name}].think.end")
    return found


class OpenQuestions:
    """Questions by template that have no answer yet, and which of them were ended."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._roles: dict[str, str] = {}  # by key
        self._cut: set[str] = set()

    def new_key(self, genrm: GenRMSection) -> str:
        """Returns the id of a request to a GenRM."""
        return f"{genrm.name}/{next(self._numbers)}"

    @contextlib.contextmanager
    def opened(self, genrm: GenRMSection) -> Iterator[tuple[str, ...]]:
        """Context manager: a question that `cut_all` may end at any moment; gives the ids of its requests: of
        the one, or of those for a thought and for a verdict."""
        keys = tuple(self.new_key(genrm) for _ in range(2 if genrm.think.budget else 1))
        self._roles |= dict.fromkeys(keys, answering_role(genrm))
        try:
            yield keys
        finally:
            for key in keys:
                del self._roles[key]
                self._cut.discard(key)

    def cut_all(self) -> dict[str, tuple[str, ...]]:
        """Ends all questions; returns their ids, by the role that answers them."""
        self._cut |= self._roles.keys()
        roles = sorted(set(self._roles.values()))
        return {role: tuple(key for key, of in self._roles.items() if of == role) for role in roles}

    def is_cut(self, key: str) -> bool:
        """Whether a question was ended."""
        return key in self._cut


class QuestionEncoder:
    """Tokenises questions to the GenRMs that have engines."""

    def __init__(self, config: RunConfig) -> None:
        opened = partial(with_retries, limit_s=config.launch.phase_timeout_s)
        self._tokenizers = {
            name: opened(partial(Tokenizer, folder, config.data.template_time))
            for name, folder in config.judge_folders.items()
        }
        limits = config.media.min_pixels, config.media.max_pixels
        self._pictures = {
            g.name: opened(partial(picture_tokens, g.model, *limits))
            for g in config.engine_genrms
            if g.sees != "none"
        }
        self._words = {
            g.name: word_tokens(g, self._tokenizers[g.name])
            for g in config.genrms
            if g.verdict.read == "soft" and not g.api.url
        }
        self._ends = {
            g.name: thought_ending(g, self._tokenizers[g.name]) for g in config.genrms if g.think.budget
        }
        self._turn = asyncio.Lock()

    def thought_end(self, genrm: GenRMSection) -> ThoughtEnd:
        """Returns what ends the thoughts of a GenRM."""
        return self._ends[genrm.name]

    async def thought(self, genrm: GenRMSection, said: Said) -> Thought:
        """Returns the thought in what an engine said: what stands before its end."""
        ids, tokenizer = unpack_ids(said.token_ids), self._tokenizers[genrm.name]
        find = partial(thought_size, ids, self._ends[genrm.name], tokenizer.eos_ids, tokenizer.decode)
        size = await self._in_turn(len(said.text), find)
        is_cut = size == len(ids) and said.finish_reason == TRUNCATED
        text = await self.decode(genrm, said.token_ids[: 4 * size])
        return Thought(ids=tuple(ids[:size]), text=text, is_cut=is_cut)

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

    async def decode(self, genrm: GenRMSection, token_ids: bytes) -> str:
        """Returns the text of packed ids; of many of them in a thread."""
        decode = partial(self._tokenizers[genrm.name].decode, unpack_ids(token_ids))
        return await self._in_turn(len(token_ids), decode) if len(token_ids) > LONG else decode()

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
            thought=said.thought,
            is_thought_cut=said.is_thought_cut,
            answer=said.text,
            finish_reason=said.finish_reason,
            tries=tries,
            verdict=verdict,
            criteria=asked.question.criteria,
            num_tokens=said.num_thought_tokens + (len(said.token_ids) // 4 or len(said.listed)),
            span_s=span_s,
        )
        asked.first.judged.append(answer)


def unreadable_message(genrm: GenRMSection, asked: AskedQuestion, said: Said) -> str:
    """Returns what a person is told of an answer without a verdict: answer, why it ended, and question."""
    about = [sample.index for sample in asked.about]
    which = f" about samples {', '.join(map(str, about))}" if len(about) > 1 else ""
    why = REASONING if said.has_reasoning and not said.text.strip() else ""
    is_unasked = said.is_thought_cut and genrm.think.on_cut == "unreadable"
    if said.finish_reason == TRUNCATED and not is_unasked:
        why = f"{CUT} (genrms[{genrm.name}].max_tokens is {genrm.max_tokens})"
    thought = ""
    if genrm.think.budget:
        cut = f"{CUT} (genrms[{genrm.name}].think.budget is {genrm.think.budget})"
        if said.num_thought_tokens < genrm.think.budget:
            cut = f"{CUT} (genrms[{genrm.name}].max_model_tokens left it {said.num_thought_tokens} tokens)"
        thought = f"{AFTER_THOUGHT} {said.thought[-MOST_SHOWN:]!r}{cut if said.is_thought_cut else ''}"
    question = "".join(text for text, _ in render_template(genrm.template, asked.shown))
    return (
        f"{NO_VERDICT}{which} in {said.text[-MOST_SHOWN:]!r}{why}{thought}; the question was "
        f"{question[-MOST_SHOWN:]!r}"
    )
