"""Converts text to token ids and back, without transformers, from `tokenizer.json` and the chat template.

A controller tokenises on the node's CPUs and must start in milliseconds, so it reads the fast tokenizer's own
file. Tests compare it with transformers' AutoTokenizer for several kinds of tokenizer.

Not supported: tokenizers that exist only as Python code or SentencePiece files; save those once with
transformers' `save_pretrained`, which writes `tokenizer.json`. A `tokenizer_class` that contradicts
`tokenizer.json` is ignored (transformers then rebuilds its own tokenizer).
"""

import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from yatt.adapters.inputs.text_parts import (
    Content,
    Hidden,
    TextPart,
    content_of,
    is_trusted_match,
    new_mark,
    trimmed_parts,
    unhidden_parts,
)
from yatt.errors import ConfigError, words_of
from yatt.models.config_types import TOKENS, tokenizer_fault
from yatt.plain_files import encoding_fault, read_json_object, read_plain, text_of

Chat = list[dict[str, Any]]
MAX_TOKENIZER_BYTES = 1 << 29
MOST_IDS = 1 << 31
TEMPLATE_FILE = "chat_template.jinja"


class Tokenizer:
    """The tokenizer of one Hugging Face folder.

    Args:
        now: the current time for chat templates, ISO 8601; empty: the system clock.

    Raises:
        ConfigError: a file is missing or cannot be read.
    """

    def __init__(self, folder: str, now: str = "") -> None:
        self.folder, self._now = Path(folder), now
        self._fast = _load_fast(self.folder)
        self._plain = _load_fast(self.folder)
        self._plain.encode_special_tokens = True  # special tokens in text are ordinary text
        self._special = _special_pattern(self._fast)
        self._added = _added_before(self._fast)
        self._template: Template | None = None
        self._config = _read_json(self.folder / "tokenizer_config.json")
        if fault := tokenizer_fault(self._config):
            raise ConfigError(f"{self.folder / 'tokenizer_config.json'} {fault}.")
        self._template_text = _chat_template(self.folder, self._config)
        self.eos_ids = eos_ids(folder)
        """Tokens that end a completion."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of trusted text, with special tokens that the tokenizer adds (for example BOS). A
        text that begins with them gets none."""
        return self._once(list(self._fast.encode(text, add_special_tokens=True).ids))

    def encode_rendered(self, text: str) -> list[int]:
        """Returns the ids of trusted text from `render_chat`, which contains its special tokens already."""
        return list(self._fast.encode(text, add_special_tokens=False).ids)

    def encode_parts(self, parts: Sequence[TextPart], *, adds_special: bool) -> list[int]:
        """Returns the ids of a text of which only some parts are trusted.

        A special token is parsed only if it lies completely in a trusted part. In other parts it is ordinary
        text: data and completions cannot end or begin a turn. If they contain none, the ids are those of the
        whole text.

        Args:
            adds_special: whether to add the tokenizer's own special tokens (for example BOS). A text whose
                trusted part begins with them gets none.
        """
        text = "".join(part.text for part in parts)
        matches = list(self._special.finditer(text)) if self._special else []
        meant = [match for match in matches if is_trusted_match(match, parts)]
        if len(meant) == len(matches):
            ids = list(self._fast.encode(text, add_special_tokens=adds_special).ids)
            return self._once(ids) if adds_special else ids
        ids = list(self._fast.encode("", add_special_tokens=True).ids) if adds_special else []
        at = 0
        for match in meant:
            ids += self._plain.encode(text[at : match.start()], add_special_tokens=False).ids
            token: Any = self._fast.token_to_id(match[0])
            ids.append(int(token))
            at = match.end()
        ids += self._plain.encode(text[at:], add_special_tokens=False).ids
        return self._once(ids) if adds_special else ids

    def _once(self, ids: list[int]) -> list[int]:
        """Takes out what was added before a text that begins with it, as a rendered prompt does."""
        size = len(self._added)
        return ids[size:] if size and ids[size : 2 * size] == self._added else ids

    def encode_plain(self, text: str) -> list[int]:
        """Returns the ids of untrusted text that continues other text."""
        return self.encode_parts([TextPart(text, False)], adds_special=False)

    def encode_answer(self, role: str, content: Content) -> list[int]:
        """Returns the ids of a message with untrusted text that follows the policy's turn, in the model's
        template: from the end of the policy's turn to the beginning of its next one.

        Args:
            content: as in `encode_chat`.

        Raises:
            ConfigError: see `render_chat`; or the template does not show the policy's turns.
        """
        said, hidden = new_mark(), Hidden()
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": said}]
        rendered = self.render_chat([*before, {"role": role, "content": content_of(content, str)}])
        marked = self.render_chat([*before, {"role": role, "content": content_of(content, hidden.hide)}])
        if said not in marked or said not in rendered:
            raise ConfigError(f"the chat template of {self.folder} does not show the assistant's messages.")
        parts = unhidden_parts(marked.rpartition(said)[2], hidden.texts)
        plain = rendered.partition(said)[2]
        texts = hidden.texts.values()
        if any(mark not in marked and text.strip() not in plain for mark, text in hidden.texts.items()):
            raise ConfigError(
                f"the chat template of {self.folder} does not show messages of the role {role}; write "
                "another role.",
                key="environment.role",
            )
        if "".join(part.text for part in parts) != plain and not any(map(self.has_special, texts)):
            return self.encode_rendered(plain)  # the template trims or inspects the contents
        return self.encode_parts(parts, adds_special=False)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Returns the ids of chat messages with untrusted contents, in the model's template.

        Args:
            messages: {role, content, ...}; a content is text, or a list of `TextPart` and `PICTURE`. The
                template gets a list of parts, as transformers' processors have it, where there are pictures.

        Raises:
            ConfigError: see `render_chat`.
        """
        parts = self.chat_parts(messages, add_generation_prompt=add_generation_prompt)
        return self.encode_parts(parts, adds_special=False)

    def chat_parts(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[TextPart]:
        """Returns the text of chat messages in the model's template, with the contents not trusted; see
        `encode_chat`."""
        hidden = Hidden()
        plain = [{**message, "content": content_of(message["content"], str)} for message in messages]
        marked = [{**message, "content": content_of(message["content"], hidden.hide)} for message in messages]
        render = partial(self.render_chat, add_generation_prompt=add_generation_prompt)
        rendered = render(plain)
        parts = unhidden_parts(render(marked), hidden.texts)
        if (shown := trimmed_parts(parts, rendered)) is not None:
            return shown
        inspected = not self._spells_special(hidden.texts.values())  # by the template, and harmless
        return [TextPart(rendered, True)] if inspected else parts

    @cached_property
    def end_of_turn(self) -> tuple[str, int] | None:
        """The control token that follows an assistant's message in the chat template, and its id.
        None if there is none."""
        mark = new_mark()
        messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": mark}]
        _, shown, text = self.render_chat(messages, add_generation_prompt=False).rpartition(mark)
        match = self._special.match(text.lstrip()) if shown and self._special else None
        if match is None:
            return None
        number: Any = self._fast.token_to_id(match[0])
        return match[0], int(number)

    def check_vocabulary(self) -> None:
        """Checks that no two tokens have one id, as in a damaged file.

        Raises:
            ConfigError: two have.
        """
        ids = list(self._fast.get_vocab(with_added_tokens=True).values())
        if len(set(ids)) != len(ids):
            raise ConfigError(
                f"{self.folder / 'tokenizer.json'} has {len(ids) - len(set(ids))} tokens with another's id; "
                "copy it again."
            )

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be rendered."""
        return bool(self._template_text)

    def _spells_special(self, texts: Iterable[str]) -> bool:
        return self._special is not None and any(self._special.search(text) for text in texts)

    def has_special(self, text: str) -> bool:
        """Whether `text` contains a special token of this tokenizer."""
        return self._spells_special([text])

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        """Returns the text of `ids`."""
        return str(self._fast.decode(ids, skip_special_tokens=skip_special))

    def render_chat(self, messages: Chat, *, add_generation_prompt: bool = True) -> str:
        """Renders messages with the model's chat template.

        Raises:
            ConfigError: the folder has no chat template, or the template refuses the messages.
        """
        if not self._template_text:
            raise ConfigError(
                f"{self.folder} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); add one, or use prompts that are plain text.",
                missing=str(self.folder / TEMPLATE_FILE),
            )
        named = {name: token for name in TOKENS if (token := _token_text(self._config.get(name)))}
        try:
            if self._template is None:
                self._template = _environment(self._now).from_string(self._template_text)
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **named,
            )
        except MemoryError:
            raise
        except Exception as error:  # a template is a program, which can raise anything
            what = str(error) if isinstance(error, TemplateError) else words_of(error)
            raise ConfigError(f"the chat template of {self.folder} refuses a prompt: {what}") from error


