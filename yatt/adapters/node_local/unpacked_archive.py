"""A local copy that is a tar archive's members: one file is read from a shared filesystem instead of all.

The archive may be another user's: nothing is written outside of the copy, and only files, folders and links
are made.
"""

import errno
import json
import lzma
import os
import shutil
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from yatt.adapters.node_local.copied_files import GivenUp, has_size

LIST = ".yatt-members.json"
"""File of the copy that lists sizes of its regular files and targets of its links; written last."""

REWRITTEN = "__pycache__"
"""Folder of files that Python itself writes again if they are stale; they are not listed."""

CHUNK_BYTES = 1 << 20
DAMAGES = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, UnicodeError, ValueError, OverflowError)


@dataclass(slots=True)
class UnpackedArchive:
    """The members of a tar archive, compressed or not, in a folder.

    Attributes:
        size: bytes of the archive.
        changed_ns: its modification time in ns.
    """

    source: Path
    size: int
    changed_ns: int

    @classmethod
    def of(cls, archive: Path) -> "UnpackedArchive":
        """Looks at the archive.

        Raises:
            OSError: it is not a file, or cannot be read.
        """
        found = archive.stat()
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a file", str(archive))
        return cls(archive, found.st_size, found.st_mtime_ns)

    @property
    def leaf(self) -> str:
        """The name of the copy."""
        return "unpacked"

    @property
    def identity(self) -> list[object]:
        """What tells this copy from others."""
        return [str(self.source), self.size, self.changed_ns, self.leaf]

    def is_whole(self, copy: Path) -> bool:
        """Whether all files exist with the right sizes, and all links; after a crash they may not."""
        try:
            listed: dict[str, dict[str, Any]] = json.loads((copy / LIST).read_bytes())
            is_linked = all(os.readlink(copy / name) == to for name, to in listed["links"].items())
            return is_linked and all(has_size(copy / name, size) for name, size in listed["sizes"].items())
        except (OSError, ValueError, AttributeError, TypeError, KeyError):
            return False

    def num_missing_bytes(self, copy: Path) -> int:  # noqa: ARG002 - it is unpacked from its beginning
        """Returns the size of the archive, which is that of its files if it is not compressed."""
        return self.size

    def write(self, copy: Path, is_over: Callable[[], bool]) -> None:
        """Unpacks all members, from the beginning. Files are not synchronised one by one, because that takes
        longer than writing them; `is_whole` finds what a crash has cut.

        Raises:
            OSError: it is not an archive, is cut, or changes meanwhile; a member is of another kind, or lies
                outside of it; a file cannot be written.
            GivenUp: `is_over` returned True first.
        """
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir(mode=0o700)
        try:
            with (
                self.source.open("rb", buffering=CHUNK_BYTES) as file,
                tarfile.open(fileobj=file, tarinfo=_WholeHeader) as archive,
            ):
                listed = _Unpacking(archive, copy, is_over).run()
        except DAMAGES as error:
            raise OSError(
                errno.EINVAL, f"it is not a whole tar archive: {error}", str(self.source)
            ) from error
        if UnpackedArchive.of(self.source) != self:
            raise OSError(errno.ESTALE, "changed while it was unpacked", str(self.source))
        with (copy / LIST).open("xb") as file:
            file.write(json.dumps(listed).encode())
            file.flush()
            os.fsync(file.fileno())


class _WholeHeader(tarfile.TarInfo):
    """Tells an archive's end, which are blocks of zeros, from a header that is cut or damaged: tarfile takes
    all of them for the end."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> "_WholeHeader":
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.HeaderError as error:
            if isinstance(error, tarfile.EOFHeaderError):  # type: ignore[attr-defined]
                raise
            raise tarfile.ReadError(f"{error} at byte {tarfile_.offset}") from error


class _Unpacking:
    """Writes the members below a folder. Links are made last, when no folder is made any more, so that
    nothing is made through one."""

    def __init__(self, archive: tarfile.TarFile, copy: Path, is_over: Callable[[], bool]) -> None:
        self._archive, self._copy, self._is_over = archive, copy, is_over
        self._links: dict[Path, str] = {}
        self._sizes: dict[str, int] = {}

    def run(self) -> dict[str, dict[str, Any]]:
        """Returns the size of each regular file, and the target of each link, by their names."""
        for member in self._members():
            path = self._copy / _inner(member.name)
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # a member may come twice: the last one counts
            self._links.pop(path, None)
            self._sizes.pop(self._name(path), None)
            if member.issym():
                self._links[path] = member.linkname
            elif member.islnk():
                self._write_again(path, self._copy / _inner(member.linkname))
            elif member.isreg():
                self._write(path, member)
            else:
                raise OSError(errno.EINVAL, f"{member.name} is neither a file, a folder nor a link")
        for path, target in self._links.items():
            path.symlink_to(target)
        links = {self._name(path): target for path, target in self._links.items()}
        return {"sizes": self._sizes, "links": links}

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._copy))

    def _members(self) -> Iterator[tarfile.TarInfo]:
        while (member := self._archive.next()) is not None:
            if self._is_over():
                raise GivenUp
            yield member
            self._archive.members.clear()  # type: ignore[attr-defined]  # else it keeps a kilobyte for each

    def _write(self, path: Path, member: tarfile.TarInfo) -> None:
        source, left = self._archive.extractfile(member), member.size
        mode = 0o700 if member.mode & 0o100 else 0o600
        with os.fdopen(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb"
        ) as file:
            while left:
                if self._is_over():
                    raise GivenUp
                data = source.read(min(left, CHUNK_BYTES)) if source is not None else b""
                if not data:
                    raise EOFError("it is cut")
                file.write(data)
                left -= len(data)
        # Compiled modules are valid for a source of this time.
        os.utime(path, (member.mtime, member.mtime))
        self._list(path, member.size)

    def _write_again(self, path: Path, earlier: Path) -> None:
        if earlier in self._links:
            self._links[path] = self._links[earlier]
            return
        os.link(earlier, path, follow_symlinks=False)
        self._list(path, path.stat().st_size)

    def _list(self, path: Path, size: int) -> None:
        if path.parent.name != REWRITTEN:
            self._sizes[self._name(path)] = size


def _inner(name: str) -> PurePosixPath:
    """Returns the relative path of a member.

    Raises:
        OSError: it leads out of the archive.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise OSError(errno.EINVAL, f"{name!r} leads out of the archive")
    return path
