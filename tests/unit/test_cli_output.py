"""Commands whose output nobody takes."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.runs import HANG_S, RunFile, command, environment
from yatt.errors import EXIT_FAILED


@pytest.fixture(autouse=True)
def no_run_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`yatt clean` looks at the files of all runs that are: after other tests that takes seconds."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def with_closed_output(*arguments: str, buffered: bool) -> "subprocess.CompletedProcess[bytes]":
    reader, writer = os.pipe()
    os.close(reader)
    env = {k: v for k, v in environment().items() if k != "PYTHONUNBUFFERED"}
    try:
        return subprocess.run(
            command(*arguments), env=env if buffered else {**env, "PYTHONUNBUFFERED": "1"}, stdout=writer,
            stderr=subprocess.PIPE, timeout=HANG_S, check=False,
        )  # fmt: skip
    finally:
        os.close(writer)


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("arguments", [("--version",), ("clean", "--dry-run")])
def test_a_command_that_only_looks_ends_quietly_when_its_reader_has_gone(arguments, buffered) -> None:
    done = with_closed_output(*arguments, buffered=buffered)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("unbuffered", ["1", ""])
def test_a_run_that_could_not_speak_before_it_began_is_not_taken_for_finished(tmp_path, unbuffered) -> None:
    """Its note about a doubtful setting meets a closed pipe."""
    run = RunFile(tmp_path, {"optimizer": {"lr": 0.0}})
    argv = command("run", str(run.write()))
    reader, writer = os.pipe()
    os.close(reader)
    env = environment() | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(argv, env=env, stdout=writer, stderr=writer, timeout=HANG_S, check=False)
    os.close(writer)
    assert done.returncode == EXIT_FAILED
    assert not run.run_dir.exists()


def test_a_command_whose_output_was_closed_does_its_work() -> None:
    argv = ["sh", "-c", 'exec "$@" >&-', "sh", *command("clean", "--dry-run")]
    done = subprocess.run(argv, env=environment(), stderr=subprocess.PIPE, timeout=HANG_S, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_full_disk_behind_the_output_is_said(tmp_path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command("clean", "--dry-run"), env=environment(), stdout=full, stderr=subprocess.PIPE,
            timeout=HANG_S, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert b"No space left on device" in done.stderr
