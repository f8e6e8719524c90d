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

from tests.runs import wait_for
from yatt.adapters.node_local import copied_files, local_copy
from yatt.adapters.node_local.copied_files import CopiedFiles, GivenUp, copied_parts, leaf_of
from yatt.adapters.node_local.local_copy import LocalCopies

FILES = {
    "config.json": b"{}",
    "model.safetensors": os.urandom(3 << 20),
    "pooling/config.json": b"[]",
    "pooling/pytorch_model.bin": b"there are no safetensors here",
    "empty": b"",
}
OTHERS = ("original/consolidated.pth", ".git/config", "checkpoint-7/optimizer.pt", "pytorch_model.bin")


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
    for name in OTHERS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not for loaders")
    return folder


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody uses may be removed at once."""
    monkeypatch.setattr(local_copy, "SETTLE_S", 0.0)


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
    copies.release(keep=True)
    os.truncate(copy / "model.safetensors", 0)
    assert content(copies.take(model)) == FILES


TAKE = """
import sys, time
from pathlib import Path
from yatt.adapters.node_local import copied_files
from yatt.adapters.node_local.local_copy import LocalCopies
make, copy = LocalCopies._make, copied_files._Copying._copy
def telling(*about):
    print("makes", flush=True)
    make(*about)
LocalCopies._make = telling
if len(sys.argv) > 3:
    copied_files._Copying._copy = lambda *about: (copy(*about), time.sleep(60))
copies = LocalCopies.within(Path(sys.argv[1]), lambda: False)
print("ready", flush=True)
sys.stdin.readline()
print(copies.take(Path(sys.argv[2])), flush=True)
sys.stdin.read()
"""


def waiting_taker(folder: Path, source: Path, *more: str) -> "subprocess.Popen[str]":
    """Another process that takes a copy once it is given a line, and uses it until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", TAKE, str(folder), str(source), *more],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: "subprocess.Popen[str]") -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def taker(folder: Path, source: Path, *more: str) -> "subprocess.Popen[str]":
    """One that takes it now."""
    process = waiting_taker(folder, source, *more)
    go(process)
    return process


def end(process: "subprocess.Popen[str]") -> list[str]:
    said, _ = process.communicate()
    return said.splitlines()


def test_concurrent_processes_make_a_local_copy_once(model: Path, tmp_path: Path) -> None:
    large = os.urandom(64 << 20)
    (model / "large").write_bytes(large)
    processes = [waiting_taker(tmp_path, model) for _ in range(4)]
    for process in processes:
        go(process)
    said = [end(process) for process in processes]
    assert sum("makes" in lines for lines in said) == 1
    assert len({lines[-1] for lines in said}) == 1
    assert content(Path(said[0][-1])) == {**FILES, "large": large}


def test_a_copier_that_is_killed_leaves_whole_files_only(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = taker(tmp_path, model, "slowly")
    assert process.stdout.readline() == "makes\n"
    own = tmp_path / f"yatt-stage-{os.getuid()}"
    while not list(own.glob("*.partial/model/model.safetensors")):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    end(process)
    copies = copies_in(tmp_path)
    copies.prune(3600)
    assert list(own.glob("*.partial")), "whoever comes next goes on with it"
    written = copied_files._Copying._copy
    made = list[str]()

    def copy(self: object, source: Path, target: Path, size: int) -> None:
        made.append(target.name)
        written(self, source, target, size)

    monkeypatch.setattr(copied_files._Copying, "_copy", copy)
    assert content(copies.take(model)) == FILES
    assert made
    assert "model.safetensors" not in made, "it was whole already"
    assert not list(own.glob("*.partial"))


def test_parts_that_nobody_goes_on_with_are_removed(model: Path, tmp_path: Path) -> None:
    copies = copies_in(tmp_path)
    part = copies.folder / "0123.partial"
    part.mkdir()
    (copies.folder / "4567.lock").touch()
    for path in copies.folder.iterdir():
        os.utime(path, (0, 0))
    copies.prune(3600)
    assert list(copies.folder.iterdir()) == []


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
        copies.release(keep=True)
        os.utime(found[-1].parent, (time.time() - age_s,) * 2)
    user = taker(tmp_path, sources[0])
    assert user.stdout.readline().strip() == str(found[0])
    os.utime(found[0].parent, (0, 0))
    free = namedtuple("usage", "free")
    room = iter([0, 0, 1 << 40])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free(next(room, 0)))
    sources[3].write_bytes(b"more")
    copies.take(sources[3])
    assert [path.exists() for path in found] == [True, False, True]
    with pytest.raises(OSError, match=r"not enough space for 0\.0 GB"):
        copies.take(model)
    end(user)


