"""Named bytes at a URL: a folder, or any fsspec filesystem (s3://, gs:// ...). No torch, no pickle.

Every file is written whole. `create` is the only conditional operation, and commits depend on it: it succeeds
for one writer only, also when two try at once.

What is in a store may be a stranger's. No name leads out of it: a name with `..`, a link and a special file
are refused (CheckpointError), in reads and in writes. Who may change the store meanwhile is not kept out.
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path
from typing import Any, Protocol

import xxhash

from yatt.adapters.files import files
from yatt.checkpoint.store.driver import STALL_S, open_driver
from yatt.checkpoint.store.multipart import is_s3, write_object
from yatt.checkpoint.store.store_errors import errors_of_store
from yatt.core.attempts.checkpoint_names import check_name
from yatt.errors import CheckpointError, StoreUnreachable

UPLOAD_PART_BYTES = 16 << 20
"""Size of a part of a multipart upload. Object stores allow 10,000 parts, so a file may have 156 GiB."""

MOST_NOTE_BYTES = 1 << 20
"""Of everything that is read in one piece, except manifests."""


@dataclass(frozen=True, slots=True)
class Written:
    """Size and XXH3-128 checksum of a streamed file."""

    size_bytes: int
    checksum: str


class Store(Protocol):
    """Named bytes under one URL."""

    def write(self, name: str, data: bytes) -> None:
        """Creates or replaces a name, atomically and durably."""

    def write_stream(self, name: str, chunks: Callable[[], Iterable[files.Buffer]]) -> Written:
        """Writes content that comes in chunks; at most a few of them are in memory at a time.

        Readers see nothing under `name` until all is written. If `chunks` raises, nothing is left.

        Args:
            chunks: begins the stream, anew at each call.
        """

    def create(self, name: str, data: bytes) -> bool:
        """Creates a name; returns False if it exists with other content."""

    def read(self, name: str, *, most_bytes: int = MOST_NOTE_BYTES) -> bytes:
        """Returns the content.

        Raises:
            CheckpointError: the name does not exist, or has more than `most_bytes`.
            StoreUnreachable: any other failure, and whether it may be temporary; so for every other method.
                Errors of a folder's filesystem in writes are raised unchanged, as OSError.
        """

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Returns parts [begin, end) of the content, in the requested order; shorter where it ends.

        Raises:
            CheckpointError: the name does not exist.
        """

    def size(self, name: str) -> int | None:
        """Returns the size in bytes, or None if the name does not exist."""

    def names(self, folder: str) -> list[str]:
        """Returns the names directly in `folder`, relative to it, sorted."""

    def delete(self, name: str) -> None:
        """Removes one name, if it exists. A link is removed, not what it leads to."""

    def delete_folder(self, folder: str) -> None:
        """Removes everything under `folder`, which is not the store itself; a link as in `delete`."""

    def delete_empty_folder(self, folder: str) -> None:
        """Removes a folder if nothing is in it, not even a file that another process is writing."""


def open_store(url: str, options: Mapping[str, Any], stall_s: float = STALL_S) -> Store:
    """Opens the store of a checkpoint URL; arguments and errors as of `open_driver`."""
    if is_folder(url):
        return FolderStore(folder_of(url))
    return ObjectStore(*open_driver(url, options, stall_s))


def is_folder(url: str) -> bool:
    """Whether a checkpoint URL names a folder of a mounted filesystem."""
    return "://" not in url or url.startswith(("file://", "local://"))


def folder_of(url: str) -> Path:
    """Returns the folder that a checkpoint URL names (`is_folder`)."""
    return Path(url.partition("://")[2] or url)


