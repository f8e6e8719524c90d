"""Writes a save's files to the local tier too, while they are uploaded.

All work on the local disk is done by one thread per save, and the upload only puts blocks into its queue. So
a disk that is full, fails, hangs or is slow costs the local files of this save, and at most `PATIENCE_S` of
the upload's time.
"""

import errno
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from yatt.adapters.files.files import Buffer
from yatt.adapters.node_local.local_folder import remove
from yatt.checkpoint.commit.writing import Streams
from yatt.checkpoint.local.local_store import LocalStore
from yatt.checkpoint.local.local_tier import LocalTier, UnfinishedFile, folders_of_ended_runs
from yatt.checkpoint.store.store import Written
from yatt.config.schema import RunConfig
from yatt.errors import words_of
from yatt.records.message import Upload

BLOCKS = 32
"""Blocks that wait for the local disk; each has at most `snapshot.BLOCK_BYTES`."""

PATIENCE_S = 5.0
"""Longest time that the threads of an upload wait, all together, for a local disk that is slower."""

CLOSE_S = 10.0
"""Longest wait for the last blocks, after the upload."""

GIVEN_UP_S = 1.0
"""Longest wait for the thread of a save that was given up, before the next save."""

_LOG = logging.getLogger(__name__)
Chunks = Callable[[], Iterable[Buffer]]


class LocalSave:
    """The local files of one save.

    Args:
        opened: opens the tier; an OSError costs the local files.
        keep: prefixes of the saves that stay; all others are removed first.
        size_bytes: of the save's files.
    """

    def __init__(self, opened: Callable[[], LocalTier], keep: Iterable[str], size_bytes: int) -> None:
        self._opened, self._keep, self._size_bytes = opened, frozenset(keep), size_bytes
        self._queue: queue.Queue[Callable[[], None]] = queue.Queue(BLOCKS)
        self._left_s, self._lock = PATIENCE_S, threading.Lock()
        self._tier: LocalTier | None = None
        self._unfinished: dict[str, UnfinishedFile] = {}
        self._finished: list[str] = []
        self._is_done = False
        self.busy_s = 0.0
        """Time that the disk took."""

        self.fault = ""
        """Why there are no local files of this save."""

        self._thread = threading.Thread(target=self._run, name="local-tier", daemon=True)

    def start(self) -> None:
        """Starts the thread. A save that was given up before needs none."""
        self._thread.start()

    def is_busy(self, limit_s: float = 0.0) -> bool:
        """Whether its thread still works, or hangs, after this time."""
        if self._thread.is_alive():
            self._thread.join(limit_s)
        return self._thread.is_alive()

    def beside(self, store: Streams) -> Streams:
        """Returns a store that writes to `store`, and each file to the local disk too."""
        return _Beside(store, self)

    def copied(self, name: str, chunks: Chunks) -> Iterator[Buffer]:
        """Yields the chunks of a stream, and writes them to the local file. A stream that begins again
        replaces what was written."""
        self._put(partial(self._begin, name))
        for chunk in chunks():
            yield chunk
            if not self.fault:
                self._put(partial(self._write, name, bytes(chunk)))
        self._put(partial(self._finish, name))

    def close(self) -> str:
        """Waits for the last blocks; returns why the local files are not there, or an empty text."""
        self._put(self._done)
        if self.is_busy(CLOSE_S):
            self.give_up(f"the disk did not take the last blocks within {CLOSE_S:g} s")
        return self.fault

    def give_up(self, why: str) -> None:
        """Gives the local files up; the thread removes them."""
        self.fault = self.fault or why

    def _put(self, work: Callable[[], None]) -> None:
        """Leaves work to the thread. Waits while the queue is full, up to the limit of the save."""
        began_s = time.monotonic()
        while not self.fault:
            try:
                self._queue.put(work, timeout=min(0.1, self._left_s))
            except queue.Full:
                began_s = self._waited(began_s)
            else:
                return

    def _waited(self, began_s: float) -> float:
        now_s = time.monotonic()
        with self._lock:
            self._left_s = max(0.0, self._left_s - (now_s - began_s))
            if not self._left_s:
                self.give_up("the disk takes less than the checkpoint store")
        return now_s

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._prepare()
            while not self._is_done and not self.fault:
                try:
                    work = self._queue.get(timeout=0.1)
                except queue.Empty:
                    continue
                began_s = time.monotonic()
                work()
                self.busy_s += time.monotonic() - began_s
        except OSError as error:
            self.give_up(words_of(error))
        finally:
            if not self._is_done:
                self.give_up("a defect in writing local files")
                self._remove()

    def _prepare(self) -> None:
        tier = self._tier = self._opened()
        tier.prune(self._keep)
        if (free := tier.free_bytes()) < self._size_bytes:
            need = f"{self._size_bytes / 1e9:.1f} GB are needed, and {max(free, 0) / 1e9:.1f} GB are free"
            raise OSError(errno.ENOSPC, need, str(tier.root))

    def _begin(self, name: str) -> None:
        if name in self._unfinished:
            self._unfinished.pop(name).discard()
        path = self._tier.path(name) if self._tier is not None else None
        if path is None:
            raise OSError(errno.EINVAL, "not a name of a save's file", name)
        self._unfinished[name] = UnfinishedFile(path)

    def _write(self, name: str, data: bytes) -> None:
        self._unfinished[name].write(data)

    def _finish(self, name: str) -> None:
        self._unfinished[name].finish()
        del self._unfinished[name]
        self._finished.append(name)

    def _done(self) -> None:
        self._is_done = True

    def _remove(self) -> None:
        for file in self._unfinished.values():
            file.discard()
        for name in self._finished:
            try:
                assert self._tier is not None, "a file was written"
                self._tier.remove(name)
            except OSError as error:
                _LOG.warning("a local file of a save stays until the next one: %s", words_of(error))


