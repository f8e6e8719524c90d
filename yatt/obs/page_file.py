"""Writes a page that a person asked for."""

from pathlib import Path

from yatt.adapters.files import publish
from yatt.errors import ConfigError


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
