"""Findings about the folders of a run, seen from this machine."""

from collections.abc import Iterator
from dataclasses import dataclass

from yatt.adapters.files.shared_folder import Report
from yatt.adapters.node_local.local_folder import MEMORY, SHARED, mount_of as mount_of
from yatt.errors import Finding
from yatt.forecast.memory.fit import shm_fault
from yatt.launch.diagnose.check_fs import LATE_S, lateness_s, missing_guarantees
from yatt.launch.diagnose.records import fail, ok, warn

LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "ramfs"})
LITTLE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """The state of a folder."""

    key: str
    """Config key of the folder: run.dir, scratch_dir, shm_dir."""

    path: str
    filesystem: str
    """Filesystem type, by the kernel's name."""

    problem: str = ""
    """Reason why it cannot be written to; empty if it can."""

    free_bytes: int = 0
    size_bytes: int = 0
    """Of the filesystem."""

    report: Report | None = None
    """Result of the test with several processes of this machine; None if not tested."""


def run_folder_findings(folder: Folder, *, is_one_machine: bool) -> Iterator[Finding]:
    """Checks that every node sees the run folder, and that exclusive creates and renames work there.

    Args:
        is_one_machine: all nodes of the cluster are this machine, so any folder is shared.
    """
    if folder.problem:
        yield fail(folder.key, f"{folder.path} cannot be written to: {folder.problem}.", _elsewhere(folder))
        return
    kind = folder.filesystem.removeprefix("fuse.")
    if kind in SHARED:
        yield ok(folder.key, f"{folder.path} is on {folder.filesystem}, a shared filesystem.")
    elif is_one_machine:
        yield ok(folder.key, f"{folder.path} is on {folder.filesystem}; all nodes are this machine.")
    else:
        certain = "is not shared between nodes" if kind in LOCAL else "may not be shared between nodes"
        cure = "Test it: srun -N2 --ntasks-per-node=1 python tools/check_fs.py FOLDER. " + _elsewhere(folder)
        yield warn(folder.key, f"{folder.path} is on {folder.filesystem}, which {certain}.", cure)
    if folder.report is not None:
        yield _semantics(folder, folder.report)


def local_folder_findings(folder: Folder) -> Iterator[Finding]:
    """Checks a node-local folder from this machine; a folder missing here may exist on the nodes."""
    if folder.problem:
        what = f"{folder.path} cannot be written to on this machine: {folder.problem}."
        yield warn(folder.key, what, f"If the nodes have the same problem, write another {folder.key}.")
    elif folder.filesystem.removeprefix("fuse.") in SHARED:
        what = f"{folder.path} is on {folder.filesystem}: shared and slow."
        yield warn(folder.key, what, f"{folder.key}: write a folder on a local disk of the node.")
    elif folder.key == "shm_dir" and folder.filesystem not in MEMORY:
        what = f"{folder.path} is on {folder.filesystem}, not in memory: a run will refuse it."
        yield warn(folder.key, what, "Write shm_dir: /dev/shm.")
    elif folder.free_bytes < LITTLE_BYTES:
        yield warn(folder.key, f"{folder.path} has {folder.free_bytes >> 20} MiB free.", "Free space.")
    else:
        free = f"{folder.free_bytes / 2**30:.0f} GiB free"
        yield ok(folder.key, f"{folder.path}: writable, {folder.filesystem}, {free}.")


def shm_findings(folder: Folder, held: int, *, is_one_machine: bool) -> Iterator[Finding]:
    """Compares the memory filesystem of this machine with what a node of the run holds in one.

    Args:
        held: bytes; 0: not known.
    """
    if held and folder.size_bytes and not folder.problem:
        if held > folder.size_bytes:
            where = f"and {folder.path} on this machine"
            what, cure = shm_fault("a node of the run", held, folder.size_bytes, where)
            yield (fail if is_one_machine else warn)(folder.key, what, cure)
        else:
            yield ok(folder.key, f"a node of the run holds {held / 2**30:.1f} GiB in {folder.path}.")


def _semantics(folder: Folder, report: Report) -> Finding:
    broken = "; ".join(missing_guarantees(report))
    if broken:
        return fail(folder.key, f"{folder.path}: {broken}.", _elsewhere(folder))
    late_s = lateness_s(report)
    what = f"exclusive creates and renames work, seen by others within {late_s * 1e3:.0f} ms (this machine)."
    if late_s > LATE_S:
        return warn(folder.key, what, "Starts will be slow; see tools/check_fs.py. " + _elsewhere(folder))
    return ok(folder.key, what)


def _elsewhere(folder: Folder) -> str:
    return f"Write a folder on the cluster's shared filesystem as {folder.key}."
