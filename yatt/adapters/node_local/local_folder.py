"""Node-local folders in world-writable places (/tmp, /dev/shm): created, recognised, removed.

A folder has an unguessable name, is created exclusively with mode 0700, and contains a file that names its
owner process. Links are never followed, files of other users are never changed, and a folder is removed only
if its file names a dead process of this user. Folders that others created with such names are left alone.
"""

import contextlib
import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from yatt.adapters.processes.process import Identity
from yatt.errors import ConfigError

OWNER = "owner.json"
MEMORY = ("tmpfs", "ramfs")
SHARED = frozenset(
    {
        "nfs",
        "nfs4",
        "lustre",
        "gpfs",
        "beegfs",
        "fhgfs",
        "ceph",
        "wekafs",
        "panfs",
        "glusterfs",
        "orangefs",
        "pvfs2",
        "cifs",
        "smb3",
        "afs",
        "9p",
        "virtiofs",
        "vastnfs",
        "daos",
        "quobyte",
    }
)
"""Filesystems that several machines can share; for FUSE, the part after `fuse.`."""
MAX_OWNER_BYTES = 1 << 16


def create(folder: Path, about: dict[str, Any]) -> None:
    """Creates a folder that must not exist, and records this process as its owner.

    Args:
        about: recorded as well, for users: run folder, attempt, node.

    Raises:
        ConfigError: the folder cannot be created.
    """
    mine = Identity.of(os.getpid())
    assert mine is not None, "this process runs"
    try:
        folder.mkdir(mode=0o700)
        descriptor = os.open(folder / OWNER, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump({**about, "owner": asdict(mine)}, file)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be created ({error.strerror}). Write a node-local folder that you can write "
            "to in launch.scratch_dir and launch.shm_dir (or in the site file)."
        ) from error


def own_subfolder(folder: Path, name: str) -> Path:
    """Returns this user's own subfolder of `folder`, which may be writable by others; makes it if missing.

    Members of the folder's group are trusted: they could rename the subfolder if the group may write there.

    Raises:
        OSError: there is no subfolder that certainly belongs to this user.
    """
    if not folder.is_absolute():
        raise OSError(errno.EINVAL, f"'{folder}' is not an absolute path")
    mode = folder.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise PermissionError(errno.EPERM, "other users can rename files in it", str(folder))
    own = folder / name
    with contextlib.suppress(FileExistsError):
        own.mkdir(mode=0o700)
    if not is_ours(own) or stat.S_IMODE(own.lstat().st_mode) & 0o077:
        raise PermissionError(errno.EPERM, "it is not a private folder of this user", str(own))
    return own


def remove(folder: Path) -> None:
    """Removes a folder of this user, also one of another process; a link or another user's folder stays."""
    if is_ours(folder):
        shutil.rmtree(folder, ignore_errors=True)


def is_ours(folder: Path) -> bool:
    """Whether the path is a real folder that belongs to this user."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def folder_owner(folder: Path) -> Identity | None:
    """Returns the owner process from the folder's file; None if that cannot be read."""
    try:
        descriptor = os.open(folder / OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if os.fstat(descriptor).st_uid != os.getuid():
                return None
            noted = json.loads(file.read(MAX_OWNER_BYTES))
        return Identity(
            int(noted["owner"]["pid"]), str(noted["owner"]["begun"]), str(noted["owner"]["place"])
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def folder_prefix() -> str:
    """Returns the prefix of the names of this user's folders."""
    return f"yatt-{os.getuid()}-"


def new_name() -> str:
    """Returns a new, unguessable name."""
    return f"{folder_prefix()}{secrets.token_hex(8)}"


def folders_of_the_dead(root: Path) -> Iterator[Path]:
    """Yields folders of this user in `root` whose owner process has certainly ended.

    Certainly: it was a process of this boot and this pid namespace, and does not exist any more. Folders
    without a readable owner, or with an owner that cannot be seen from here, are skipped.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(root) if entry.name.startswith(folder_prefix()))
    except OSError:
        return
    for name in names:
        folder = root / name
        if is_ours(folder) and (owner := folder_owner(folder)) is not None and owner.is_gone():
            yield folder


def check_in_memory(folder: Path, key: str) -> None:
    """Refuses a folder that is not in memory, because weights are transferred through it.

    Raises:
        ConfigError: it is missing, or on a disk filesystem.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}. Write /dev/shm.", key=key)
    kind = mount_of(os.path.realpath(folder), Path("/proc/self/mounts").read_text(errors="surrogateescape"))
    if kind not in MEMORY:
        raise ConfigError(
            f"{folder} is on {kind}, which is not a memory filesystem; weights would go through a disk. "
            "Write /dev/shm.",
            key=key,
        )


def mount_of(path: str, mounts: str) -> str:
    """Returns the type of the filesystem of the absolute `path`, by the text of /proc/self/mounts."""
    best = ("", "unknown")
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split()
        point = point.replace("\\040", " ")
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]
