"""Node-local folders in places that everybody may write to (/tmp, /dev/shm): made, recognised, removed.

A folder has a name that nobody can guess, is created exclusively with mode 0700, and holds a file that says
which process owns it. Links are never followed, what belongs to another user is never touched, and what is
removed is only what its own file says is ours, and is dead. Names that others planted are left alone.
"""

import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from yatt.adapters.process import Identity
from yatt.errors import ConfigError

OWNER = "owner.json"
MEMORY = ("tmpfs", "ramfs")
SHARED = frozenset({
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "fhgfs", "ceph", "wekafs", "panfs", "glusterfs", "orangefs",
    "pvfs2", "cifs", "smb3", "afs", "9p", "virtiofs", "vastnfs", "daos", "quobyte",
})  # fmt: skip
"""Filesystems that several machines see at once; of FUSE ones the part after `fuse.`."""
MAX_OWNER_BYTES = 1 << 16


def create(folder: Path, about: dict[str, Any]) -> None:
    """Create a folder that must not be there, and note this process as its owner.

    Args:
        about: noted too, for people: run folder, attempt, node.

    Raises:
        ConfigError: it cannot be created there.
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
            f"{folder} cannot be created ({error.strerror}). Name a folder of this node that you may write "
            "to in launch.scratch_dir and launch.shm_dir (or the site's)."
        ) from error


def remove(folder: Path) -> None:
    """Remove a folder of ours, whoever owns it by its file; a link or another user's folder stays."""
    if is_ours(folder):
        shutil.rmtree(folder, ignore_errors=True)


def is_ours(folder: Path) -> bool:
    """Whether it is a real folder that belongs to this user."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def owner_of(folder: Path) -> Identity | None:
    """Who made the folder, by its file; None if that cannot be read."""
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


def prefix() -> str:
    """What the names of this user's folders begin with."""
    return f"yatt-{os.getuid()}-"


def new_name() -> str:
    """A name that was never used and cannot be guessed."""
    return f"{prefix()}{secrets.token_hex(8)}"


def dead(root: Path) -> Iterator[Path]:
    """Folders of this user in `root` whose owner has surely ended.

    Surely: it was a process of this boot and of this view of processes, and is there no more. Folders
    without a readable owner, or of an owner that cannot be seen from here, are left out.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(root) if entry.name.startswith(prefix()))
    except OSError:
        return
    for name in names:
        folder = root / name
        if is_ours(folder) and (owner := owner_of(folder)) is not None and owner.is_gone():
            yield folder


def check_memory(folder: Path, key: str) -> None:
    """Refuse a folder that is not in memory: weights pass through it.

    Raises:
        ConfigError: it is missing, or on another kind of filesystem.
    """
    if not folder.is_dir():
        raise ConfigError(f"{key}: there is no folder {folder}. Write /dev/shm.")
    kind = mount_of(os.path.realpath(folder), Path("/proc/self/mounts").read_text(errors="surrogateescape"))
    if kind not in MEMORY:
        raise ConfigError(
            f"{key}: {folder} is on {kind}, which is no memory filesystem; weights would go through a disk. "
            "Write /dev/shm."
        )


def mount_of(path: str, mounts: str) -> str:
    """The type of the filesystem that the absolute `path` lies on, by the text of /proc/self/mounts."""
    best = ("", "unknown")
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split()
        point = point.replace("\\040", " ")
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]