class FolderStore:
    """A folder on a filesystem."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._anchor = next(folder for folder in (self._root, *self._root.parents) if folder.is_dir())
        """The folder that existed when the store was opened. It is never created: see `files.make_within`."""

    def write(self, name: str, data: bytes) -> None:
        files.write_atomically(self._new_path(name), data)

    def write_stream(self, name: str, chunks: Callable[[], Iterable[files.Buffer]]) -> Written:
        measured = _Measured(chunks())
        files.publish_stream(self._new_path(name), measured)
        return measured.written

    def create(self, name: str, data: bytes) -> bool:
        return files.create_exclusively(self._new_path(name), data) or _holds(self, name, data)

    def read(self, name: str, *, most_bytes: int = MOST_NOTE_BYTES) -> bytes:
        with self._opened(name) as descriptor:
            size_bytes = os.fstat(descriptor).st_size
            _refuse_long(self._root / name, size_bytes, most_bytes)
            return read_range(descriptor, 0, size_bytes)

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        with self._opened(name) as descriptor:
            return [read_range(descriptor, begin, end) for begin, end in ranges]

    def size(self, name: str) -> int | None:
        with errors_of_store(self._root / name):
            path = self._path(name)
            try:
                found = path.lstat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            _refuse_special(path, found.st_mode)
            return found.st_size

    def names(self, folder: str) -> list[str]:
        with errors_of_store(self._root / folder):
            path = self._path(folder) if folder else self._root
            try:
                return sorted(name for name in os.listdir(path) if not name.startswith("."))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def delete_folder(self, folder: str) -> None:
        with (
            errors_of_store(self._root / folder),
            contextlib.suppress(RecursionError),
        ):  # absurdly deep: it stays
            path = self._within(folder)
            if path.is_symlink():
                path.unlink(missing_ok=True)
            else:
                shutil.rmtree(path, ignore_errors=True)

    def delete_empty_folder(self, folder: str) -> None:
        with errors_of_store(self._root / folder), contextlib.suppress(OSError):
            self._path(folder).rmdir()

    def delete(self, name: str) -> None:
        with errors_of_store(self._root / name), contextlib.suppress(NotADirectoryError):
            self._within(name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        with errors_of_store(self._root / name):
            path = self._path(name)
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a FIFO would block
            try:
                _refuse_special(path, os.fstat(descriptor).st_mode)
                yield descriptor
            finally:
                os.close(descriptor)

    def _path(self, name: str) -> Path:
        """Returns the path of a name.

        Raises:
            CheckpointError: it is no name, or leads through a link.
        """
        path = self._within(name)
        _refuse_link(path)
        return path

    def _within(self, name: str) -> Path:
        """Like `_path`, but the name itself may be a link."""
        check_name(name)
        *folders, last = name.split("/")
        path = self._root
        for folder in folders:
            path /= folder
            _refuse_link(path)
        return path / last

    def _new_path(self, name: str) -> Path:
        """Like `_path`; makes its folder."""
        path = self._path(name)
        files.make_within(self._anchor, path.parent)
        return path


class ObjectStore:
    """An fsspec filesystem.

    `create` uses fsspec's ``mode="create"``, which s3fs implements as a conditional PUT (If-None-Match); with
    a driver that only checks first, it is as safe as this check.
    """

    def __init__(self, filesystem: Any, root: str) -> None:
        self._fs, self._root = filesystem, root

    def write(self, name: str, data: bytes) -> None:
        with errors_of_store(self._path(name), for_writing=True):
            self._fs.pipe_file(self._path(name), data)
        self._check_size(name, len(data))

    def write_stream(self, name: str, chunks: Callable[[], Iterable[files.Buffer]]) -> Written:
        """Writes by a multipart upload, which becomes visible when it is completed.

        A driver without multipart uploads (memory://) shows the incomplete file; no manifest names it yet.
        """
        measured, path = _Measured(chunks()), self._path(name)
        write = write_object if is_s3(self._fs) else _write_file
        try:
            write(self._fs, path, measured, UPLOAD_PART_BYTES)
        except BaseException:
            with contextlib.suppress(StoreUnreachable):  # an incomplete upload is not visible
                self.delete(name)
            raise
        self._check_size(name, measured.written.size_bytes)
        return measured.written

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._fs.pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            return _holds(self, name, data)
        except Exception as error:  # drivers' own types; the write may have succeeded
            with contextlib.suppress(StoreUnreachable):  # the first error tells more
                if self.size(name) is not None:
                    return _holds(self, name, data)
            with errors_of_store(self._path(name), for_writing=True):
                raise error
        return True

    def read(self, name: str, *, most_bytes: int = MOST_NOTE_BYTES) -> bytes:
        path = self._path(name)
        with errors_of_store(path):
            self._fs.invalidate_cache()
            size_bytes = int(self._fs.size(path))
            _refuse_long(path, size_bytes, most_bytes)
            if not 0 < size_bytes <= UPLOAD_PART_BYTES:
                return bytes(self._fs.cat_file(path))
            # With bounds s3fs sends one request; without them it asks for the size again.
            return bytes(self._fs.cat_file(path, start=0, end=size_bytes))

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        path = self._path(name)
        begins, ends = [begin for begin, _ in ranges], [end for _, end in ranges]
        with errors_of_store(path):
            got = self._fs.cat_ranges([path] * len(ranges), begins, ends, on_error="raise")
            return [bytes(data) for data in got]

    def size(self, name: str) -> int | None:
        self._fs.invalidate_cache()
        path = self._path(name)
        with contextlib.suppress(CheckpointError), errors_of_store(path):
            return int(self._fs.size(path))
        return None

    def names(self, folder: str) -> list[str]:
        self._fs.invalidate_cache()
        place = self._path(folder) if folder else f"{self._root}/"
        with contextlib.suppress(CheckpointError), errors_of_store(place):
            return sorted(path.rsplit("/", 1)[1] for path in self._fs.ls(place, detail=False))
        return []

    def delete(self, name: str) -> None:
        path = self._path(name)
        with contextlib.suppress(CheckpointError), errors_of_store(path):
            if self._fs.exists(path):
                self._fs.rm_file(path)

    def delete_folder(self, folder: str) -> None:
        path = self._path(folder)
        with contextlib.suppress(CheckpointError), errors_of_store(path):
            if has_magic(path):  # `rm` would take the store's name for a pattern, and remove others' files
                for file in self._fs.find(path):
                    self._fs.rm_file(file)
            elif self._fs.exists(path):
                self._fs.rm(path, recursive=True)

    def delete_empty_folder(self, folder: str) -> None:
        """Does nothing: there are no folders."""

    def _check_size(self, name: str, num_bytes: int) -> None:
        if (found := self.size(name)) != num_bytes:
            raise StoreUnreachable(
                f"{self._path(name)}: written {num_bytes} bytes, {found} arrived", is_passing=True
            )

    def _path(self, name: str) -> str:
        """Returns the path of a name.

        Raises:
            CheckpointError: it is no name.
        """
        check_name(name)
        return f"{self._root}/{name}"


def _write_file(filesystem: Any, path: str, chunks: Iterable[files.Buffer], part_bytes: int) -> None:
    """Writes by the driver's own file, one part after the other."""
    with errors_of_store(path, for_writing=True):
        file = filesystem.open(path, "wb", block_size=part_bytes)
    try:
        for chunk in chunks:
            with errors_of_store(path, for_writing=True):
                file.write(chunk)
        with errors_of_store(path, for_writing=True):
            file.close()
    except BaseException:  # closing it now would complete the upload
        with contextlib.suppress(Exception):
            file.discard()
        with contextlib.suppress(AttributeError):
            file.closed = True
        raise


def read_range(descriptor: int, begin: int, end: int) -> bytes:
    """Reads a range in several calls: one read returns 2 GiB at most, and may return less than requested."""
    chunks = []
    while begin < end and (chunk := os.pread(descriptor, end - begin, begin)):
        chunks.append(chunk)
        begin += len(chunk)
    return b"".join(chunks)


def _holds(store: Store, name: str, data: bytes) -> bool:
    """Whether the content of a name is this."""
    return store.size(name) == len(data) and store.read(name, most_bytes=len(data)) == data


def _refuse_long(place: object, size_bytes: int, most_bytes: int) -> None:
    """Refuses to read more than this in one piece.

    Raises:
        CheckpointError: it is longer.
    """
    if size_bytes > most_bytes:
        raise CheckpointError(
            f"{place} has {size_bytes} bytes; no such file of yatt has more than {most_bytes}"
        )


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a link, and none is followed in a checkpoint store; put the files there"
        )


def _refuse_special(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is not a regular file")


class _Measured:
    """Passes chunks on; counts their bytes and computes their checksum."""

    def __init__(self, chunks: Iterable[files.Buffer]) -> None:
        self._chunks, self._digest, self._size_bytes = chunks, xxhash.xxh3_128(), 0

    def __iter__(self) -> Iterator[files.Buffer]:
        for chunk in self._chunks:
            self._digest.update(chunk)
            self._size_bytes += len(chunk)
            yield chunk

    @property
    def written(self) -> Written:
        """Size and checksum of the chunks so far."""
        return Written(self._size_bytes, self._digest.hexdigest())
