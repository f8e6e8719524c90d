"""Makes a virtual environment with the oldest vLLM that pyproject.toml allows, for `make older-vllm`.

    .venv/bin/python tools/older_vllm.py        into .venv-older-vllm; does nothing if it is complete

It has the packages of requirements/cpu.txt with the versions of requirements/older-vllm.txt, and the torch
that this vLLM pins. If no index has the CPU build of this torch, the CUDA build is installed, which works
on CPU and needs 6 GB of disk.
"""

from setup_env import ROOT, Environment

FOLDER = ROOT / ".venv-older-vllm"
VLLM_VERSION = "0.26.0+cpu"
TORCH = "torch==2.11.0"
OLDER = "requirements/older-vllm.txt"
INPUTS = ("requirements/cpu.txt", OLDER, "tools/setup_env.py", "tools/older_vllm.py")


def main() -> None:
    """Set up, or do nothing."""
    environment = Environment(FOLDER, INPUTS)
    if environment.is_current():
        return
    environment.create()
    environment.pip("--no-deps", "-r", str(ROOT / "requirements" / "cpu.txt"))
    if not environment.install_cpu_torch(f"{TORCH}+cpu"):
        print("no index has this CPU build; installing the CUDA build", flush=True)
        environment.pip(TORCH)  # its metadata pins the versions of CUDA's libraries
    environment.pip("--no-deps", "--require-hashes", "-r", str(ROOT / OLDER))
    environment.name_vllm(VLLM_VERSION)
    environment.repair_torchvision()
    environment.note_current()


if __name__ == "__main__":
    main()
