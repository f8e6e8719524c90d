"""Opens data files and reads lines of bounded length."""

from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from yatt.adapters.files.patience import is_passing
from yatt.errors import ConfigError
from yatt.plain_files import open_regular

MAX_ROW_BYTES = 64 << 20
"""Longest line of a JSONL file; a file without line ends is not read into memory."""

NO_FILE = "no such data file"


def opened_data(path: Path) -> BufferedReader:
    """Opens a data file.

    Raises:
        ConfigError: it does not exist, or cannot be read.
        OSError: a transient error, which is not a user error.
    """
    if not path.is_file():
        made = " It was made when the run was started; `yatt run` with the run file makes it again."
        hint = made if path.parent.suffix == ".data" else ""
        says = f"{path}: {NO_FILE}. Check data.train_files and data.val_files.{hint}"
        raise ConfigError(says, missing=str(path))
    try:
        return open_regular(path)
    except OSError as error:
        if is_passing(error):
            raise
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from error


def data_lines(path: Path, file: BufferedReader) -> Iterator[bytes]:
    """Yields each line with its newline.

    Raises:
        ConfigError: a line is too long.
    """
    number = 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        if len(line) > MAX_ROW_BYTES:
            raise ConfigError(
                f"{path}: row {number} has more than {MAX_ROW_BYTES >> 20} MiB. Write one JSON object a line."
            )
        yield line
