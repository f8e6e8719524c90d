"""The stores that checkpoints are tested in."""

import pytest

from yatt.checkpoint.store import FolderStore, ObjectStore


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    if request.param == "folder":
        return FolderStore(tmp_path)
    from fsspec.implementations.memory import MemoryFileSystem

    filesystem = MemoryFileSystem()
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]
    return ObjectStore(filesystem, "/bucket/run")
