"""Folders in /tmp and /dev/shm: exclusive, private, and removed only when surely ours and dead."""

import json
import os
import stat
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from yatt.adapters.node_local.local_folder import (
    OWNER,
    check_in_memory,
    create,
    folder_owner,
    folder_prefix,
    folders_of_the_dead,
    is_ours,
    new_name,
    remove,
)
from yatt.adapters.processes.process import Identity
from yatt.cli.commands.clean import clean
from yatt.errors import ConfigError
from yatt.paths import LOCAL_NAME_BYTES

MAKE = """
import os, sys
from pathlib import Path
from yatt.adapters.node_local.local_folder import create, new_name
folder = Path(sys.argv[1]) / new_name()
create(folder, {"run": "/r"})
(folder / "weights").write_bytes(b"x" * 1000)
print(folder, flush=True)
sys.stdin.read()
"""


def maker(root: Path) -> tuple["subprocess.Popen[str]", Path]:
    """A process that owns a folder until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def killed(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def test_a_folder_is_private_and_names_its_owner(tmp_path: Path) -> None:
    folder = tmp_path / new_name()
    create(folder, {"run": "/r"})
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / OWNER).stat().st_mode) == 0o600
    assert folder_owner(folder) == Identity.of(os.getpid())
    assert list(folders_of_the_dead(tmp_path)) == []


def test_no_two_names_are_alike_and_none_is_too_long_for_a_socket() -> None:
    names = {new_name() for _ in range(1000)}
    assert len(names) == 1000
    assert all(name.startswith(folder_prefix()) and len(name) <= LOCAL_NAME_BYTES for name in names)


def test_what_is_there_already_is_not_used(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o755)
    folder, link = tmp_path / new_name(), tmp_path / new_name()
    folder.mkdir()
    link.symlink_to(victim)
    for planted in (folder, link):
        with pytest.raises(ConfigError, match=r"cannot be created \(File exists\)"):
            create(planted, {})
    assert list(folder.iterdir()) == []
    assert list(victim.iterdir()) == [] and stat.S_IMODE(victim.stat().st_mode) == 0o755


def test_a_killed_owners_folder_is_dead_and_a_living_ones_is_not(tmp_path: Path) -> None:
    living, first = maker(tmp_path)
    doomed, second = maker(tmp_path)
    killed(doomed)
    try:
        assert list(folders_of_the_dead(tmp_path)) == [second]
    finally:
        killed(living)
    assert sorted(folders_of_the_dead(tmp_path)) == sorted([first, second])


def test_what_is_not_surely_dead_stays(tmp_path: Path) -> None:
    me = Identity.of(os.getpid())
    assert me is not None
    gone = replace(me, begun="1")
    elsewhere = replace(gone, place="another boot of another machine")
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / OWNER).write_text(json.dumps({"owner": asdict(gone)}))

    def planted(text: str) -> Path:
        folder = tmp_path / new_name()
        folder.mkdir()
        (folder / OWNER).write_text(text)
        return folder

    for text in (
        "",
        "{",
        "[]",
        "[" * 70_000,
        '{"owner": 5}',
        '{"owner": {"pid": "x", "begun": 1, "place": 2}}',
    ):
        planted(text)
    planted(json.dumps({"owner": asdict(elsewhere)}))
    planted(json.dumps({"owner": asdict(me)}))
    (tmp_path / new_name()).symlink_to(victim)
    linked = tmp_path / new_name()
    linked.mkdir()
    (linked / OWNER).symlink_to(victim / OWNER)
    fifo = tmp_path / new_name()
    fifo.mkdir()
    os.mkfifo(fifo / OWNER)
    (tmp_path / "yatt-4711-0123456789abcdef").mkdir()
    sure = planted(json.dumps({"owner": asdict(gone)}))
    assert list(folders_of_the_dead(tmp_path)) == [sure]


def test_a_link_is_neither_followed_nor_removed(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / new_name()
    victim.mkdir()
    (victim / "thesis").touch()
    link.symlink_to(victim)
    remove(link)
    assert link.is_symlink() and (victim / "thesis").exists() and not is_ours(link)


def test_a_link_inside_is_removed_without_what_it_leads_to(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / new_name()
    victim.mkdir()
    (victim / "thesis").touch()
    create(folder, {})
    (folder / "v1").symlink_to(victim)
    remove(folder)
    assert not folder.exists() and (victim / "thesis").exists()


def test_clean_says_what_it_removes_and_removes_nothing_when_dry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    doomed, folder = maker(tmp_path)
    killed(doomed)
    assert clean([tmp_path], dry_run=True) == 0
    assert capsys.readouterr().out == f"would remove {folder} (0.0 MB)\n" and folder.is_dir()
    assert clean([tmp_path], dry_run=False) == 0
    assert capsys.readouterr().out == f"removed {folder} (0.0 MB)\n" and not folder.exists()
    assert clean([tmp_path], dry_run=False) == 0
    assert capsys.readouterr().out == "nothing was left behind\n"


def test_weights_pass_through_memory_only(tmp_path: Path) -> None:
    check_in_memory(Path("/dev/shm"), "launch.shm_dir")
    with pytest.raises(ConfigError, match=r"launch\.shm_dir: there is no folder .*nowhere\. Write /dev/shm"):
        check_in_memory(tmp_path / "nowhere", "launch.shm_dir")
    with pytest.raises(
        ConfigError, match=r"launch\.shm_dir: /proc is on proc, which is not a memory filesystem"
    ):
        check_in_memory(Path("/proc"), "launch.shm_dir")
