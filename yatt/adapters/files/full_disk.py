"""A disk or a quota without room: what says so, and whether a folder is on one."""

import errno
import os
import tempfile
from pathlib import Path

TRIED_BYTES = 1 << 16


def is_full(error: BaseException | None) -> bool:
    """Whether a disk or quota is full, which the user has to fix."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def fault_of_room(folder: Path) -> str:
    """Returns why files of this user cannot grow in a folder of theirs; empty if they can, or if it is
    somebody else's. Filesystems tell nothing of quotas but by refusing: a file without a name is written."""
    try:
        if folder.stat().st_uid != os.geteuid():
            return ""
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(TRIED_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return os.strerror(error.errno) if is_full(error) and error.errno else ""
    return ""