def _added_before(fast: tokenizers.Tokenizer) -> list[int]:
    """Returns the ids that the tokenizer adds before a text."""
    plain = list(fast.encode("a", add_special_tokens=False).ids)
    ids = list(fast.encode("a", add_special_tokens=True).ids)
    starts = (at for at in range(len(ids) - len(plain) + 1) if ids[at : at + len(plain)] == plain)
    return ids[: next(starts, 0)] if plain else []


def eos_ids(folder: str) -> tuple[int, ...]:
    """Ids that end a completion, by generation_config.json, config.json and the tokenizer's EOS token.

    Instruction-tuned models have two of them (end of turn, end of text) in different files; an engine with
    only one of them samples up to the length limit.

    Raises:
        ConfigError: no file names one.
    """
    root, found = Path(folder), set[int]()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(root / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(each) is int and 0 <= each < MOST_IDS for each in ids):
            raise ConfigError(f"{root / name}: eos_token_id must be a token id, or a list of them.")
        found.update(ids)
    text = _token_text(_read_json(root / "tokenizer_config.json").get("eos_token"))
    if text and (data := read_plain(root / "tokenizer.json", MAX_TOKENIZER_BYTES)) is not None:
        token = _fast_of(root / "tokenizer.json", data).token_to_id(text)
        found.update([] if token is None else [token])
    if not found:
        raise ConfigError(
            f"{root} names no end-of-sequence token; write eos_token_id into its generation_config.json."
        )
    return tuple(sorted(found))


