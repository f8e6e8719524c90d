"""Rows of supervised fine-tuning as token ids: prompt and completion as text, or chat messages."""

import itertools
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from yatt.adapters.inputs.data_rows import data_row, raw_rows, with_picture_marks
from yatt.adapters.inputs.encoded_prompt import encode_prompt
from yatt.adapters.inputs.tokenizer import Tokenizer, eos_ids
from yatt.config.schema import RunConfig
from yatt.errors import ConfigError
from yatt.records.episode import PlacedMedia


class Example(NamedTuple):
    """Prompt and completion ids; only the completion has a loss. `media` are the pictures in the prompt."""

    prompt: list[int]
    completion: list[int]
    media: tuple[PlacedMedia, ...] = ()


CHATS = ("prompt", "messages")
"""Columns that may have chat messages."""

MARK = "yatt-answer-of-the-assistant"
FORMS = (
    "'prompt' and 'completion' as text; 'prompt' as messages with 'completion' as text or one message of the "
    "assistant; or 'messages', the last of them the assistant's"
)


def read_examples(
    path: Path, tokenizer: Tokenizer, folder: str, limit: int, seeing: RunConfig | None = None
) -> list[Example]:
    """Returns prompt and completion ids of each row of a JSONL or parquet file. A completion in a chat ends
    as the model's template ends a turn.

    Args:
        folder: model folder of the tokenizer.
        limit: longest sequence of the model, in tokens; 0: not known.
        seeing: what decides how prompts with pictures are encoded; None: there are none.

    Raises:
        ConfigError: the file cannot be read, a row has another form or is too long; names file and row.
        OSError: a transient error of the filesystem.
    """
    ends = eos_ids(folder)
    examples = []
    for raw, place in raw_rows(path):
        if seeing is not None:
            raw = _with_marks(raw, seeing)
        example = _example(raw, place, tokenizer, ends)
        if seeing is not None and not raw.keys().isdisjoint((seeing.data.image_key, seeing.data.video_key)):
            asked = {**raw, seeing.data.prompt_key: _prompt_of(raw)}
            prompt = encode_prompt(data_row(asked, place, seeing.data), tokenizer, seeing)
            example = example._replace(prompt=prompt.ids, media=prompt.media)
        size = len(example.prompt) + len(example.completion)
        if limit and size > limit:
            raise ConfigError(
                f"{place} has {size} tokens, but {folder} takes {limit} at most (max_position_embeddings); "
                "shorten or remove it."
            )
        if not example.prompt or not example.completion:
            raise ConfigError(f"{place}: its prompt or its completion is empty; remove the row.")
        examples.append(example)
    if not examples:
        raise ConfigError(f"{path}: no rows.")
    return examples


def _with_marks(raw: dict[str, Any], seeing: RunConfig) -> dict[str, Any]:
    """The row with text in place of parts of messages."""
    has_videos = seeing.data.video_key in raw
    return {
        key: with_picture_marks(value, has_videos=has_videos) if key in CHATS else value
        for key, value in raw.items()
    }


def _prompt_of(raw: dict[str, Any]) -> Any:
    """The prompt of a row of any form."""
    messages = raw.get("messages")
    return raw.get("prompt") if messages is None else messages[:-1]


def _example(raw: dict[str, Any], place: str, tokenizer: Tokenizer, ends: tuple[int, ...]) -> Example:
    prompt, completion = raw.get("prompt"), raw.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return Example(tokenizer.encode(prompt), tokenizer.encode_rendered(completion))
    messages = raw.get("messages")
    if messages is None and isinstance(prompt, list):
        answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        messages = [*prompt, *answer] if isinstance(answer, list) else None
    if not _is_chat(messages):
        raise ConfigError(f"{place} needs {FORMS}; it has {', '.join(map(repr, raw)) or 'no column'}.")
    ids = tokenizer.encode_plain(messages[-1]["content"])
    return Example(tokenizer.encode_chat(messages[:-1]), ids + _end_of_turn(tokenizer, ends))


def _is_chat(messages: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Whether these are messages of text, the last of them the assistant's, after another one."""
    return (
        isinstance(messages, list)
        and len(messages) > 1
        and all(isinstance(m, dict) and isinstance(m.get("content"), str) and m.get("role") for m in messages)
        and messages[-1]["role"] == "assistant"
    )


def _end_of_turn(tokenizer: Tokenizer, ends: tuple[int, ...]) -> list[int]:
    """Returns the ids with which the template ends the assistant's turn, up to the first that ends a
    completion."""
    rendered = tokenizer.render_chat(
        [{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}],
        add_generation_prompt=False,
    )
    tail = tokenizer.encode_rendered(rendered.rpartition(MARK)[2])
    before = list(itertools.takewhile(lambda token: token not in ends, tail))
    if len(before) < len(tail):
        return [*before, tail[len(before)]]
    return [ends[0]] if ends else []
