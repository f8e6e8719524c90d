"""The messages of requests to a service behind a URL, and what its answers quote of their pictures. Pure."""

import base64
import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

Content = str | Sequence[str | None]
"""A question: text, or pieces of text with None in place of each picture."""

LEAST_QUOTE = 32
_LETTERS = re.compile(rf"[A-Za-z0-9+/]{{{LEAST_QUOTE},}}={{0,2}}")
"""What may be quoted of a picture in base64."""

MOST_QUOTES = 64
"""Quotes of an answer that are looked up in pictures; of one with more, all are taken for quotes."""


def message_content(content: Content, mark: str) -> str | list[dict[str, Any]]:
    """Returns the content of a message, as OpenAI's API has it."""
    if isinstance(content, str):
        return content
    picture = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{mark}"}}
    found: list[dict[str, Any]] = []
    for part in content:
        if part is None:
            found.append(picture)
        elif found and found[-1] is not picture:
            found[-1]["text"] += part  # one part: some services put a line break between parts
        else:
            found.append({"type": "text", "text": part})
    return found


def without_quotes(text: str, files: Sequence[memoryview]) -> str:
    """Returns a text with "..." in place of what it quotes of these files in base64."""
    quotes = sum(1 for _ in islice(_LETTERS.finditer(text), MOST_QUOTES + 1))
    if not quotes:
        return text
    whole = [base64.b64encode(file).decode() for file in files] if quotes <= MOST_QUOTES else []

    def shown(found: re.Match[str]) -> str:
        quote = found.group().rstrip("=")
        ends = quote[:LEAST_QUOTE], quote[-LEAST_QUOTE:]
        return found.group() if whole and not any(end in each for each in whole for end in ends) else "..."

    return _LETTERS.sub(shown, text)
