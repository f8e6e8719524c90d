"""Bytes at a URL: a folder, or any fsspec filesystem (s3://, gs:// ...). No torch, no pickle.

Everything is written whole. `create` is the one conditional operation, on which commits stand: it
succeeds for one writer only, also when two try at once.
"""

import errno
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from yatt.adapters import files
from yatt.errors import CheckpointError, ConfigError


class Store(Protocol):
    """Named bytes under one URL."""

    def write(self, name: str, data: bytes) -> None:
        """Create or replace, whole and durable."""

    def create(self, name: str, data: bytes) -> bool:
        """Create; False if the name is taken by other content."""

    def read(self, name: str) -> bytes:
        """Content.

        Raises:
            CheckpointError: not there, or not readable.
        """

    def size(self, name: str) -> int | None:
        """Bytes, or None if not there."""

    def names(self, folder: str) -> list[str]:
        """Names directly in `folder`, relative to it, sorted."""

    def delete(self, name: str) -> None:
        """Remove one name, if it is there."""

    def delete_folder(self, folder: str) -> None:
        """Remove everything under `folder`."""


def open_store(url: str, options: Mapping[str, Any]) -> Store:
    """The store of a checkpoint URL.

    Raises:
        ConfigError: the URL's driver is not installed, or the URL cannot be used.
    """
    if "://" not in url or url.startswith("file://"):
        return FolderStore(Path(url.removeprefix("file://")))
    import fsspec

    try:
        filesystem, root = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise ConfigError(f"checkpoint.url {url}: {error}. pip install 'yatt[objects]'.") from error
    except ValueError as error:
        raise ConfigError(f"checkpoint.url {url}: {error}.") from error
    return ObjectStore(filesystem, root)


class FolderStore:
    """A folder on a filesystem."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._anchor = next(folder for folder in (root, *root.absolute().parents) if folder.is_dir())
        """What was there when the store was opened. It is never created: see `files.make_within`."""

    def write(self, name: str, data: bytes) -> None:
        files.publish(self._path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        return files.claim(self._path(name), data) or self.read(name) == data

    def read(self, name: str) -> bytes:
        try:
            return (self._root / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{self._root / name}: {error.strerror}") from error

    def size(self, name: str) -> int | None:
        try:
            return (self._root / name).stat().st_size
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return None
            raise CheckpointError(f"{self._root / name}: {error.strerror}") from error

    def names(self, folder: str) -> list[str]:
        path = self._root / folder
        return sorted(p.name for p in path.iterdir() if not p.name.startswith(".")) if path.is_dir() else []

    def delete_folder(self, folder: str) -> None:
        shutil.rmtree(self._root / folder, ignore_errors=True)

    def delete(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        path = self._root / name
        files.make_within(self._anchor, path.parent)
        return path


class ObjectStore:
    """An fsspec filesystem.

    `create` asks for fsspec's ``mode="create"``, which s3fs turns into a conditional PUT
    (If-None-Match); a driver that only checks first is as safe as its check.
    """

    def __init__(self, filesystem: Any, root: str) -> None:
        self._fs, self._root = filesystem, root

    def write(self, name: str, data: bytes) -> None:
        self._fs.pipe_file(self._path(name), data)
        if self.size(name) != len(data):
            raise CheckpointError(f"{self._path(name)}: written {len(data)} bytes, {self.size(name)} arrived")

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._fs.pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            return self.read(name) == data
        except OSError as error:
            if error.errno not in (errno.EEXIST, None) and "PreconditionFailed" not in str(error):
                raise
            return self.size(name) is not None and self.read(name) == data
        return True

    def read(self, name: str) -> bytes:
        try:
            return bytes(self._fs.cat_file(self._path(name)))
        except OSError as error:
            raise CheckpointError(f"{self._path(name)}: {error}") from error

    def size(self, name: str) -> int | None:
        self._fs.invalidate_cache()
        try:
            return int(self._fs.size(self._path(name)))
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            return sorted(path.rsplit("/", 1)[1] for path in self._fs.ls(self._path(folder), detail=False))
        except FileNotFoundError:
            return []

    def delete(self, name: str) -> None:
        if self._fs.exists(self._path(name)):
            self._fs.rm_file(self._path(name))

    def delete_folder(self, folder: str) -> None:
        if self._fs.exists(self._path(folder)):
            self._fs.rm(self._path(folder), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
