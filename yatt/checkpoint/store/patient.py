"""A store that retries: every call that fails temporarily is repeated until a deadline."""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from yatt.adapters.files.files import Buffer
from yatt.adapters.files.patience import with_retries
from yatt.checkpoint.store.file_faults import FileFaults
from yatt.checkpoint.store.store import MOST_NOTE_BYTES, Store, Written

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


def _nothing(*_: str) -> None:
    """Does nothing; the default of `tick` and `say`."""


class PatientStore:
    """Wraps a store and repeats calls after temporary failures. A stream is started again.

    One file of a checkpoint that fails while the store responds is retried for two minutes at most; then it
    is treated as damaged (`yatt.checkpoint.store.file_faults`).

    Args:
        limit_s: for each call, from its first failure on; a later failure of a stream restarts the limit.
        tick: called after each failure, so that this wait counts as progress.
        say: called with the error when a wait begins, and with "" when it ends, in success or failure.
    """

    def __init__(
        self,
        store: Store,
        *,
        limit_s: float,
        tick: Callable[[], None] = _nothing,
        say: Callable[[str], None] = _nothing,
    ) -> None:
        self._store: Store = FileFaults(store, store_limit_s=limit_s)
        self._limit_s, self._tick, self._say = limit_s, tick, say
        self._has_said = False

    def write(self, name: str, data: bytes) -> None:
        self._patiently(partial(self._store.write, name, data))

    def write_stream(self, name: str, chunks: Callable[[], Iterable[Buffer]]) -> Written:
        return self._patiently(partial(self._store.write_stream, name, chunks))

    def create(self, name: str, data: bytes) -> bool:
        return self._patiently(partial(self._store.create, name, data))

    def read(self, name: str, *, most_bytes: int = MOST_NOTE_BYTES) -> bytes:
        return self._patiently(partial(self._store.read, name, most_bytes=most_bytes))

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return self._patiently(partial(self._store.read_ranges, name, ranges))

    def size(self, name: str) -> int | None:
        return self._patiently(partial(self._store.size, name))

    def names(self, folder: str) -> list[str]:
        return self._patiently(partial(self._store.names, folder))

    def delete(self, name: str) -> None:
        self._patiently(partial(self._store.delete, name))

    def delete_folder(self, folder: str) -> None:
        self._patiently(partial(self._store.delete_folder, folder))

    def delete_empty_folder(self, folder: str) -> None:
        self._patiently(partial(self._store.delete_empty_folder, folder))

    def _patiently(self, work: Callable[[], T]) -> T:
        try:
            given = with_retries(work, limit_s=self._limit_s, on_failure=self._failed)
            if self._has_said:
                _LOG.warning("the checkpoint store answers again")
            return given
        finally:
            if self._has_said:
                self._has_said = False
                self._say("")

    def _failed(self, error: Exception) -> None:
        self._tick()
        if not self._has_said:
            self._has_said = True
            self._say(str(error))
            _LOG.warning("the checkpoint store fails (%s); trying again, up to %g s", error, self._limit_s)
