"""A page that a person asked for: its frame, and its file."""

from pathlib import Path

from yatt.adapters.files import publish
from yatt.errors import ConfigError
from yatt.obs.style import STYLE

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What a browser may do with a page, whatever of a stranger gets into it: nothing runs or is fetched."""


def whole_page(title: str, body: str) -> str:
    """Returns the HTML text of a page.

    Args:
        title: escaped.
        body: HTML.
    """
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def write_page(path: Path, page: str, option: str) -> None:
    """Writes a whole page, or nothing.

    Args:
        option: of the command line, which names the file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        publish(path, page.encode(errors="replace"))
    except OSError as error:
        raise ConfigError(
            f"{path}: the page cannot be written ({error.strerror}). Name another file with {option}."
        ) from error
