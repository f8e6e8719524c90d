"""Copies on a node's own disk: whole or not there, made once, and removed only when nobody uses them."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest

from yatt.adapters import local_copy
from yatt.adapters.local_copy import GivenUp, LocalCopies, parts_of

FILES = {
    "config.json": b"{}",
    "model.safetensors": os.urandom(3 << 20),
    "pooling/config.json": b"[]",
    "empty": b"",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model as the Hugging Face cache holds it: links to files of other names."""
    folder = tmp_path / "shared" / "model"
    for number, (name, data) in enumerate(FILES.items()):
        blob = tmp_path / "shared" / "blobs" / str(number)
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(blob)
    for name in ("original/consolidated.pth", ".git/config"):
        (folder / name).parent.mkdir()
        (folder / name).write_bytes(b"not for loaders")
    return folder


def copies_in(folder: Path, is_over: bool = False) -> LocalCopies:
    return LocalCopies.within(folder, lambda: is_over)


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if not path.is_dir()
    }


def test_a_folder_is_copied_once_with_what_loaders_read(model: Path, tmp_path: Path) -> None:
    first = copies_in(tmp_path).take(model)
    assert content(first) == FILES
    assert first.name == "model"
    assert not any(path.is_symlink() for path in first.rglob("*"))
    before = first.stat().st_ino
    again = copies_in(tmp_path).take(model)
    assert again == first
    assert again.stat().st_ino == before


def test_a_file_is_copied_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"rows")
    copy = copies_in(tmp_path).take(tmp_path / "train.parquet")
    assert (copy.name, copy.read_bytes()) == ("train.parquet", b"rows")


def test_a_source_that_has_changed_has_another_copy(model: Path, tmp_path: Path) -> None:
    copies = copies_in(tmp_path)
    first = copies.take(model)
    (model / "config.json").resolve().write_bytes(b"[]")
    os.utime(model / "config.json", ns=(0, 1))
    second = copies.take(model)
    assert second != first
    assert (second / "config.json").read_bytes() == b"[]"
    assert (first / "config.json").read_bytes() == b"{}"


def test_a_copy_that_a_crash_has_cut_is_made_anew(model: Path, tmp_path: Path) -> None:
    copies = copies_in(tmp_path)
    copy = copies.take(model)
    copies.release()
    os.truncate(copy / "model.safetensors", 0)
    assert content(copies.take(model)) == FILES


TAKE = """
import sys
from pathlib import Path
from yatt.adapters import local_copy
from yatt.adapters.local_copy import LocalCopies
made = LocalCopies._make
def make(self, name, source, parts):
    print("makes", flush=True)
    if len(sys.argv) > 3:
        local_copy.CHUNK_BYTES = 4096
    made(self, name, source, parts)
LocalCopies._make = make
if len(sys.argv) > 3:
    import time
    write = local_copy._Copying._copy
    local_copy._Copying._copy = lambda *about: (write(*about), time.sleep(60))
copies = LocalCopies.within(Path(sys.argv[1]), lambda: False)
print(copies.take(Path(sys.argv[2])), flush=True)
sys.stdin.read()
"""


def taker(folder: Path, source: Path, *more: str) -> "subprocess.Popen[str]":
    """Another process that takes a copy, and uses it until its input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", TAKE, str(folder), str(source), *more],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def end(process: "subprocess.Popen[str]") -> list[str]:
    said, _ = process.communicate()
    return said.splitlines()


def test_of_many_processes_one_makes_it(model: Path, tmp_path: Path) -> None:
    said = [end(process) for process in [taker(tmp_path, model) for _ in range(5)]]
    assert sum("makes" in lines for lines in said) == 1
    assert len({lines[-1] for lines in said}) == 1
    assert content(Path(said[0][-1])) == FILES


def test_one_who_is_killed_while_copying_leaves_nothing_that_counts(model: Path, tmp_path: Path) -> None:
    process = taker(tmp_path, model, "slowly")
    assert process.stdout.readline() == "makes\n"
    own = tmp_path / f"yatt-stage-{os.getuid()}"
    while not list(own.glob("*.partial/model/model.safetensors")):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    end(process)
    copies = copies_in(tmp_path)
    copies.prune(3600)
    assert list(own.iterdir()) == []
    assert content(copies.take(model)) == FILES


def test_what_somebody_uses_is_never_removed(model: Path, tmp_path: Path) -> None:
    process = taker(tmp_path, model)
    assert process.stdout.readline() == "makes\n"
    copy = Path(process.stdout.readline().strip())
    copies = copies_in(tmp_path)
    copies.prune(0)
    assert content(copy) == FILES
    end(process)
    copies.prune(3600)
    assert content(copy) == FILES
    copies.prune(0)
    assert list(copies.folder.iterdir()) == []


def test_room_is_made_by_removing_the_one_unused_for_the_longest_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, sources = copies_in(tmp_path), [tmp_path / f"file{number}" for number in range(4)]
    found = []
    for age_s, source in zip((30, 20, 10), sources, strict=False):
        source.write_bytes(b"12345678")
        found.append(copies.take(source))
        os.utime(found[-1].parent, (time.time() - age_s,) * 2)
    used, copies._locks = copies._locks[0], copies._locks[1:]  # the oldest is used
    copies.release()
    free = namedtuple("usage", "free")
    room = iter([0, 0, 1 << 40])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free(next(room, 0)))
    sources[3].write_bytes(b"more")
    copies.take(sources[3])
    assert [path.exists() for path in found] == [True, False, True]
    with pytest.raises(OSError, match=r"no room for 0\.0 GB"):
        copies.take(model)
    assert not list(copies.folder.glob("*.partial"))
    os.close(used)


def test_who_is_given_up_leaves_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GivenUp):
        copies_in(tmp_path, is_over=True).take(model)
    monkeypatch.setattr(local_copy, "CHUNK_BYTES", 4096)
    looks = iter(range(50))
    copies = LocalCopies.within(tmp_path, lambda: next(looks, 99) > 20)
    with pytest.raises(GivenUp):
        copies.take(model)
    assert not [path for path in copies.folder.iterdir() if path.is_dir()]


def test_a_source_that_changes_meanwhile_is_not_taken(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = local_copy._Copying._copy

    def change(self: object, source: Path, target: Path, size: int) -> None:
        copy(self, source, target, size)
        source.resolve().write_bytes(b"others")

    monkeypatch.setattr(local_copy._Copying, "_copy", change)
    copies = copies_in(tmp_path)
    with pytest.raises(OSError, match="changed while it was copied"):
        copies.take(model)
    assert not [path for path in copies.folder.iterdir() if path.is_dir()]


@pytest.mark.parametrize("plant", ["link", "file", "open"])
def test_a_folder_that_another_may_have_planted_is_not_used(tmp_path: Path, plant: str) -> None:
    own = tmp_path / f"yatt-stage-{os.getuid()}"
    if plant == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        own.symlink_to(tmp_path / "elsewhere")
    elif plant == "file":
        own.write_text("")
    else:
        own.mkdir()
        own.chmod(0o770)
    with pytest.raises(PermissionError, match="not a folder of this user alone"):
        copies_in(tmp_path)


def test_what_is_neither_file_nor_folder_is_refused(model: Path) -> None:
    os.mkfifo(model / "pipe")
    with pytest.raises(OSError, match="neither a file nor a folder"):
        parts_of(model)
    with pytest.raises(FileNotFoundError):
        parts_of(model / "missing")
