"""A user's cache of compiled code: private, shared by the processes of a node, removed if none uses it."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from yatt.adapters.node_local import compiler_cache
from yatt.adapters.node_local.compiler_cache import FOLDERS, CompilerCache, unused_caches
from yatt.cli.commands.clean import clean

USES = """
import sys
from pathlib import Path
from yatt.adapters.node_local.compiler_cache import CompilerCache
cache = CompilerCache(Path(sys.argv[1]))
print(cache.variables()["VLLM_CACHE_ROOT"], flush=True)
sys.stdin.read()
"""


def user_of(root: Path) -> tuple["subprocess.Popen[str]", Path]:
    """A process that uses the cache until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", USES, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip()).parent


def test_later_processes_find_what_earlier_ones_have_compiled(tmp_path: Path) -> None:
    first = CompilerCache(tmp_path)
    places = first.variables()
    assert places.keys() == FOLDERS.keys()
    assert all(Path(each).is_relative_to(tmp_path) for each in places.values())
    Path(places["TRITON_CACHE_DIR"]).mkdir()
    (Path(places["TRITON_CACHE_DIR"]) / "kernel").touch()
    first.close()
    second = CompilerCache(tmp_path)
    assert second.variables() == places
    assert (Path(places["TRITON_CACHE_DIR"]) / "kernel").exists()
    assert stat.S_IMODE(Path(places["TRITON_CACHE_DIR"]).parent.stat().st_mode) == 0o700
    second.close()


def test_a_folder_that_others_can_read_or_a_link_is_not_used(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    own = tmp_path / f"yatt-cache-{os.getuid()}"
    own.symlink_to(victim)
    with pytest.raises(PermissionError):
        CompilerCache(tmp_path)
    own.unlink()
    own.mkdir(mode=0o755)
    with pytest.raises(PermissionError):
        CompilerCache(tmp_path)
    assert list(victim.iterdir()) == [] and list(own.iterdir()) == []


def test_clean_removes_it_when_the_last_process_that_uses_it_has_ended(tmp_path: Path, capsys) -> None:
    (first, own), (second, same) = user_of(tmp_path), user_of(tmp_path)
    assert own == same
    (own / "vllm").mkdir()
    (own / "vllm" / "graph").write_bytes(b"x" * 1000)
    for process in (first, second):
        clean([tmp_path], dry_run=False)
        assert capsys.readouterr().out == "nothing was left behind\n" and (own / "vllm" / "graph").exists()
        process.kill()
        process.communicate()
    clean([tmp_path], dry_run=True)
    assert capsys.readouterr().out == f"would remove {own} (0.0 MB)\n" and own.exists()
    clean([tmp_path], dry_run=False)
    assert capsys.readouterr().out == f"removed {own} (0.0 MB)\n" and not own.exists()


def test_none_can_begin_to_use_it_while_it_is_removed(tmp_path: Path) -> None:
    CompilerCache(tmp_path).close()
    with unused_caches([tmp_path]) as found:
        assert [path.name for path in found] == [f"yatt-cache-{os.getuid()}"]
        with pytest.raises(BlockingIOError):
            CompilerCache(tmp_path)
    CompilerCache(tmp_path).close()


def test_none_can_begin_to_use_it_while_its_files_are_removed_one_by_one(tmp_path: Path, monkeypatch) -> None:
    """A removal that takes the lock's file first would let a controller in, and remove what it compiles."""
    first = CompilerCache(tmp_path)
    own = Path(first.variables()["VLLM_CACHE_ROOT"]).parent
    first.close()
    for name in ("a", "z"):
        (own / name).mkdir()
    (own / "file").touch()
    lock, refused = (own / "lock").stat().st_ino, list[bool]()

    def looked_at(remove, /):
        def looking(*given, **more):
            done = remove(*given, **more)
            if any(own.glob("*")):
                refused.append((own / "lock").exists() and (own / "lock").stat().st_ino == lock)
            return done

        return looking

    for module, name in ((os, "unlink"), (os, "rmdir"), (shutil, "rmtree")):
        monkeypatch.setattr(module, name, looked_at(getattr(module, name)))
    clean([tmp_path], dry_run=False)
    assert refused and all(refused) and not own.exists()


def test_a_lock_whose_file_was_replaced_is_not_one(tmp_path: Path, monkeypatch) -> None:
    """Between its opening and its locking, it was removed, and another controller has made a new one."""
    CompilerCache(tmp_path).close()
    own = tmp_path / f"yatt-cache-{os.getuid()}"
    flock = compiler_cache.fcntl.flock

    def replaced(descriptor: int, how: int) -> None:
        (own / "lock").unlink()
        (own / "lock").touch()
        flock(descriptor, how)

    monkeypatch.setattr(compiler_cache.fcntl, "flock", replaced)
    with pytest.raises(OSError, match="was removed"):
        CompilerCache(tmp_path)


def test_a_cache_without_a_lock_file_is_locked_before_it_is_removed(tmp_path: Path) -> None:
    own = tmp_path / f"yatt-cache-{os.getuid()}"
    own.mkdir(mode=0o700)
    with unused_caches([tmp_path]) as found:
        assert found == [own]
        with pytest.raises(BlockingIOError):
            CompilerCache(tmp_path)