def test_who_is_given_up_leaves_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GivenUp):
        copies_in(tmp_path, is_over=True).take(model)
    monkeypatch.setattr(copied_files, "CHUNK_BYTES", 4096)
    looks = iter(range(50))
    copies = LocalCopies.within(tmp_path, lambda: next(looks, 99) > 20)
    with pytest.raises(GivenUp):
        copies.take(model)
    assert not list(copies.folder.rglob("*.safetensors"))
    # Threads that copy are not waited for: they may hang in a filesystem.
    wait_for(lambda: not list(copies.folder.rglob("*.unfinished")), timeout_s=60, what="them to go")


def test_a_source_with_a_hidden_name_is_gone_on_with(tmp_path: Path) -> None:
    model = tmp_path / ".model"
    model.mkdir()
    (model / "config.json").write_bytes(b"{}")
    copies = copies_in(tmp_path)
    name = local_copy._name_of(CopiedFiles.of(model, copied_files.copied_parts))
    begun = copies.folder / f"{name}.partial" / ".model"
    begun.mkdir(parents=True)
    (begun / "0123.unfinished").write_bytes(b"{")
    assert content(copies.take(model)) == {"config.json": b"{}"}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_source_that_changes_meanwhile_is_not_taken(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    copy = copied_files._Copying._copy

    def change(self: object, source: Path, target: Path, size: int) -> None:
        if when == "after":
            copy(self, source, target, size)
        source.resolve().write_bytes(b"others" if when == "before" else bytes(size))
        if when == "before":
            copy(self, source, target, size)

    monkeypatch.setattr(copied_files._Copying, "_copy", change)
    copies = copies_in(tmp_path)
    with pytest.raises(OSError, match="changed while it was copied"):
        copies.take(model)
    assert not [path for path in copies.folder.iterdir() if path.is_dir()]


def test_a_copy_that_was_damaged_while_it_is_used_is_refused_at_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = taker(tmp_path, model)
    assert process.stdout.readline() == "makes\n"
    os.truncate(Path(process.stdout.readline().strip()) / "model.safetensors", 5)
    monkeypatch.setattr(local_copy, "WAIT_S", 0.01)
    with pytest.raises(OSError, match="damaged and in use"):
        copies_in(tmp_path).take(model)
    end(process)
    assert content(copies_in(tmp_path).take(model)) == FILES


def test_the_age_of_a_copy_is_counted_from_the_end_of_its_use(model: Path, tmp_path: Path) -> None:
    copies = copies_in(tmp_path)
    copy = copies.take(model)
    os.utime(copy.parent, (0, 0))
    copies.release(keep=True)
    copies.prune(3600)
    assert copy.exists()
    copies.take(model)
    copies.release(keep=False)
    assert list(copies.folder.iterdir()) == []


def test_what_was_just_taken_stays_for_those_who_hold_no_lock(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    copies = copies_in(tmp_path)
    copy = copies.take(model)
    copies.release(keep=True)
    copies.prune(0)
    assert copy.exists()


def test_a_source_without_a_name_gets_one() -> None:
    assert [leaf_of(Path(name)) for name in ("/", "/usr/..", "/a/b.c")] == ["copy", "copy", "b.c"]


def test_an_empty_folder_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(OSError, match="folder is empty"):
        copies_in(tmp_path).take(tmp_path / "model")


def test_a_folder_in_which_others_may_rename_is_not_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="other users can rename"):
        copies_in(tmp_path)
    tmp_path.chmod(0o1777)
    copies_in(tmp_path)
    with pytest.raises(OSError, match="not an absolute path"):
        copies_in(Path("here"))


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
    with pytest.raises(PermissionError, match="not a private folder of this user"):
        copies_in(tmp_path)


def test_what_is_neither_file_nor_folder_is_refused(model: Path) -> None:
    os.mkfifo(model / "pipe")
    with pytest.raises(OSError, match="neither a file nor a folder"):
        copied_parts(model)
    with pytest.raises(FileNotFoundError):
        copied_parts(model / "missing")
