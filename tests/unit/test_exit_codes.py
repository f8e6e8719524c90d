"""What a filesystem says for a while is nobody's mistake, also where it is told as a ConfigError."""

import errno
import os

import pytest

from yatt.cli import main as cli
from yatt.errors import EXIT_FAILED, EXIT_USER_MISTAKE


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.EIO, EXIT_FAILED), (errno.ESTALE, EXIT_FAILED), (errno.EACCES, EXIT_USER_MISTAKE),
     (errno.ENOSPC, EXIT_USER_MISTAKE)],
)  # fmt: skip
def test_a_command_ends_with_exit_code_2_only_for_what_its_user_can_mend(monkeypatch, tmp_path, number, code):
    path = tmp_path / "run.yaml"
    path.write_text("x: 1\n")
    opening = os.open

    def opened(place, *arguments, **more):
        if str(place) == str(path):
            raise OSError(number, os.strerror(number), str(path))
        return opening(place, *arguments, **more)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr("sys.argv", ["yatt", "run", str(path)])
    assert cli.main() == code
