"""A store that treats a file as damaged if only this file stays unreadable for a while.

A bad block fails forever while the rest of the store responds. Waiting for it as for a store that is down
would end the run although older checkpoints are intact. No torch.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from yatt import clock
from yatt.adapters.files.files import Buffer
from yatt.adapters.files.patience import LIMIT_S
from yatt.checkpoint.store.store import MOST_NOTE_BYTES, Store, Written
from yatt.checkpoint.store.store_errors import is_told_to_wait
from yatt.errors import CheckpointError, StoreUnreachable

T = TypeVar("T")
PROBE = "run_id"
"""A name in every run's store; reading it tests whether the store responds
(`yatt.checkpoint.commit.ownership`)."""


class FileFaults:
    """Wraps a store. A file that fails repeatedly while the store responds raises CheckpointError. Without a
    response, or if the store only asks to retry later, the failure is raised unchanged.

    Names without a folder identify the store and are never taken for damaged.

    Args:
        store_limit_s: longest wait for a store that fails as a whole. For one file that fails while the rest
            responds, it is half of that, and at most two minutes.
        since_s: the time of the first failure of each failing file; for a caller that reopens the store.
    """

    def __init__(
        self, store: Store, *, store_limit_s: float, since_s: dict[str, float] | None = None
    ) -> None:
        self._store, self._limit_s = store, min(LIMIT_S, store_limit_s / 2)
        self._since_s = {} if since_s is None else since_s

    def write(self, name: str, data: bytes) -> None:
        self._store.write(name, data)

    def write_stream(self, name: str, chunks: Callable[[], Iterable[Buffer]]) -> Written:
        return self._store.write_stream(name, chunks)

    def create(self, name: str, data: bytes) -> bool:
        return self._store.create(name, data)

    def read(self, name: str, *, most_bytes: int = MOST_NOTE_BYTES) -> bytes:
        return self._judged(name, partial(self._store.read, name, most_bytes=most_bytes))

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return self._judged(name, partial(self._store.read_ranges, name, ranges))

    def size(self, name: str) -> int | None:
        return self._judged(name, partial(self._store.size, name))

    def names(self, folder: str) -> list[str]:
        return self._store.names(folder)

    def delete(self, name: str) -> None:
        self._store.delete(name)

    def delete_folder(self, folder: str) -> None:
        self._store.delete_folder(folder)

    def delete_empty_folder(self, folder: str) -> None:
        self._store.delete_empty_folder(folder)

    def _judged(self, name: str, work: Callable[[], T]) -> T:
        try:
            given = work()
        except StoreUnreachable as error:
            if "/" in name and self._is_damaged(name, error):
                raise CheckpointError(f"{error}; the rest of the store can be read") from error
            raise
        self._since_s.pop(name, None)
        return given

    def _is_damaged(self, name: str, error: StoreUnreachable) -> bool:
        if is_told_to_wait(error) or not self._answers():
            self._since_s.pop(name, None)
            return False
        now_s = clock.monotonic_s()
        began_s = self._since_s.setdefault(name, now_s)
        return not error.is_passing or now_s - began_s >= self._limit_s

    def _answers(self) -> bool:
        try:
            return bool(self._store.read(PROBE).strip() and self._store.names("manifests"))
        except (StoreUnreachable, CheckpointError):
            return False
