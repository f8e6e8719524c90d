"""The stores that checkpoints are tested in."""

import pytest

from tests.saved_weights import saved_run
from yatt.checkpoint.store.store import FolderStore, ObjectStore


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    if request.param == "folder":
        return FolderStore(tmp_path)
    from fsspec.implementations.memory import MemoryFileSystem

    filesystem = MemoryFileSystem()
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]
    return ObjectStore(filesystem, "/bucket/run")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has saved two iterations and ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        return saved_run(tmp_path_factory.mktemp("runs") / "theirs", iterations=(1, 2))
