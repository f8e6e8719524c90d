"""Text to token ids and back, without transformers: `tokenizer.json` and the chat template, read directly.

A controller tokenises on nodes' host cores and must start in milliseconds, so it reads the fast
tokenizer's own file. Equality with transformers' AutoTokenizer is tested on several kinds of tokenizer.

Not promised: tokenizers that exist only as Python code or SentencePiece files; save those once with
transformers' `save_pretrained`, which writes `tokenizer.json`. Nor is a `tokenizer_class` followed that
contradicts `tokenizer.json` (transformers then rebuilds its own): the file counts.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from yatt.errors import ConfigError

Chat = list[dict[str, Any]]
_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of one Hugging Face folder.

    Raises:
        ConfigError: a file is missing or cannot be read.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._fast = _load_fast(self._folder)
        self._config = _read_json(self._folder / "tokenizer_config.json")
        self._template_text = _chat_template(self._folder, self._config)
        self.eos_ids = eos_ids(folder)
        """Tokens that end a completion."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with the special tokens the tokenizer adds (a BOS, say)."""
        return list(self._fast.encode(text, add_special_tokens=True).ids)

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of text from `render_chat`, which holds its special tokens already."""
        return list(self._fast.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        """Text of `ids`."""
        return str(self._fast.decode(ids, skip_special_tokens=skip_special))

    def render_chat(self, messages: Chat, *, add_generation_prompt: bool = True) -> str:
        """Messages as the model's chat template writes them.

        Raises:
            ConfigError: the folder has no chat template, or the template refuses the messages.
        """
        if not self._template_text:
            raise ConfigError(
                f"{self._folder} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); add one, or use prompts that are plain text."
            )
        named = {name: token for name in _NAMED_TOKENS if (token := _token_text(self._config.get(name)))}
        try:
            template = _environment().from_string(self._template_text)
            return template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **named,
            )
        except TemplateError as error:
            raise ConfigError(f"the chat template of {self._folder} refuses a prompt: {error}") from error


def eos_ids(folder: str) -> tuple[int, ...]:
    """Ids that end a completion: of generation_config.json, config.json and the tokenizer's EOS token.

    Instruction-tuned models name two of them (end of turn, end of text) in different files; an engine
    that knows only one runs to the length limit.

    Raises:
        ConfigError: no file names one.
    """
    root, found = Path(folder), set[int]()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(root / name).get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    text = _token_text(_read_json(root / "tokenizer_config.json").get("eos_token"))
    if text and (root / "tokenizer.json").is_file():
        token = _load_fast(root).token_to_id(text)
        found.update([] if token is None else [token])
    if not found:
        raise ConfigError(
            f"{root} names no end-of-sequence token; write eos_token_id into its generation_config.json."
        )
    return tuple(sorted(found))


def _load_fast(root: Path) -> tokenizers.Tokenizer:
    path = root / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{root} has no tokenizer.json; save the model's tokenizer there once with "
            "transformers.AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)."
        )
    try:
        fast = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise ConfigError(f"{path} cannot be read as a fast tokenizer: {error}") from error
    fast.no_truncation()
    fast.no_padding()
    return fast


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _token_text(entry: Any) -> str:
    """A special token is written as text or as an object with `content`."""
    value = entry.get("content") if isinstance(entry, dict) else entry
    return value if isinstance(value, str) else ""


def _chat_template(root: Path, config: dict[str, Any]) -> str:
    own_file = root / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    entry = config.get("chat_template")
    if isinstance(entry, list):
        named = {item["name"]: item["template"] for item in entry}
        return str(named.get("default", ""))
    return entry if isinstance(entry, str) else ""


class _GenerationTag(Extension):
    """``{% generation %}``: marks the assistant's text for trainers; here its content is just text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own convention

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers sets it up, so that published templates render the same."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
