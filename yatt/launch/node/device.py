"""Device of this machine, found without importing torch."""

import shutil
import subprocess

from yatt.errors import WorkerFailed

ANSWER_S = 30.0


def device_of(wanted: str) -> str:
    """Returns cpu or cuda; `auto` runs nvidia-smi.

    Raises:
        WorkerFailed: nvidia-smi hangs, for example because the driver does.
    """
    if wanted != "auto":
        return wanted
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "cpu"
    try:
        answer = subprocess.run([tool, "-L"], capture_output=True, check=False, timeout=ANSWER_S)
    except subprocess.TimeoutExpired as error:
        raise WorkerFailed(f"{tool} did not answer within {ANSWER_S:g} s; check the GPU driver") from error
    return "cuda" if answer.returncode == 0 and b"GPU" in answer.stdout else "cpu"
