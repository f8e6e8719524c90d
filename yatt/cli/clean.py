"""`yatt clean`: removes files that killed runs of this user left on this machine."""

import sys
from pathlib import Path

from yatt.adapters import local_folder
from yatt.config.load import load_resolved
from yatt.config.operation import LaunchSection
from yatt.errors import ConfigError
from yatt.launch.known import known_runs
from yatt.paths import RunPaths
from yatt.printable import printable


def clean(folders: list[Path], *, dry_run: bool) -> int:
    """Removes folders whose process is certainly dead, and prints their names.

    Args:
        folders: where to look; empty: /tmp, /dev/shm, and the folders named in your submitted runs.
        dry_run: only print what would be removed.
    """
    found = [folder for root in dict.fromkeys(folders or _usual()) for folder in local_folder.dead(root)]
    for folder in found:
        size = sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_symlink())
        if not dry_run:
            local_folder.remove(folder)
        done = "would remove" if dry_run else "kept" if folder.exists() else "removed"
        sys.stdout.write(f"{done} {printable(str(folder))} ({size / 1e6:.1f} MB)\n")
    if not found:
        sys.stdout.write("nothing was left behind\n")
    return 0


def _usual() -> list[Path]:
    launches = [LaunchSection()]
    for root in known_runs():
        try:
            launches.append(load_resolved(RunPaths(root).config).launch)
        except ConfigError:
            continue
    return [Path(folder) for launch in launches for folder in (launch.scratch_dir, launch.shm_dir)]
