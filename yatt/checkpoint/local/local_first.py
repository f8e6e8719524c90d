"""Reads pieces of a checkpoint from the local tier where it has them, else from the store. No torch.

A piece is used only if its bytes have the checksum of the manifest. A local file that differs from the
manifest is removed, with the reason in the log, and its pieces are read from the store.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from yatt.checkpoint.commit.pieces import check_piece
from yatt.checkpoint.local.local_tier import LocalTier, in_time
from yatt.errors import CheckpointError, words_of
from yatt.records.message import ShardFile, TensorPiece

Range = tuple[int, int]
_LOG = logging.getLogger(__name__)


class Ranges(Protocol):
    """The part of a store that reading pieces needs."""

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """See `yatt.checkpoint.store.store.Store`."""


class LocalFirst:
    """Reads one checkpoint's pieces, local files first.

    Args:
        store: has every file.
        opened: opens the local tier; an OSError means that there is none.
        files: of the manifest.
    """

    def __init__(self, store: Ranges, opened: Callable[[], LocalTier], files: Sequence[ShardFile]) -> None:
        self._store, self._opened = store, opened
        self._files = {file.path: file for file in files}
        self._tier: LocalTier | None = None
        self._pieces: tuple[str, dict[Range, TensorPiece]] = "", {}
        self._is_given_up = False
        self.local_bytes = 0
        """Bytes that were read from local files."""

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Returns whole pieces of a file, which are verified if they are local; else as the store's."""
        file = self._files.get(name)
        found = self._in_time(file, ranges) if file is not None and not self._is_given_up else None
        if found is None:
            return self._store.read_ranges(name, ranges)
        self.local_bytes += sum(map(len, found))
        return found

    def _in_time(self, file: ShardFile, ranges: Sequence[Range]) -> list[bytes] | None:
        """Returns the local pieces; None if they are not there, damaged, or the disk does not answer."""
        try:
            return in_time(lambda: self._local(file, ranges))
        except TimeoutError as error:
            self._give_up(words_of(error))
            return None

    def _local(self, file: ShardFile, ranges: Sequence[Range]) -> list[bytes] | None:
        try:
            self._tier = self._tier or self._opened()
            tier = self._tier
            size = tier.size(file.path)
            if size is None:
                return None
            if size != file.size_bytes:
                raise CheckpointError(f"{file.path} has {size} bytes instead of {file.size_bytes}")
            pieces = self._pieces_of(file)
            found = tier.read_ranges(file.path, ranges)
            for each, data in zip(ranges, found, strict=True):
                if each not in pieces:  # only pieces have checksums
                    return None
                check_piece(file, pieces[each], data)
        except CheckpointError as error:
            self._damaged(file.path, error)
            return None
        except OSError as error:
            self._give_up(words_of(error))
            return None
        return found

    def _pieces_of(self, file: ShardFile) -> dict[Range, TensorPiece]:
        if self._pieces[0] != file.path:
            self._pieces = file.path, {(p.begin, p.begin + p.size_bytes): p for p in file.tensors}
        return self._pieces[1]

    def _damaged(self, name: str, error: CheckpointError) -> None:
        _LOG.warning("the local copy is removed, and the store is read: %s", error)
        assert self._tier is not None, "a file was read"
        try:
            self._tier.remove(name)
        except OSError as failure:
            self._give_up(words_of(failure))

    def _give_up(self, why: str) -> None:
        self._is_given_up = True
        _LOG.warning("checkpoint.local_dir is not read any more, but the store: %s", why)
