"""Text that is safe to show: control characters and escape sequences are written out, not sent."""


def printable(text: str) -> str:
    """`text` in one line, every character that is not printable written as its Python escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """As `printable`, for each line of a text that has several on purpose."""
    return "\n".join(map(printable, text.split("\n")))
