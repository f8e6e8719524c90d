"""Which device this machine computes on, without importing torch."""

import shutil
import subprocess


def device_of(wanted: str) -> str:
    """cpu or cuda; auto asks the driver's own tool."""
    if wanted != "auto":
        return wanted
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "cpu"
    answer = subprocess.run([tool, "-L"], capture_output=True, check=False, timeout=30)
    return "cuda" if answer.returncode == 0 and b"GPU" in answer.stdout else "cpu"
