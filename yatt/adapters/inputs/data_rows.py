"""Reads and checks the rows of prompt files, JSONL and parquet, one after the other.

verl's columns are read unchanged; other names come from the config. Values keep the types of the file.
"""

import itertools
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yatt.adapters.inputs.data_file import data_lines, opened_data
from yatt.adapters.inputs.media import media_of
from yatt.adapters.inputs.parquet_rows import column_names, parquet_rows
from yatt.config.schema import DataSection, RunConfig
from yatt.config.sections.given import GROUP_SIZES, RowForm
from yatt.errors import ConfigError
from yatt.plain_files import MAX_DEPTH, encoding_fault, is_deeper
from yatt.printable import value_in_words
from yatt.records.episode import IMAGE_MARK, VIDEO_MARK, MediaRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt. `prompt` is text, or a list of chat messages ({role, content}).

    `ground_truth` is the value of its column, of any type; None if the row has none.
    """

    prompt: str | list[dict[str, Any]]
    ground_truth: Any
    data_source: str
    raw: dict[str, Any]
    media: tuple[MediaRef, ...] = ()
    given: tuple[str | list[dict[str, Any]], ...] = ()
    """Where rows have completions: what follows the prompt, text or messages; of a pair the preferred one
    first."""

    @property
    def is_equal_pair(self) -> bool:
        """Whether nothing can be learnt: both completions of a pair are the same."""
        return len(self.given) > 1 and self.given[0] == self.given[1]


def truth_text(value: Any) -> str:
    """Returns a ground truth as text for templates: text unchanged, anything else as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def conversation_of(prompt: str | list[dict[str, Any]], *said: tuple[str, str]) -> list[dict[str, Any]]:
    """Returns a prompt's messages and what was said after it, role and text each: for models that are shown
    conversations."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [*messages, *({"role": role, "content": text} for role, text in said)]


def prompt_text(prompt: str | list[dict[str, Any]]) -> str:
    """Prompt text without control tokens: a single message's content, else all messages with roles."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def config_columns(data: DataSection) -> frozenset[str]:
    """Returns the columns at the top that the config names, and verl's `extra_info`."""
    keys = [data.prompt_key, data.ground_truth_key, data.data_source_key]
    keys += [data.image_key, data.video_key] if data.media_store else []
    keys += [*GIVEN_COLUMNS[data.form], TOOLS] if data.form != "prompts" else []
    return frozenset(key.split(".", 1)[0] for key in keys if key) | {"extra_info"}


def has_column(path: Path, names: Collection[str]) -> bool:
    """Whether some row of a file may have one of these columns at the top.

    Raises:
        ConfigError, OSError: as in `raw_rows`.
    """
    if path.suffix == ".parquet":
        return not set(names).isdisjoint(column_names(path))
    with opened_data(path) as file:
        return any(_may_have(line, names) for line in data_lines(path, file))


def _may_have(line: bytes, names: Collection[str]) -> bool:
    """Whether a line may have one of these keys; only where characters are escaped, it is parsed."""
    if any(f'"{name}"'.encode() in line for name in names):
        return True
    if b"\\u" not in line and b"\\/" not in line:
        return False
    try:
        return not set(names).isdisjoint(json.loads(line))
    except (ValueError, TypeError, RecursionError):  # told by who reads the rows
        return False


def called_columns(config: RunConfig) -> frozenset[str] | None:
    """Returns the columns that functions are called with; None: all of a row's."""
    if config.environment.path or any(reward.style == "trl" for reward in config.rewards):
        return None
    return config_columns(config.data)


