"""What a user's file may do while it is loaded, and what is said of it. None of it may harm this process."""

import contextlib
import os
import re
from pathlib import Path

import pytest

from yatt.errors import ConfigError
from yatt.reward.signature import ExpectedCall
from yatt.reward.trial import try_function

GOOD = "def compute_score(**_): return 1.0\n"


def tried(folder: Path, code: str, limit_s: float = 30.0, *, must_be_async: bool = False) -> None:
    (folder / "mine.py").write_text(code)
    call = ExpectedCall(given=("data_source",), is_async=must_be_async)
    try_function(folder / "mine.py", "compute_score", "rewards[mine]", call, limit_s=limit_s)


def test_a_file_that_can_be_loaded_passes(tmp_path: Path) -> None:
    tried(tmp_path, GOOD)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("x = 1\nimport not_there_at_all\n", "mine.py:2: ModuleNotFoundError"),
        ("import sys\nsys.exit(0)\n", "mine.py:2: loading the file ends the process (SystemExit: 0)"),
        ("import os\nos._exit(0)\n", "ended the process (exit code 0)"),
        ("import os\nos.kill(os.getpid(), 9)\n", "ended the process (killed by SIGKILL)"),
        ("raise BaseException('odd')\n", "BaseException: odd"),
    ],
)
def test_a_file_that_fails_is_a_mistake_of_the_user(tmp_path: Path, code: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"^rewards\[mine\]\.path: .*" + re.escape(says)):
        tried(tmp_path, code + GOOD)


def test_a_file_that_closes_descriptors_and_starts_threads_passes(tmp_path: Path) -> None:
    endless = "import os, threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
    tried(tmp_path, endless + "os.closerange(0, 50)\n" + GOOD)
    os.fstat(0), os.fstat(1), os.fstat(2)


def test_a_file_that_is_not_loaded_in_time_is_told_and_ended(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"was not loaded within 0.5 s \(launch.start_timeout_s\)"):
        tried(tmp_path, "import time\ntime.sleep(600)\n" + GOOD, limit_s=0.5)


@pytest.mark.parametrize("ending", ["", "import time\ntime.sleep(600)\n", "os._exit(0)\n"])
def test_what_a_file_starts_in_a_session_of_its_own_ends_with_the_trial(tmp_path: Path, ending: str) -> None:
    starts = "import os, subprocess\nchild = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    starts += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
    with contextlib.suppress(ConfigError):
        tried(tmp_path, starts + ending + GOOD, limit_s=3.0)
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_a_genrms_function_must_be_async(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be `async def`"):
        tried(tmp_path, GOOD, must_be_async=True)
