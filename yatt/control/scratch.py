"""Node-local folders of a run (sockets, journals, published weights), named so that only ours are removed."""

import shutil
from pathlib import Path

from yatt.config.schema import RunConfig
from yatt.paths import RunPaths, scratch_name, scratch_prefix


def tidy(config: RunConfig, paths: RunPaths, epoch: int, index: int) -> None:
    """Remove what one node of one attempt has left on this machine."""
    for folder in (config.launch.scratch_dir, config.launch.shm_dir):
        shutil.rmtree(Path(folder) / scratch_name(paths.root, epoch, index), ignore_errors=True)


def sweep(config: RunConfig, paths: RunPaths, epoch: int) -> None:
    """Remove what attempts of this run before `epoch` have left on this machine."""
    for folder in (config.launch.scratch_dir, config.launch.shm_dir):
        for left in Path(folder).glob(f"{scratch_prefix(paths.root)}*"):
            before = left.name.removeprefix(scratch_prefix(paths.root)).partition("-")[0]
            if before.isdigit() and int(before) < epoch:
                shutil.rmtree(left, ignore_errors=True)