def raw_rows(path: Path, columns: Collection[str] | None = None) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields every row of a file as it is there, with its place, for messages.

    Args:
        columns: those that are read of a parquet file; None: all.

    Raises:
        ConfigError: the file or a row cannot be read.
        OSError: a transient error, which is not a user error.
    """
    if path.suffix == ".parquet":
        rows = parquet_rows(path, columns)
        yield from ((raw, f"{path}: row {number}") for number, raw in enumerate(rows, start=1))
        return
    with opened_data(path) as file:
        for number, line in enumerate(data_lines(path, file), start=1):
            if number == 1 and (fault := encoding_fault(line)):
                raise ConfigError(f"{path}: {fault}.")
            if not line.isspace():
                yield _parsed(line, f"{path}: row {number}"), f"{path}: row {number}"


def _parsed(line: bytes, place: str) -> dict[str, Any]:
    try:
        raw = json.loads(line.decode("utf-8-sig" if line.startswith(b"\xef\xbb\xbf") else "utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{place} is not text in UTF-8 ({error.reason}); save the file as UTF-8."
        ) from error
    except json.JSONDecodeError as error:
        shown = _shown(line.decode(errors="replace"))
        raise ConfigError(f"{place} is not JSON ({error.msg}): {shown}") from error
    except RecursionError as error:
        raise ConfigError(f"{place} is nested too deeply.") from error
    except ValueError as error:
        raise ConfigError(f"{place} cannot be read as JSON: {error}.") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{place} is not an object of columns: {_shown(line.decode(errors='replace'))}")
    return raw


def data_row(raw: dict[str, Any], place: str, data: DataSection) -> Row:
    """Returns a row with the columns that the config names.

    Raises:
        ConfigError: a column has a value that cannot be used.
    """
    if is_deeper(raw, MAX_DEPTH):
        raise ConfigError(f"{place} is nested too deeply, more than {MAX_DEPTH} levels.")
    prompt = _descend(raw, data.prompt_key)
    if isinstance(prompt, list):
        prompt = without_nulls(prompt)
    given: tuple[Any, ...] = ()
    if data.form in GROUP_SIZES:
        prompt, given = _with_given(prompt, raw, place, data)
    media = _media_in(raw, place, data)
    if data.media_store:
        prompt = with_picture_marks(prompt, has_videos=data.video_key in raw)
    if not (isinstance(prompt, str) or _is_chat(prompt)) or not prompt:
        what = "has no" if prompt in (None, "", []) else "has an unreadable"
        raise ConfigError(
            f"{place} {what} prompt: column '{data.prompt_key}' must be text or a list of "
            f"{{role, content}} messages, both text. The row: {value_in_words(raw)}. "
            f"Correct the row, or write the column in data.prompt_key."
        )
    num_videos = sum(ref.is_video for ref in media)
    _refuse_other_marks(prompt, raw, (data.image_key, IMAGE_MARK, len(media) - num_videos), place, data)
    _refuse_other_marks(prompt, raw, (data.video_key, VIDEO_MARK, num_videos), place, data)
    source = _descend(raw, data.data_source_key)
    truth = _descend(raw, data.ground_truth_key) if data.ground_truth_key else None
    origin = data.default_data_source if source is None else str(source)
    told = (("prompt", truth_text(prompt)), ("ground truth", truth_text(truth)), ("data source", origin))
    for name, text in told:
        _refuse_surrogates(text, name, place)
    return Row(
        prompt=prompt,
        ground_truth=truth,
        data_source=origin,
        raw=raw,
        media=media,
        given=given,
    )


ASSISTANT = "assistant"
"""Role of the model's own messages."""


def _with_given(
    prompt: Any, raw: dict[str, Any], place: str, data: DataSection
) -> tuple[Any, tuple[str | list[dict[str, Any]], ...]]:
    """Returns the prompt of a row with completions, and what follows it.

    A conversation ends with a message of the assistant. One that begins with another message has its prompt
    in itself, and a prompt column is not read.

    Raises:
        ConfigError: the row has another form.
    """
    names = GIVEN_COLUMNS[data.form]
    if data.form == "completions":  # either of them
        names = names[:1] if raw.get(names[0]) is not None else names[1:]
    found: list[Any] = [
        without_nulls(each) if isinstance(each := raw.get(name), list) else each for name in names
    ]
    if all(map(_is_conversation, found)):
        if isinstance(prompt, list) and any(chat[: len(prompt)] != prompt for chat in found):
            raise ConfigError(
                f"{place}: a completion begins with a message that is not the assistant's, and not as the "
                f"messages in '{data.prompt_key}' do: what comes first? Begin it with the assistant's "
                "message, or write the whole conversation."
            )
        prompt, found = _without_prompt(found)
    for each in found:
        _refuse_surrogates(truth_text(each), "completion", place)
    is_text = isinstance(prompt, str) and all(isinstance(each, str) and each for each in found)
    is_chat = _is_chat(prompt) and all(map(_is_answered, found))
    if not prompt or not (is_text or is_chat):
        raise ConfigError(
            f"{place} needs {_FORMS[data.form].format(prompt=data.prompt_key)}{_silent(found)}. The row: "
            f"{value_in_words(raw)}. Correct the row, or make such columns of others with data.map."
        )
    if raw.get(TOOLS):
        raise ConfigError(
            f"{place} has '{TOOLS}', which the chat template is not shown, so calls of them would be learnt "
            "without them. Write them into the system message, and leave the column out (data.map)."
        )
    return prompt, tuple(found)


TOOLS = "tools"
"""Column of the functions that a conversation may call."""

GIVEN_COLUMNS: dict[RowForm, list[str]] = {
    "prompts": [], "groups": ["completion", "messages", "chosen", "rejected", "label"],
    "completions": ["completion", "messages"], "pairs": ["chosen", "rejected"],
}  # fmt: skip
"""Columns at the top of rows with completions."""

