"""Where checkpoints lie: in a folder every node sees, or in an object store.

Objects are whole, and creation happens at most once. No torch here: controllers use this too.
Names are relative to the store's root, with slashes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

from yatt.adapters import files
from yatt.errors import CheckpointError


class Store(Protocol):
    """What a checkpoint needs of storage."""

    def write(self, name: str, data: bytes) -> None:
        """Write a whole object, durably; replaces what was there."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a whole object unless one is there: True iff this call did."""

    def read(self, name: str) -> bytes:
        """A whole object.

        Raises:
            CheckpointError: it is not there or cannot be read.
        """

    def size(self, name: str) -> int | None:
        """Bytes of an object, or None if it is not there."""

    def names(self, folder: str) -> list[str]:
        """Names directly in a folder, sorted; empty if there is no such folder."""

    def remove(self, name: str) -> None:
        """Remove an object or a folder with all in it; what is not there is no error."""


def open_store(url: str, options: Mapping[str, Any]) -> Store:
    """The store at a path or fsspec URL.

    Args:
        options: handed to fsspec.

    Raises:
        CheckpointError: no driver for this URL is installed.
    """
    try:
        filesystem, root = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"checkpoint.url: {url} cannot be opened: {error}") from error
    if isinstance(filesystem, LocalFileSystem):
        return FolderStore(Path(root))
    return ObjectStore(filesystem, root)


class FolderStore:
    """A folder. Objects appear by rename, `create` by a link that replaces nothing."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, name: str, data: bytes) -> None:
        """See `Store`."""
        files.publish(self._place(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """See `Store`."""
        return files.claim(self._place(name), data)

    def read(self, name: str) -> bytes:
        """See `Store`."""
        try:
            return (self._root / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{self._root / name}: {error.strerror}") from error

    def size(self, name: str) -> int | None:
        """See `Store`."""
        try:
            return (self._root / name).stat().st_size
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        """See `Store`; unfinished temporary files are not objects."""
        place = self._root / folder
        return (
            sorted(entry.name for entry in place.iterdir() if not entry.name.startswith("."))
            if place.is_dir()
            else []
        )

    def remove(self, name: str) -> None:
        """See `Store`."""
        place = self._root / name
        if place.is_dir():
            for entry in place.iterdir():
                self.remove(f"{name}/{entry.name}")
            place.rmdir()
        else:
            place.unlink(missing_ok=True)

    def _place(self, name: str) -> Path:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


class ObjectStore:
    """Any fsspec filesystem whose objects appear whole; `create` is a conditional PUT (If-None-Match)."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self._filesystem, self._root = filesystem, root.rstrip("/")

    def write(self, name: str, data: bytes) -> None:
        """See `Store`."""
        self._filesystem.pipe_file(self._path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """See `Store`."""
        try:
            self._filesystem.pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            return False
        return True

    def read(self, name: str) -> bytes:
        """See `Store`."""
        try:
            return bytes(self._filesystem.cat_file(self._path(name)))
        except OSError as error:
            raise CheckpointError(f"{self._path(name)}: {error}") from error

    def size(self, name: str) -> int | None:
        """See `Store`."""
        self._filesystem.invalidate_cache()
        try:
            return int(self._filesystem.size(self._path(name)))
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        """See `Store`."""
        self._filesystem.invalidate_cache()
        try:
            listed = self._filesystem.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rsplit("/", 1)[1] for path in listed)

    def remove(self, name: str) -> None:
        """See `Store`."""
        self._filesystem.invalidate_cache()
        path = self._path(name)
        if self._filesystem.exists(path):
            self._filesystem.rm(path, recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")
