"""Makes text safe for a terminal (control characters and escape sequences are escaped), and shows values."""

import reprlib
from typing import Any


def printable(text: str) -> str:
    """Returns `text` in one line, with a Python escape for every character that is not printable."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """Applies `printable` to each line and keeps the line breaks."""
    return "\n".join(map(printable, text.split("\n")))


def all_digits(value: float) -> str:
    """Returns a number with all its digits, whole ones without a point."""
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else repr(value)


class _Short(reprlib.Repr):
    """Strings are cut, bytes are counted, and of other things the first few are shown."""

    def repr_bytes(self, value: bytes, level: int) -> str:  # noqa: ARG002
        return f"<{len(value):,} bytes>"

    repr_bytearray = repr_bytes


_SHORT = _Short()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxstring, _SHORT.maxother = 4, 12, 4, 80, 80


def value_in_words(value: Any, most: int = 240) -> str:
    """Returns a value of data or of a function for a message: printable, in one line, `most` characters and
    dots at most. Bytes, as a picture's, are shown by their number only."""
    try:
        shown = printable(_SHORT.repr(value))
    except ValueError:  # an int of more digits than Python writes
        shown = f"<{type(value).__name__}>"
    return shown if len(shown) <= most else f"{shown[:most]} ..."
