"""Text of which only some parts are trusted: the template's own text is, contents of data are not."""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of text; special tokens in it are parsed only if it is trusted."""

    text: str
    is_trusted: bool


PICTURE = None
"""A picture between pieces of text; a chat template writes a placeholder for it."""

VIDEO = TextPart("", True)
"""A video between pieces of text, told from them by identity."""

Content = str | Sequence[TextPart | None]
"""Of a message: untrusted text, or pieces with pictures and videos between them."""


def content_of(content: Content, trust: Callable[[str], str]) -> str | list[dict[str, str]]:
    """Returns a message's content for a chat template: text; with pictures or videos a list of parts, as
    transformers' processors have it.

    Args:
        trust: is applied to text that is not trusted.
    """
    parts = [TextPart(content, False)] if isinstance(content, str) else content
    texts = [part if part is None else part.text if part.is_trusted else trust(part.text) for part in parts]
    if PICTURE not in texts and not any(part is VIDEO for part in parts):
        return "".join(text for text in texts if text is not None)
    return [
        {"type": "image"}
        if text is None
        else {"type": "video"}
        if part is VIDEO
        else {"type": "text", "text": text}
        for text, part in zip(texts, parts, strict=True)
    ]


TRIMS: tuple[Callable[[str], str], ...] = (
    str,
    str.strip,
    str.lstrip,
    str.rstrip,
    lambda text: text.strip("\n"),
    lambda text: text.lstrip("\n"),
)
"""What published chat templates do to contents."""


def trimmed_parts(parts: Sequence[TextPart], text: str) -> list[TextPart] | None:
    """Returns the parts with contents trimmed so that they are `text` together; None if they cannot be."""
    found, at = list[TextPart](), 0
    for part, following in zip(parts, (*parts[1:], TextPart("", True)), strict=True):
        after = following.text if following.is_trusted else ""
        trims = TRIMS[:1] if part.is_trusted else TRIMS
        shown = next((each for trim in trims if text.startswith((each := trim(part.text)) + after, at)), None)
        if shown is None:
            return None
        found.append(TextPart(shown, part.is_trusted))
        at += len(shown)
    return found if at == len(text) else None


def new_mark() -> str:
    """Returns a text that is in no template and no data."""
    return f"\ue000{secrets.token_hex(8)}\ue001"


class Hidden:
    """Texts that are not trusted, by the marks that stand for them while a template is rendered."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def hide(self, text: str) -> str:
        """Returns the mark of a text."""
        mark = new_mark()
        self.texts[mark] = text
        return mark


def is_trusted_match(match: "re.Match[str]", parts: Sequence[TextPart]) -> bool:
    """Whether a match lies completely in one trusted part."""
    ends = list(accumulate(len(part.text) for part in parts))
    return any(
        part.is_trusted and end - len(part.text) <= match.start() and match.end() <= end
        for part, end in zip(parts, ends, strict=True)
    )


def unhidden_parts(text: str, hidden: Mapping[str, str]) -> list[TextPart]:
    """Splits rendered text into the template's own text (trusted) and the hidden contents (not trusted)."""
    if not hidden:
        return [TextPart(text, True)]
    pieces = re.split("(" + "|".join(map(re.escape, hidden)) + ")", text)
    return [TextPart(hidden.get(piece, piece), piece not in hidden) for piece in pieces if piece]
