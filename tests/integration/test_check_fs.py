"""Trying a folder with real processes."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.runs import HANG_S, ROOT, environment
from yatt.adapters.files import shared_folder
from yatt.adapters.files.files import write_atomically
from yatt.adapters.files.shared_folder import Member, Report
from yatt.errors import DeadlineExceeded
from yatt.launch.diagnose.check_fs import missing_guarantees


def test_a_local_folder_keeps_its_promises_and_is_left_clean(tmp_path: Path) -> None:
    argv = [sys.executable, str(ROOT / "tools" / "check_fs.py"), str(tmp_path), "--processes", "3"]
    done = subprocess.run(
        argv, env=environment(), capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "processes, nodes                3, 1" in done.stdout
    assert "exclusive creates and renames work; 1 node(s)" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    argv = [sys.executable, str(ROOT / "tools" / "check_fs.py"), str(tmp_path / "no")]
    done = subprocess.run(
        argv, env=environment(), capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 1
    assert "No such file or directory" in done.stderr


def test_a_member_that_never_comes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "WAIT_S", 0.2)
    with pytest.raises(DeadlineExceeded, match=r"process 1 of 2 wrote nothing .* not shared"):
        Member(tmp_path, index=0, count=2, node="n1").measure()


def measured_by_two(folder: Path) -> Report:
    other = threading.Thread(target=Member(folder, index=1, count=2, node="n2").measure)
    other.start()
    report = Member(folder, index=0, count=2, node="n1").measure()
    other.join(timeout=HANG_S)
    assert report is not None
    return report


def test_claims_that_are_not_exclusive_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "create_exclusively", lambda path, data: True)
    report = measured_by_two(tmp_path)
    assert report.nodes == 2
    assert missing_guarantees(report) == [
        f"{report.claim_rounds} of {report.claim_rounds} claims had not exactly one winner"
    ]


def test_files_that_are_written_in_place_are_seen_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_place(path: Path, data: bytes) -> None:
        if path.name != "whole":
            write_atomically(path, data)
            return
        with path.open("wb", buffering=0) as file:
            for start in range(0, len(data), 4096):
                file.write(data[start : start + 4096])

    monkeypatch.setattr(shared_folder, "write_atomically", in_place)
    found = missing_guarantees(measured_by_two(tmp_path))
    assert len(found) == 1
    assert "reads saw half of a renamed file" in found[0]
