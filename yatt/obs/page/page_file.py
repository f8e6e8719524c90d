"""A page that a person asked for: its templates, and its file."""

import unicodedata
from html import escape
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from yatt.adapters.files.files import write_atomically
from yatt.errors import ConfigError

MAX_TEXT = 3000
"""Characters of one value that are shown."""


def visible_text(value: Any) -> str:
    """Returns any value as text with visible control characters, truncated if very long."""
    text = str(value)
    cut = f" ... ({len(text) - MAX_TEXT} more characters)" if len(text) > MAX_TEXT else ""
    return "".join(map(_visible, text[:MAX_TEXT])) + cut


def as_html(value: Any) -> str:
    """Returns any value as HTML text, for drawings, which no template makes."""
    return escape(visible_text(value))


def render_page(template: str, title: str, **values: Any) -> str:
    """Returns the HTML text of a page. Every value is escaped, but for `Markup`."""
    return _TEMPLATES.get_template(template).render(title=title, **values)


def render_part(macro: str, *values: Any) -> Markup:
    """Returns a part of a page, by a macro of `parts.html.j2`."""
    part = getattr(_TEMPLATES.get_template("parts.html.j2").module, macro)
    return Markup(part(*values))


def _shown(value: Any) -> Any:
    return value if isinstance(value, Markup) else visible_text(value)


def _visible(character: str) -> str:
    """Replaces control characters and lone surrogates by visible characters that can be encoded."""
    if character in "\n\t":
        return character
    kind = unicodedata.category(character)
    if kind == "Cs":
        return "\ufffd"
    if kind == "Cc":
        return chr(0x2400 + ord(character)) if ord(character) < 0x20 else "\u2421"
    return character


_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    finalize=_shown,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)


def write_page(path: Path, page: str, option: str) -> None:
    """Writes a whole page, or nothing.

    Args:
        option: of the command line, which names the file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        write_atomically(path, page.encode(errors="replace"))
    except OSError as error:
        raise ConfigError(
            f"{path}: the page cannot be written ({error.strerror}). Name another file with {option}."
        ) from error
