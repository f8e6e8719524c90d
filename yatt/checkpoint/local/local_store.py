"""The local tier as the only place of a save: written before everything is killed, read by the next start.

Nothing is synced to the disk: these files are for a node that stays up. What a reboot has lost does not have
the checksums of the record, and is passed over.
"""

import os
from collections.abc import Callable, Iterable, Sequence

import xxhash

from yatt.adapters.files.files import Buffer
from yatt.checkpoint.local.local_tier import LocalTier, UnfinishedFile, in_time
from yatt.checkpoint.store.store import Written
from yatt.errors import CheckpointError, words_of


class LocalStore:
    """Writes and reads files of the local tier.

    Args:
        opened: opens the tier.
    """

    def __init__(self, opened: Callable[[], LocalTier]) -> None:
        self._opened = opened
        self.local_bytes = 0
        """Bytes that were read."""

    def write_stream(self, name: str, chunks: Callable[[], Iterable[Buffer]]) -> Written:
        """Writes a file; nothing is visible under its name before it is complete.

        Raises:
            OSError: the disk fails.
        """
        path = self._opened().path(name)
        assert path is not None, f"{name} is not a file of a save"
        file, digest, size_bytes = UnfinishedFile(path), xxhash.xxh3_128(), 0
        try:
            for chunk in chunks():
                digest.update(chunk)
                file.write(chunk)
                size_bytes += len(chunk)
            file.finish()
        except BaseException:
            file.discard()
            raise
        return Written(size_bytes, digest.hexdigest())

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Returns parts of a file; shorter where it ends.

        Raises:
            CheckpointError: it is not on this node, cannot be read, or the disk does not answer.
        """
        try:
            found = in_time(lambda: self._read(name, ranges))
        except OSError as error:
            where = f"this node's disk ({os.uname().nodename})"
            raise CheckpointError(f"{name} cannot be read from {where}: {words_of(error)}") from error
        self.local_bytes += sum(map(len, found))
        return found

    def _read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        tier = self._opened()
        if tier.size(name) is None:
            raise CheckpointError(f"{name} is not on this node's disk ({os.uname().nodename})")
        return tier.read_ranges(name, ranges)