class LocalSaves:
    """The local files of this node's saves, one save at a time.

    Args:
        config: of this node; without `checkpoint.local_dir` nothing is written.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config, self._opened = config, partial(LocalTier.of, config)
        self._last: LocalSave | None = None

    def tidy(self) -> None:
        """Removes what killed writers and ended runs left, in a thread that nobody waits for."""
        if self._config.checkpoint.local_dir:
            threading.Thread(target=self._tidy, name="local-tier", daemon=True).start()

    def begin(self, order: Upload, size_bytes: int) -> LocalSave | None:
        """Begins the local files of a save; returns None if there is no local tier."""
        if not self._config.checkpoint.local_dir:
            return None
        begun = LocalSave(self._opened, (order.url, order.committed), size_bytes)
        if self._last is not None and self._last.is_busy(GIVEN_UP_S):
            begun.give_up("the disk still works on an earlier save")
            return begun
        begun.start()
        self._last = begun
        return begun

    def only(self, order: Upload) -> LocalStore:
        """Returns the local tier as the place of this save; removes all others but the newest committed one.

        Raises:
            OSError: it cannot be used.
        """
        self._opened().prune((order.url, order.committed))
        return LocalStore(self._opened)

    def _tidy(self) -> None:
        try:
            tier = self._opened()
            tier.tidy()
            for folder in folders_of_ended_runs(Path(self._config.checkpoint.local_dir)):
                if folder != tier.root:
                    remove(folder)
        except OSError as error:
            _LOG.warning("checkpoint.local_dir cannot be tidied: %s", words_of(error))


class _Beside:
    """A store, and beside it the local files of a save."""

    def __init__(self, store: Streams, local: LocalSave) -> None:
        self._store, self._local = store, local

    def write_stream(self, name: str, chunks: Chunks) -> Written:
        """See `Streams`."""
        return self._store.write_stream(name, partial(self._local.copied, name, chunks))
