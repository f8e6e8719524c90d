"""A file of lines for people that keeps its newest lines: when it is full, its older half goes.

For a file that is read by its name and may be written anew at any time. Where every line counts there are
segments instead (`yatt.adapters.files.segments`).
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from yatt.adapters.files.files import publish_stream
from yatt.plain_files import open_regular

CHUNK_BYTES = 1 << 20


class ShortenedFile:
    """Shortens the file before a writer appends to it.

    Args:
        most_bytes: size at which the file is full.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path, self._most_bytes, self._due_bytes = path, most_bytes, most_bytes

    def shorten(self) -> None:
        """Replaces a full file by one with its newest half. What fails is tried again later, when the file
        has grown by an eighth: nothing that is appended waits for it."""
        with contextlib.suppress(OSError):
            size = os.stat(self._path).st_size
            if size < self._due_bytes:
                return
            self._due_bytes = size + self._most_bytes // 8
            publish_stream(self._path, _lines_after(self._path, size - self._most_bytes // 2))
            self._due_bytes = self._most_bytes


def _lines_after(path: Path, begin: int) -> Iterator[bytes]:
    with open_regular(path) as file:
        file.seek(begin)
        file.readline()  # the rest of one
        if file.tell() >= os.fstat(file.fileno()).st_size:  # of the last one, which is very long: it stays
            file.seek(0)
            file.seek(file.read(begin).rfind(b"\n") + 1)
        while data := file.read(CHUNK_BYTES):
            yield data
