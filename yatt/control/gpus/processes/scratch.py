"""Node-local folders of a run: one with sockets and notes of shared memory, one with published weights.

Their names are recorded before they are made, so that the process that outlives a controller can remove them.
Folders that a killed machine or launcher left are found by `remove_folders_of_the_dead` at the next start.
"""

import contextlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from yatt.adapters.files.files import make_within, read_or_none, sealed_record, unsealed_any, write_atomically
from yatt.adapters.node_local import local_folder
from yatt.checkpoint.local.local_tier import LocalTier
from yatt.control.gpus.processes.shared_memory import remove_noted
from yatt.control.node import Node
from yatt.paths import RunPaths

REMOVAL_S = 10.0
"""Longest wait for the removal of local files of checkpoints."""


def create(node: Node) -> None:
    """Makes this node's folders, and removes those beside them that dead processes of this user left.

    Raises:
        ConfigError: they cannot be made, or `launch.shm_dir` is not in memory.
    """
    launch = node.config.launch
    local_folder.check_in_memory(Path(launch.shm_dir), "launch.shm_dir")
    remove_folders_of_the_dead((Path(launch.scratch_dir), Path(launch.shm_dir)))
    record = node.paths.local(node.attempt, node.index, node.life)
    make_within(node.paths.root, record.parent)
    folders = (node.scratch, node.weights_root)
    write_atomically(record, sealed_record({"folders": [str(folder) for folder in folders]}, node.attempt))
    for folder in folders:
        about = {
            "run": str(node.paths.root),
            "attempt": node.attempt,
            "node": node.index,
            "host": os.uname().nodename,
        }
        local_folder.create(folder, about)


def remove(node: Node) -> None:
    """Removes this node's own folders. It needs no record, since the run folder may have been deleted."""
    for folder in (node.scratch, node.weights_root):
        remove_one(folder)


def remove_checkpoint_files(node: Node) -> None:
    """Removes this node's local files of checkpoints, after the run has finished. A disk that does not answer
    is not waited for; `yatt clean` removes what stays."""
    if not (node.is_trainer_node and node.config.checkpoint.local_dir):
        return

    def work() -> None:
        with contextlib.suppress(OSError):
            local_folder.remove(LocalTier.of(node.config).root)

    thread = threading.Thread(target=work, name="local-tier", daemon=True)
    thread.start()
    thread.join(REMOVAL_S)


def remove_folders_of_life(paths: RunPaths, attempt: int, index: int, life: int = 1) -> None:
    """Removes the folders that one life of a node of one attempt has left on this machine."""
    noted = unsealed_any(read_or_none(paths.local(attempt, index, life))) or {}
    for folder in noted.get("folders", []):
        remove_one(Path(folder))


def remove_folders_of_the_dead(roots: Iterable[Path]) -> list[Path]:
    """Removes folders that dead processes of this user left in these folders; returns the removed ones."""
    removed = [folder for root in dict.fromkeys(roots) for folder in local_folder.folders_of_the_dead(root)]
    for folder in removed:
        remove_one(folder)
    return removed


def remove_one(folder: Path) -> None:
    """Removes a folder. If its notes name shared memory that is still in use, it stays for the next sweep."""
    if local_folder.is_ours(folder) and remove_noted(folder):
        local_folder.remove(folder)
