"""The local tier: a run's newest checkpoint files on a node's own disk. No torch.

Layout in `checkpoint.local_dir`::

    yatt-ckpt-UID/RUN_ID/run.json                              the run folder, for `folders_of_ended_runs`
    yatt-ckpt-UID/RUN_ID/global_step_N/ATTEMPT-NONCE/rank-*    files, named as in the checkpoint store

It is a cache. No file in it is believed: a reader compares size and checksums with the manifest, which is in
the store. So files are not synced to the disk. A file is *unfinished* until it is renamed; its writer holds a
lock on it, so the remains of killed writers can be recognised.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from yatt.adapters.files.files import Buffer, write_atomically
from yatt.adapters.node_local.local_folder import is_ours, own_subfolder
from yatt.adapters.run_folder.ledger import run_is_finished
from yatt.checkpoint.store.store import read_range
from yatt.config.schema import RunConfig
from yatt.core.attempts.checkpoint_names import is_saved_file
from yatt.paths import RunPaths

T = TypeVar("T")
READ_S = 60.0
"""Longest wait for the local disk, for one request."""

SPARE_BYTES = 1 << 30
"""Bytes that a save must leave free on the disk."""

NOTE, UNFINISHED = "run.json", ".unfinished"
UNKNOWN = 0
MAX_NOTE_BYTES = 1 << 16


class LocalTier:
    """One run's files on this node's disk.

    Args:
        root: the run's folder in the tier.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def of(cls, config: RunConfig) -> "LocalTier":
        """Returns the tier of a run; makes its folders if they are missing.

        Raises:
            OSError: `checkpoint.local_dir` cannot be used.
        """
        assert config.run.id, "a run has an id from its first start on"
        root = own_subfolder(own_subfolder(Path(config.checkpoint.local_dir), _users_name()), config.run.id)
        run = Path(config.run.dir)
        about = json.dumps({"run": str(run), "parent": _inode(run.parent)}).encode()
        if _noted(root) != about:
            write_atomically(root / NOTE, about, mode=0o600)
        return cls(root)

    def path(self, name: str) -> Path | None:
        """Returns the path of a file by its name in the store; None if the name is not one of a save."""
        return self.root / name if is_saved_file(name) else None

    def size(self, name: str) -> int | None:
        """Returns the size of a finished file; None if it is not there."""
        if (path := self.path(name)) is None:
            return None
        with contextlib.suppress(FileNotFoundError):
            return path.lstat().st_size
        return None

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Returns parts of a finished file; shorter where it ends.

        Raises:
            OSError: it is not there, or cannot be read.
        """
        path = self.path(name)
        assert path is not None, "only files with a size are read"
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            return [read_range(descriptor, *each) for each in ranges]
        finally:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        """Removes one file, if it is there.

        Raises:
            OSError: the disk fails.
        """
        if (path := self.path(name)) is not None:
            path.unlink(missing_ok=True)

    def prune(self, keep: Collection[str]) -> None:
        """Removes all saves except those with these prefixes; several processes may do so at once.

        Raises:
            OSError: the disk fails.
        """
        for step in self._steps():
            for save in _listed(step):
                if f"{step.name}/{save.name}" not in keep:
                    _remove(save)
            if not any(prefix.startswith(f"{step.name}/") for prefix in keep):
                with contextlib.suppress(OSError):  # not empty, or removed by another process
                    step.rmdir()

    def tidy(self) -> None:
        """Removes unfinished files of killed writers.

        Raises:
            OSError: the disk fails.
        """
        found = (path for step in self._steps() for save in _listed(step) for path in _listed(save))
        for path in (path for path in found if path.name.endswith(UNFINISHED)):
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                finally:
                    os.close(descriptor)

    def _steps(self) -> list[Path]:
        return [path for path in _listed(self.root) if path.name.startswith("global_step_")]

    def free_bytes(self) -> int:
        """Returns the free bytes of the disk, without what must stay free.

        Raises:
            OSError: the disk fails.
        """
        return shutil.disk_usage(self.root).free - SPARE_BYTES


def in_time(work: Callable[[], T]) -> T:
    """Returns the result of work on the local disk, which may hang.

    Raises:
        TimeoutError: none after `READ_S`; the thread runs on.
    """
    outcomes: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            outcomes.append((True, work()))
        except Exception as error:  # noqa: BLE001 - raised again below
            outcomes.append((False, error))

    thread = threading.Thread(target=run, name="local-tier", daemon=True)
    thread.start()
    thread.join(READ_S)
    if not outcomes:
        raise TimeoutError(errno.ETIMEDOUT, f"the local disk did not answer within {READ_S:g} s")
    is_result, value = outcomes[0]
    if not is_result:
        raise value
    result: T = value
    return result


class UnfinishedFile:
    """A file that is being written; nothing can be seen under its name before `finish`.

    Raises:
        OSError: it cannot be created; so for every method.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = path
        self._unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(self._unfinished, flags, 0o600), "wb")
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, data: Buffer) -> None:
        """Appends to the file."""
        self._file.write(data)

    def finish(self) -> None:
        """Gives the file its name."""
        self._file.flush()
        self._unfinished.rename(self._path)
        self._file.close()

    def discard(self) -> None:
        """Removes the file, whatever its state is."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._unfinished.unlink(missing_ok=True)


def folders_of_ended_runs(folder: Path) -> Iterator[Path]:
    """Yields this user's folders, in a `checkpoint.local_dir`, of runs that have finished or were removed.

    Folders of runs that can go on stay, as do those that do not name their run.
    """
    users = folder / _users_name()
    try:
        names = sorted(os.listdir(users)) if is_ours(users) else []
    except OSError:
        return
    for root in (users / name for name in names):
        try:
            noted = json.loads(_noted(root)) if is_ours(root) else {}
            run, parent = Path(noted["run"]), int(noted.get("parent", UNKNOWN))
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        if run.is_absolute() and _is_over(run, parent):
            yield root


def _remove(save: Path) -> None:
    """Removes a save's folder, which another process may be removing too."""
    for path in _listed(save):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        save.rmdir()


def _listed(folder: Path) -> list[Path]:
    """Returns the paths in a folder; none if another process has removed it."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return [folder / name for name in os.listdir(folder)]
    return []


def _is_over(run: Path, parent: int) -> bool:
    """Whether a run has finished, or its folder was removed from a folder that is still there.

    Args:
        parent: `_inode` of the folder that contained the run folder. If another folder is there, the
            filesystem may not be mounted.
    """
    try:
        paths = RunPaths(run)
        was_removed = _inode(run.parent) == parent != UNKNOWN and not run.exists()
        return was_removed or (paths.finished.exists() and run_is_finished(paths))
    except OSError:
        return False


def _inode(folder: Path) -> int:
    """Returns the inode number of a folder; `UNKNOWN` if its filesystem does not answer."""
    try:
        return folder.stat().st_ino
    except OSError:
        return UNKNOWN


def _noted(root: Path) -> bytes:
    """Returns the content of the folder's note; empty if it cannot be read."""
    try:
        descriptor = os.open(root / NOTE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            return file.read(MAX_NOTE_BYTES)
    except OSError:
        return b""


def _users_name() -> str:
    return f"yatt-ckpt-{os.getuid()}"
