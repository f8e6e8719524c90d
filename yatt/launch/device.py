"""Which device this machine computes on, without importing torch."""

import shutil
import subprocess

from yatt.errors import WorkerFailed

ANSWER_S = 30.0


def device_of(wanted: str) -> str:
    """cpu or cuda; auto asks the driver's own tool.

    Raises:
        WorkerFailed: the tool does not answer, as on a node whose driver stands still.
    """
    if wanted != "auto":
        return wanted
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "cpu"
    try:
        answer = subprocess.run([tool, "-L"], capture_output=True, check=False, timeout=ANSWER_S)
    except subprocess.TimeoutExpired as error:
        raise WorkerFailed(f"{tool} has not answered within {ANSWER_S:g} s") from error
    return "cuda" if answer.returncode == 0 and b"GPU" in answer.stdout else "cpu"
