"""Makes text safe for a terminal: control characters and escape sequences are escaped."""


def printable(text: str) -> str:
    """Returns `text` in one line, with a Python escape for every character that is not printable."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """Applies `printable` to each line and keeps the line breaks."""
    return "\n".join(map(printable, text.split("\n")))
