"""`yatt clean`: removes files that killed runs of this user left on this machine."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from string import Template

from yatt.adapters.node_local import local_folder
from yatt.adapters.node_local.compiler_cache import remove_cache, unused_caches
from yatt.adapters.run_folder.run_config import load_run
from yatt.checkpoint.local.local_tier import folders_of_ended_runs
from yatt.config.sections.operation import LaunchSection
from yatt.errors import ConfigError
from yatt.launch.folder.known import known_runs
from yatt.paths import RunPaths
from yatt.printable import printable


def clean(folders: list[Path], *, dry_run: bool) -> int:
    """Removes folders whose process is certainly dead, local checkpoint files of runs that have finished or
    were removed, and compiled code that no run uses now; prints their names.

    Args:
        folders: where to look; empty: /tmp, /dev/shm, and the local folders named in your submitted runs.
        dry_run: only print what would be removed.
    """
    roots = list(dict.fromkeys(folders or _usual()))
    found = [
        folder
        for root in roots
        for folder in (*local_folder.folders_of_the_dead(root), *folders_of_ended_runs(root))
    ]
    for folder in found:
        _remove(folder, local_folder.remove, dry_run=dry_run)
    with unused_caches(roots) as caches:
        for folder in caches:
            _remove(folder, remove_cache, dry_run=dry_run)
    if not found and not caches:
        sys.stdout.write("nothing was left behind\n")
    return 0


def _remove(folder: Path, remove: Callable[[Path], None], *, dry_run: bool) -> None:
    size = sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_symlink())
    if not dry_run:
        remove(folder)
    done = "would remove" if dry_run else "kept" if folder.exists() else "removed"
    sys.stdout.write(f"{done} {printable(str(folder))} ({size / 1e6:.1f} MB)\n")


def _usual() -> list[Path]:
    launch = LaunchSection()
    found = [launch.scratch_dir, launch.shm_dir]
    for root in known_runs():
        try:
            config = load_run(RunPaths(root))
        except ConfigError:
            continue
        local_dir = Template(config.checkpoint.local_dir).safe_substitute(os.environ)
        found += [config.launch.scratch_dir, config.launch.shm_dir, *([local_dir] if local_dir else [])]
    return [Path(folder) for folder in found]
