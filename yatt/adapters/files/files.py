"""Files on a shared filesystem: written atomically and durably, read with retries.

The only module with these steps: a temporary name unique to the writer, fsync of the file, rename or link,
fsync of the folder. Readers open and read; they rely neither on stat nor on a listing.
"""

import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from yatt.adapters.files.patience import PASSING
from yatt.errors import ConfigError, FolderGone, StaleAttempt
from yatt.plain_files import open_regular

Buffer = bytes | memoryview

_PASSING = {errno.ESTALE, errno.ENOENT, errno.EIO}
GROUP_UMASK = 0o027
"""The group can read, others have no access."""

MOST_RECORD_BYTES = 1 << 28
"""Of a file that is read in one piece. A run folder may come from somebody else."""

CHECKS = ".yatt-check-"
"""Prefix of the folders in which nodes try whether a filesystem is shared (`yatt.launch.diagnose`)."""

_TEMPORARY = re.compile(r"\..+\.\d+\.[0-9a-f]{8}")


def make_private(folder: Path) -> None:
    """Creates `folder` with mode 0700.

    Raises:
        ConfigError: it cannot be created or written to.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be used as a folder of the run ({error.strerror}). "
            "Write another one in run.dir."
        ) from error


def share_with(who: str) -> None:
    """Makes new files of this process and its children readable by the user's group, if `who` is group."""
    if who == "group":
        os.umask(GROUP_UMASK)


def make_within(root: Path, folder: Path) -> None:
    """Creates `folder` and missing folders between `root` and it, but never `root` itself.

    A run folder that was removed during the run must not be partly recreated.

    Raises:
        FolderGone: `root` does not exist.
        ConfigError: `folder` cannot be created.
        OSError: a transient error.
    """
    missing = [level for level in (folder, *folder.parents) if level.is_relative_to(root) and level != root]
    try:
        for level in reversed(missing):
            level.mkdir(exist_ok=True)
        if not missing and not root.is_dir():
            raise FileNotFoundError
    except FileNotFoundError as error:
        raise FolderGone(
            f"{root} is gone: somebody removed or moved it during the run. Everything saved there is lost; "
            "the run writes nothing more."
        ) from error
    except OSError as error:
        if error.errno in PASSING:
            raise
        raise ConfigError(
            f"{folder}: cannot be created ({error.strerror}). Correct this and start again."
        ) from error


def write_atomically(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Writes `path` atomically: readers see the old content or the new one.

    Args:
        mode: mode of the file, before the umask.

    Raises:
        OSError: not written; `path` is unchanged and no temporary file is left.
    """
    publish_stream(path, (data,), mode=mode)


def publish_stream(path: Path, chunks: Iterable[Buffer], *, mode: int = 0o666) -> None:
    """Like `write_atomically`, for content in chunks; holds one chunk in memory at a time.

    Raises:
        OSError: not written. Errors of `chunks` are raised too; `path` is unchanged then.
    """
    temporary = _write_temporary(path, chunks, mode)
    try:
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def create_exclusively(path: Path, data: bytes) -> bool:
    """Creates `path` exclusively; returns True if and only if this call did. Safe if NFS loses replies.

    Raises:
        OSError: the filesystem failed for another reason than that `path` exists as a regular file.
    """
    temporary = _write_temporary(path, (data,))
    try:
        try:
            os.link(temporary, path)
        except OSError as error:  # the reply may be wrong; the file itself decides
            found = _first_bytes(path, 1)
            if found is None and error.errno not in _PASSING:
                raise
        won = os.stat(temporary).st_nlink == 2 and _first_bytes(path, len(data) + 1) == data
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)
    return won


def read_or_none(path: Path) -> bytes | None:
    """Returns the content, or None while the file is not (yet) visible here.

    Raises:
        OSError: it cannot be read, is not a regular file, or has more than `MOST_RECORD_BYTES`.
    """
    return _if_visible(partial(read_record, path))


def read_record(path: Path) -> bytes:
    """Returns the content of a file, however it came there: a pipe does not block.

    Raises:
        OSError: as `read_or_none`, or it is not visible here.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > MOST_RECORD_BYTES:
            raise OSError(errno.EFBIG, f"has more than {MOST_RECORD_BYTES >> 20} MiB", str(path))
        return file.read()


def _first_bytes(path: Path, count: int) -> bytes | None:
    """Returns the first bytes of a file of any size, or None while it is not (yet) visible here."""

    def read() -> bytes:
        with open_regular(path) as file:
            return file.read(count)

    return _if_visible(read)


def _if_visible(read: Callable[[], bytes]) -> bytes | None:
    try:
        return read()
    except OSError as error:
        if error.errno in _PASSING:
            return None
        raise


def temporary_files(root: Path, skip: Collection[str] = ()) -> list[Path]:
    """Returns temporary files below `root`, of killed or active writers, except in the folders named
    `skip` and in those of `CHECKS`, which belong to no attempt."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(CHECKS)]
        found += [Path(folder) / name for name in names if _TEMPORARY.fullmatch(name)]
    return found


def append_line(path: Path, line: str) -> None:
    """Appends one line in a single write."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(descriptor, line.encode() + b"\n")
    finally:
        os.close(descriptor)


def sealed_record(content: dict[str, Any], attempt: int) -> bytes:
    """Encodes a record with its attempt number and a checksum."""
    body = json.dumps({**content, "attempt": attempt}, sort_keys=True)
    return f"{hashlib.sha256(body.encode()).hexdigest()} {body}\n".encode()


def record_in(data: bytes | None, attempt: int) -> dict[str, Any] | None:
    """Returns the record, or None if it is damaged, missing or of another attempt.

    Raises:
        StaleAttempt: it is of a newer attempt.
    """
    record = unsealed_any(data)
    if record is None:
        return None
    if record["attempt"] > attempt:
        raise StaleAttempt(f"attempt {record['attempt']} was claimed while {attempt} was running")
    return record if record["attempt"] == attempt else None


def unsealed_any(data: bytes | None) -> dict[str, Any] | None:
    """Returns the record of any attempt, or None if it is damaged or missing. Anyone can seal a record."""
    digest, _, body = (data or b"").decode(errors="replace").rstrip("\n").partition(" ")
    if hashlib.sha256(body.encode()).hexdigest() != digest:
        return None
    try:
        record: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None
    is_record = isinstance(record, dict) and type(record.get("attempt")) is int
    return record if is_record else None


def _write_temporary(path: Path, chunks: Iterable[Buffer], mode: int = 0o666) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
