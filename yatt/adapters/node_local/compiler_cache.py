"""A user's caches of compiled code on a node's disk: vLLM's, torch's (Inductor), Triton's. No torch.

The first start of an engine on a GPU compiles for most of its 40 to 90 s. The libraries keep the result under
the home folder, which is often a network filesystem with a quota, or under a guessable name in /tmp, where
another user may have made the folder. Here it is a private folder of the user, `yatt-cache-UID` in
`launch.scratch_dir`. All workers on the node share it, also those of later attempts and runs: entries are
named by their content and the versions of the libraries, which write them whole; but for vLLM's list of them
(`vllm_compile_cache.py`): an engine that is killed while it writes that leaves a file that cannot be read.

It belongs to no run, so no run removes it. Each controller holds a shared lock on it; `yatt clean` removes it
if there is no such lock.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from yatt.adapters.node_local.local_folder import is_ours, own_subfolder

FOLDERS = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Environment variable to subfolder."""

LOCK = "lock"


class CompilerCache:
    """This user's cache in one folder; it stays while this process lives or until `close`.

    Args:
        folder: absolute, may be writable by others.

    Raises:
        OSError: it has no subfolder that certainly belongs to this user, or that is being removed.
    """

    def __init__(self, folder: Path) -> None:
        self._own = own_subfolder(folder, _users_name())
        self._lock = os.open(self._own / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._check_lock()
        except OSError:
            os.close(self._lock)
            raise

    def _check_lock(self) -> None:
        """Refuses a lock whose file was removed, and perhaps made anew, before it was locked."""
        mine, found = os.fstat(self._lock), (self._own / LOCK).lstat()
        if (mine.st_dev, mine.st_ino) != (found.st_dev, found.st_ino):
            raise FileNotFoundError(errno.ENOENT, "it was removed just now", str(self._own))

    def variables(self) -> dict[str, str]:
        """Returns the environment variables of processes that use it."""
        return cache_variables(self._own)

    def close(self) -> None:
        """Allows its removal."""
        os.close(self._lock)


def cache_variables(folder: Path) -> dict[str, str]:
    """Returns the environment variables of processes whose caches are in this folder. Libraries make them."""
    return {name: str(folder / subfolder) for name, subfolder in FOLDERS.items()}


def can_load_code(folder: Path) -> bool:
    """Whether compiled code can be loaded from this filesystem, which may be mounted noexec: Triton's
    launchers and Inductor's kernels for the host are shared libraries."""
    try:
        return not os.statvfs(folder).f_flag & os.ST_NOEXEC
    except OSError:  # whoever uses the folder says what is wrong with it
        return True


@contextlib.contextmanager
def unused_caches(folders: Iterable[Path]) -> Iterator[list[Path]]:
    """Gives this user's caches in these folders that no controller uses; in this context none begins to."""
    with contextlib.ExitStack() as locks:
        yield [own for folder in folders if _is_unused(own := folder / _users_name(), locks)]


def remove_cache(own: Path) -> None:
    """Removes a cache that `unused_caches` gave. Its lock's file goes last: as long as anything is there that
    is still to be removed, no controller can begin to use it."""
    with contextlib.suppress(OSError):  # what cannot be removed stays; or a controller uses the folder again
        for entry in [entry for entry in own.iterdir() if entry.name != LOCK]:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        (own / LOCK).unlink(missing_ok=True)
        own.rmdir()


def _is_unused(own: Path, locks: contextlib.ExitStack) -> bool:
    if not is_ours(own):
        return False
    try:  # made if it is missing: without it a controller could begin to use the cache
        lock = os.open(own / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    locks.callback(os.close, lock)
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _users_name() -> str:
    return f"yatt-cache-{os.getuid()}"
