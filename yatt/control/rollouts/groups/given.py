"""Prompt groups whose completions are given by rows (`run.kind`), as token ids.

A completion is what the model would have sampled: a turn of the policy is the content of an assistant's
message and the token that ends the turn, and all else is an observation. Control tokens in contents are text.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from yatt.adapters.inputs.data_rows import ASSISTANT, conversation_of
from yatt.adapters.inputs.dataset import Row
from yatt.adapters.inputs.encoded_prompt import encode_prompt
from yatt.adapters.inputs.text_parts import TextPart
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.config.schema import RunConfig
from yatt.control.rollouts.groups.groups import PromptGroup, SampleState
from yatt.errors import ConfigError
from yatt.printable import value_in_words
from yatt.records.message import Turn, pack_ids, unpack_ids

TOO_LONG, EQUAL_PAIRS = "rollout/too_long", "rollout/equal_pairs"


@dataclass(frozen=True, slots=True)
class GivenIds:
    """A row's prompt, and the turns of each of its completions."""

    prompt: list[int]
    completions: tuple[tuple[Turn, ...], ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest completion, observations included."""
        return max(sum(turn.num_tokens for turn in turns) for turns in self.completions)

    def fits(self, config: RunConfig) -> bool:
        """Whether neither its prompt nor a completion is too long."""
        limits = config.data.max_prompt_tokens, config.rollout.max_response_tokens
        return len(self.prompt) <= limits[0] and self.longest <= limits[1]

    def fault(self, config: RunConfig) -> str:
        """Why the run does not train on it, as the metric that counts such rows; empty: it does."""
        if len(self.completions) > 1 and self.completions[0] == self.completions[1]:
            return EQUAL_PAIRS
        return "" if self.fits(config) else TOO_LONG

    def group(self, number: int, row: int, text: str) -> PromptGroup:
        """The prompt group, which is complete."""
        samples = [
            SampleState(index=index, turns=list(turns), finish_reason="stop")
            for index, turns in enumerate(self.completions)
        ]
        return PromptGroup(
            number=number, row=row, prompt_text=text, prompt=pack_ids(self.prompt), samples=samples
        )


def given_ids(row: Row, tokenizer: Tokenizer, config: RunConfig) -> GivenIds:
    """Encodes a row with completions.

    Raises:
        ConfigError: the template refuses it, or does not show messages as they were when the model answered;
            or the row has pictures.
    """
    if row.media:
        raise ConfigError(
            "a row has pictures, which cannot be trained on with this run.kind yet; remove them."
        )
    if config.run.kind == "reward_model":
        return _judged_ids(row, tokenizer)
    if isinstance(row.prompt, str) or not config.data.apply_chat_template:
        if any(len(_messages_of(given)) > 1 for given in row.given):
            raise ConfigError(
                "data.apply_chat_template is false, and a completion has several messages: without a "
                "template the others' would be trained on. Write true, or give each turn a row of its own."
            )
        prompt = encode_prompt(row, tokenizer, config).ids
        texts = (_plain_text(given) for given in row.given)
        return GivenIds(prompt, tuple((_text_turn(text, tokenizer, config),) for text in texts))
    answers = [_messages_of(given) for given in row.given]
    turns = [list(_chat_turns(row.prompt, answer, tokenizer)) for answer in answers]
    return GivenIds(tokenizer.encode_chat(row.prompt), tuple(tuple(each) for each in turns))


@dataclass(frozen=True, slots=True)
class RowLengths:
    """What a check wants to know of a row: its largest token id, and whether it is short enough."""

    largest_id: int
    fits: bool


def row_lengths(row: Row, place: str, tokenizer: Tokenizer, config: RunConfig) -> RowLengths:
    """Encodes a row as the run does.

    Args:
        place: of the row, for messages.

    Raises:
        ConfigError: it cannot be encoded.
    """
    if not row.given:
        ids = encode_prompt(row, tokenizer, config).ids
        return RowLengths(max(ids, default=0), len(ids) <= config.data.max_prompt_tokens)
    try:
        found = given_ids(row, tokenizer, config)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
    turns = (unpack_ids(turn.token_ids) for turns in found.completions for turn in turns)
    return RowLengths(max(itertools.chain(found.prompt, *turns)), found.fits(config))


def limits_in_words(config: RunConfig) -> tuple[str, str]:
    """The keys that limit the lengths of rows, and the limits in words that follow `longer than`."""
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    if not config.is_given:
        return "data.max_prompt_tokens", f"{prompt}"
    both = "data.max_prompt_tokens, rollout.max_response_tokens"
    return both, f"{prompt}, or a completion longer than {response}"


def _messages_of(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": ASSISTANT, "content": given}] if isinstance(given, str) else given


def _plain_text(given: str | list[dict[str, Any]]) -> str:
    return "\n".join(str(message["content"]) for message in _messages_of(given))


def _sampled_turn(ids: list[int], tokenizer: Tokenizer, ends: Collection[int] = ()) -> Turn:
    """A turn of the policy, which ends with a token that ends completions, or with one of `ends`."""
    if not ids or ids[-1] not in (*tokenizer.eos_ids, *ends):
        ids = [*ids, tokenizer.eos_ids[0]]
    return Turn(pack_ids(ids), is_sampled=True, logprobs=bytes(4 * len(ids)), finish_reason="stop")


def _text_turn(text: str, tokenizer: Tokenizer, config: RunConfig) -> Turn:
    part = TextPart(text, config.data.allow_special_tokens)
    return _sampled_turn(tokenizer.encode_parts([part], adds_special=False), tokenizer)


def _chat_turns(
    prompt: list[dict[str, Any]], answer: list[dict[str, Any]], tokenizer: Tokenizer
) -> Iterator[Turn]:
    """Yields the turns of an answer of several messages: each message of the assistant is the policy's."""
    end = tokenizer.end_of_turn  # a base model's template may end turns otherwise than its texts end
    ends = (*tokenizer.eos_ids, *([end[1]] if end else []))
    said = list(prompt)
    shown, left = list[TextPart](), list[int]()
    for message in answer:
        if message["role"] == ASSISTANT:
            if said[-1]["role"] == ASSISTANT:
                raise ConfigError(
                    f"two messages of the assistant follow each other, the second is "
                    f"{value_in_words(message)}; join them."
                )
            before = tokenizer.chat_parts(said)
            if shown:
                ids = tokenizer.encode_parts(_rest(before, shown, message), adds_special=False)
                yield Turn(pack_ids([*left, *ids]))
            shown = tokenizer.chat_parts([*said, message], add_generation_prompt=False)
            if not _text_of(shown).startswith(_text_of(before)):
                _refuse_unasked(tokenizer.chat_parts(said, add_generation_prompt=False), before, shown)
            ids = tokenizer.encode_parts(_rest(shown, before, message), adds_special=False)
            size = next((n for n in range(len(ids), 0, -1) if ids[n - 1] in ends), len(ids))
            if all(token in ends for token in ids[:size]):
                raise ConfigError(
                    f"the chat template shows nothing of {value_in_words(message)} but its end, so the model "
                    "would learn to say nothing; write what it says (calls of tools too) as content."
                )
            yield _sampled_turn(ids[:size], tokenizer, ends)
            left = ids[size:]
        said.append(message)


def _text_of(parts: Sequence[TextPart]) -> str:
    return "".join(part.text for part in parts)


def _refuse_unasked(said: Sequence[TextPart], asked: Sequence[TextPart], shown: Sequence[TextPart]) -> None:
    """Refuses a template that asks for an answer otherwise than it shows one.

    Raises:
        ConfigError: it does.
    """
    known, begun = _text_of(said), _text_of(asked)
    if _text_of(shown).startswith(known) and begun.startswith(known):
        raise ConfigError(
            f"the chat template asks for an answer by {value_in_words(begun[len(known) :])}, and shows none "
            "that begins so. Write rows as text: 'prompt' is all that the model is shown, and 'completion' "
            "what it answers (data.map), with data.allow_special_tokens: true."
        )


def _rest(
    whole: Sequence[TextPart], beginning: Sequence[TextPart], message: dict[str, Any]
) -> list[TextPart]:
    """Returns the parts of a text after its beginning.

    Raises:
        ConfigError: it begins otherwise.
    """
    text, known = _text_of(whole), _text_of(beginning)
    if not text.startswith(known) or text == known:
        raise ConfigError(
            "the chat template shows a conversation otherwise once it goes on, so the model would be trained "
            f"on what it never sees (at {value_in_words(message)}). Give each turn a row of its own, "
            "as prompt and completion."
        )
    found, at = list[TextPart](), 0
    for part in whole:
        cut = max(len(known) - at, 0)
        at += len(part.text)
        if cut < len(part.text):
            found.append(TextPart(part.text[cut:], part.is_trusted))
    return found


def _judged_ids(row: Row, tokenizer: Tokenizer) -> GivenIds:
    """Encodes the conversations of a pair, as a scalar reward model of a run is shown them.

    The score is that of the last token. A value is read where a token is predicted, so one more token stands
    at the end, which no other sees. What both conversations begin with is the prompt.
    """
    ids = [_conversation_ids(row, given, tokenizer) for given in row.given]
    shared = next(
        (n for n, pair in enumerate(zip(*ids, strict=False)) if len(set(pair)) > 1), min(map(len, ids))
    )
    end = _sampled_turn([tokenizer.eos_ids[0]], tokenizer)
    return GivenIds(ids[0][:shared], tuple((Turn(pack_ids(each[shared:])), end) for each in ids))


def _conversation_ids(row: Row, given: str | list[dict[str, Any]], tokenizer: Tokenizer) -> list[int]:
    if tokenizer.has_chat_template:
        messages = [*conversation_of(row.prompt), *_messages_of(given)]
        return tokenizer.encode_chat(messages, add_generation_prompt=False)
    text = f"{_plain_text(row.prompt)}{_plain_text(given)}"
    return tokenizer.encode_parts([TextPart(text, False)], adds_special=True)
