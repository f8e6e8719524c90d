"""Trying a folder with real processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, environment
from yatt.adapters import shared_folder
from yatt.adapters.shared_folder import Member
from yatt.errors import DeadlineExceeded


def test_a_local_folder_keeps_its_promises_and_is_left_clean(tmp_path: Path) -> None:
    argv = [sys.executable, str(ROOT / "tools" / "check_fs.py"), str(tmp_path), "--processes", "3"]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert "processes, nodes                3, 1" in done.stdout
    assert "claims exclusive, renames whole; 1 node(s)" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    argv = [sys.executable, str(ROOT / "tools" / "check_fs.py"), str(tmp_path / "no")]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 1
    assert "No such file or directory" in done.stderr


def test_a_member_that_never_comes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "WAIT_S", 0.2)
    with pytest.raises(DeadlineExceeded, match=r"process 1 of 2 was not heard of .* not a shared one"):
        Member(tmp_path, index=0, count=2, node="n1").measure()