_FORMS = {
    "completions": "'{prompt}' and 'completion', both text; or '{prompt}' as messages and 'completion' as "
    "text or messages; or 'messages'; messages end with one of the assistant",
    "pairs": "'{prompt}', 'chosen' and 'rejected', all text; or '{prompt}' as messages and the others as "
    "text or messages; or 'chosen' and 'rejected' as messages with a common beginning; each ends with a "
    "message of the assistant",
}


def _silent(found: list[Any]) -> str:
    """Names the first message without content, in words that follow a sentence."""
    messages = (each for chat in found if isinstance(chat, list) for each in chat)
    silent = [each for each in messages if isinstance(each, dict) and each.get("content") is None]
    return f"; a message has no 'content': {value_in_words(silent[0])}" if silent else ""


def _is_answered(given: Any) -> bool:
    """Whether it is an answer to a conversation: text, or messages from the assistant to the assistant."""
    if isinstance(given, str):
        return bool(given)
    return _is_chat(given) and bool(given) and given[0]["role"] == given[-1]["role"] == ASSISTANT


def _is_conversation(given: Any) -> bool:
    """Whether it has the prompt too."""
    return _is_chat(given) and bool(given) and given[0]["role"] != ASSISTANT


def _without_prompt(chats: list[list[dict[str, Any]]]) -> tuple[Any, list[Any]]:
    """Splits a conversation before its first message of the assistant; two of them after the messages that
    both have, their last ones aside."""
    if len(chats) == 1:
        roles = [message["role"] for message in chats[0]]
        size = roles.index(ASSISTANT) if ASSISTANT in roles else len(roles)
    else:
        pairs = zip(*(chat[:-1] for chat in chats), strict=False)
        size = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return chats[0][:size], [chat[size:] for chat in chats]


def without_nulls(messages: list[Any]) -> list[Any]:
    """Returns messages without keys of theirs, or of their tool calls, whose value is null: parquet has every
    key in every message, and a chat template that looks whether a key is there would take them for given.
    Null among the arguments of a tool call is a value."""
    found = []
    for message in messages:
        if not isinstance(message, dict):
            return messages  # refused by whoever reads it
        message = _without_null_keys(message)
        if isinstance(calls := message.get("tool_calls"), list):
            message["tool_calls"] = [_without_null_keys(call) for call in calls]
        found.append(message)
    return found


def _without_null_keys(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: each for key, each in value.items() if each is not None}


def _refuse_surrogates(text: str, name: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{place}: its {name} contains a lone surrogate (at {error.start}), which no tokenizer accepts. "
            "Correct the row."
        ) from error


def _media_in(raw: dict[str, Any], place: str, data: DataSection) -> tuple[MediaRef, ...]:
    """Returns the pictures of a row, then its videos; none if the model takes none."""
    if not data.media_store:
        return ()
    videos = media_of(raw.get(data.video_key), place, are_videos=True)
    return (*media_of(raw.get(data.image_key), place), *videos)


def with_picture_marks(prompt: Any, *, has_videos: bool = False) -> Any:
    """Returns messages whose contents are text: parts become their text, and marks for pictures and videos.

    Args:
        has_videos: whether the row has a column of videos; else a part that is one is left as it is.
    """
    if not isinstance(prompt, list):
        return prompt
    marks = _MARKS if has_videos else {"image": IMAGE_MARK}
    return [
        message | {"content": _text_of_parts(content, marks)}
        if isinstance(message, dict) and isinstance(content := message.get("content"), list)
        else message
        for message in prompt
    ]


_MARKS = {"image": IMAGE_MARK, "video": VIDEO_MARK}


def _text_of_parts(parts: list[Any], marks: Mapping[str, str]) -> Any:
    texts = [text for part in parts if (text := _part_text(part, marks)) is not None]
    return "".join(texts) if len(texts) == len(parts) else parts  # refused by whoever reads it


def _part_text(part: Any, marks: Mapping[str, str]) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in marks:
        return marks[kind]
    text = part.get("text") if kind == "text" else None
    return text if isinstance(text, str) else None


def _refuse_other_marks(
    prompt: Any, raw: dict[str, Any], wanted: tuple[str, str, int], place: str, data: DataSection
) -> None:
    """Refuses a row whose prompt has more or fewer marks than the row has pictures, or videos.

    A mark in a row without the column is text.

    Args:
        wanted: the column, the mark, and how many the row has.
    """
    key, mark, num = wanted
    if not data.media_store or key not in raw:
        return
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    if (marks := sum(text.count(mark) for text in texts)) != num:
        kind = "picture" if mark == IMAGE_MARK else "video"
        raise ConfigError(
            f"{place}: its prompt has {marks} times {mark}, but column '{key}' has {num} {kind}s. Write the "
            f"mark where each {kind} belongs."
        )


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in prompt
    )


def _descend(raw: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(raw, dict):
            return None
        raw = raw.get(part)
    return raw


def _shown(text: str, width: int = 160) -> str:
    text = text.strip()
    return text if len(text) <= width else text[:width] + " ..."
