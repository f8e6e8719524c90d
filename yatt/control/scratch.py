"""Node-local folders of a run (sockets, journals, published weights), named so that only ours are removed."""

import hashlib
import os
import shutil
from pathlib import Path

from yatt.config.schema import RunConfig
from yatt.paths import RunPaths


def prefix(paths: RunPaths) -> str:
    """What the folders of every attempt of a run begin with: unique to its user and run folder."""
    tag = hashlib.sha256(str(paths.root).encode()).hexdigest()[:10]
    return f"yatt-{os.getuid()}-{tag}-"


def name(paths: RunPaths, epoch: int, index: int) -> str:
    """Of one node's folders in one attempt."""
    return f"{prefix(paths)}{epoch}-{index}"


def tidy(config: RunConfig, paths: RunPaths, epoch: int, index: int) -> None:
    """Remove what one node of one attempt has left on this machine."""
    for folder in (config.launch.scratch_dir, config.launch.shm_dir):
        shutil.rmtree(Path(folder) / name(paths, epoch, index), ignore_errors=True)


def sweep(config: RunConfig, paths: RunPaths, epoch: int) -> None:
    """Remove what attempts of this run before `epoch` have left on this machine."""
    for folder in (config.launch.scratch_dir, config.launch.shm_dir):
        for left in Path(folder).glob(f"{prefix(paths)}*"):
            before = left.name.removeprefix(prefix(paths)).partition("-")[0]
            if before.isdigit() and int(before) < epoch:
                shutil.rmtree(left, ignore_errors=True)