def _special_pattern(fast: tokenizers.Tokenizer) -> "re.Pattern[str] | None":
    """Returns a pattern of the tokenizer's special tokens, the longest first; None if it has none."""
    added = fast.get_added_tokens_decoder().values()
    texts = sorted(
        (token.content for token in added if token.special and token.content), key=len, reverse=True
    )
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) or {}


def _load_fast(root: Path) -> tokenizers.Tokenizer:
    path = root / "tokenizer.json"
    if (data := read_plain(path, MAX_TOKENIZER_BYTES)) is None:
        raise ConfigError(
            f"{root} has no tokenizer.json; save the model's tokenizer there once with "
            "transformers.AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER).",
            missing=str(path),
        )
    return _fast_of(path, data)


def _fast_of(path: Path, data: bytes) -> tokenizers.Tokenizer:
    """Parses the content of a tokenizer.json."""
    if fault := encoding_fault(data):
        raise ConfigError(f"{path} {fault}.")
    try:
        fast = tokenizers.Tokenizer.from_buffer(data)
        fast.no_truncation()
        fast.no_padding()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics are no `Exception`
        raise ConfigError(f"{path} cannot be read as a fast tokenizer: {words_of(error)}") from error
    if msgspec.json.decode(data, type=_Added).added_tokens == msgspec.Raw():  # the library does not miss it
        raise ConfigError(f"{path} has no added_tokens, which transformers needs; an empty list will do.")
    return fast


class _Added(msgspec.Struct):
    """What transformers reads of a tokenizer.json by itself."""

    added_tokens: msgspec.Raw = msgspec.Raw()


def _token_text(entry: Any) -> str:
    """Returns a special token's text, written as text or as an object with `content`."""
    value = entry.get("content") if isinstance(entry, dict) else entry
    return value if isinstance(value, str) else ""


def _chat_template(root: Path, config: dict[str, Any]) -> str:
    own_file, place = root / TEMPLATE_FILE, root / "tokenizer_config.json"
    if (data := read_plain(own_file)) is not None:
        return io.StringIO(text_of(own_file, data), newline=None).read()  # with universal newlines
    entry = config.get("chat_template")
    if isinstance(entry, list):
        try:
            entry = {item["name"]: item["template"] for item in entry}.get("default", "")
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"{place}: every entry of the list chat_template must be {{name, template}}."
            ) from error
    if entry is not None and not isinstance(entry, str):
        raise ConfigError(f"{place}: chat_template must be text, or a list of {{name, template}}.")
    return entry or ""


class _GenerationTag(Extension):
    """The tag ``{% generation %}``, which marks the assistant's text for trainers; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own convention

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: str) -> ImmutableSandboxedEnvironment:
    """Returns a jinja environment as in transformers, so that published templates render the same."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: _moment(now).strftime(form)
    return environment


def _moment(now: str) -> datetime:
    return datetime.fromisoformat(now) if now else datetime.now()


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
