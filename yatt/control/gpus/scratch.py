"""Node-local folders of a run: sockets and notes of shared memory in one, published weights in the other.

Their names are noted in the attempt's record before they are made, so that whoever outlives a controller can
remove them; what a killed machine or launcher left is found by `sweep` at the next start.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from yatt.adapters import local_folder
from yatt.adapters.files import make_within, publish, read_or_none, sealed, unsealed_any
from yatt.control.gpus.shared_memory import remove_noted
from yatt.control.node import Node
from yatt.paths import RunPaths


def create(node: Node) -> None:
    """Make this node's folders, and clear away what dead processes of this user left beside them.

    Raises:
        ConfigError: they cannot be made, or `launch.shm_dir` is not in memory.
    """
    launch = node.config.launch
    local_folder.check_memory(Path(launch.shm_dir), "launch.shm_dir")
    sweep((Path(launch.scratch_dir), Path(launch.shm_dir)))
    record = node.paths.local(node.attempt, node.index)
    make_within(node.paths.root, record.parent)
    folders = (node.scratch, node.weights_root)
    publish(record, sealed({"folders": [str(folder) for folder in folders]}, node.attempt))
    for folder in folders:
        about = {
            "run": str(node.paths.root),
            "attempt": node.attempt,
            "node": node.index,
            "host": os.uname().nodename,
        }
        local_folder.create(folder, about)


def remove(node: Node) -> None:
    """Remove this node's own folders; needs no record, since the run folder may be gone."""
    for folder in (node.scratch, node.weights_root):
        _remove(folder)


def tidy(paths: RunPaths, attempt: int, index: int) -> None:
    """Remove what one node of one attempt has left on this machine."""
    noted = unsealed_any(read_or_none(paths.local(attempt, index))) or {}
    for folder in noted.get("folders", []):
        _remove(Path(folder))


def sweep(roots: Iterable[Path]) -> list[Path]:
    """Remove what dead processes of this user left in these folders; gives what was removed."""
    removed = [folder for root in dict.fromkeys(roots) for folder in local_folder.dead(root)]
    for folder in removed:
        _remove(folder)
    return removed


def _remove(folder: Path) -> None:
    """A folder whose notes name shared memory that is still used stays for the next sweep."""
    if local_folder.is_ours(folder) and remove_noted(folder):
        local_folder.remove(folder)
