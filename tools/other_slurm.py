"""Unpacks a newer Slurm for the tests, without installing it: the packages of the next Debian.

    python tools/other_slurm.py        into .venv/slurm-trixie; does nothing if that exists

apt fetches the packages with all libraries that they need, and verifies them with Debian's keys. Nothing is
installed, and root is not needed. patchelf makes the programs use these libraries and their own loader. If
the packages are not available, it prints a message, and the tests that need them are skipped.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUITE = "trixie"
PACKAGES = ("slurmctld", "slurmd", "slurm-client")
PROGRAMS = {
    "usr/sbin": ("slurmctld-wlm", "slurmd-wlm", "slurmstepd-wlm"),
    "usr/bin": ("sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo"),
}
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
LIMIT_S = 300.0


def place() -> Path:
    """Folder of the newer Slurm."""
    return Path(sys.prefix) / f"slurm-{SUITE}"


def main() -> None:
    """Fetches, unpacks and patches. An error is only printed."""
    if place().exists():
        return
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None or not Path(KEYS).exists():
        print(f"no newer Slurm for the tests: this is no Debian ({KEYS})", flush=True)
        return
    new = place().with_suffix(".new")
    shutil.rmtree(new, ignore_errors=True)
    try:
        fetch(new)
        unpack(new)
        new.rename(place())
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        print(f"no newer Slurm for the tests: {said.strip().splitlines()[-1]}", flush=True)
        shutil.rmtree(new, ignore_errors=True)


def fetch(new: Path) -> None:
    """Fetches all packages as files, as apt would install them on an empty machine."""
    for folder in ("lists/partial", "cache/archives/partial", "etc", "bin", "root"):
        (new / folder).mkdir(parents=True)
    (new / "status").touch()
    (new / "etc" / "sources.list").write_text(
        f"deb [signed-by={KEYS}] http://deb.debian.org/debian {SUITE} main\n"
    )
    settings = {
        "Dir::State": new, "Dir::State::lists": new / "lists", "Dir::State::status": new / "status",
        "Dir::Cache": new / "cache", "Dir::Etc::sourcelist": new / "etc" / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null", "APT::Install-Recommends": "false", "Debug::NoLocking": "true",
        "APT::Sandbox::User": "",
    }  # fmt: skip
    options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    call("apt-get", *options, "update", "-qq")
    call("apt-get", *options, "install", "-y", "-qq", "--download-only", *PACKAGES)


def unpack(new: Path) -> None:
    """Unpacks the packages and patches the programs to use the loader and libraries from them."""
    for package in sorted((new / "cache" / "archives").glob("*.deb")):
        call("dpkg-deb", "-x", str(package), str(new / "root"))
    for name in ("cache", "lists"):
        shutil.rmtree(new / name)
    final = place() / "root" / "usr"
    libraries = final / "lib" / "x86_64-linux-gnu"
    patch = [str(Path(sys.executable).parent / "patchelf"), "--force-rpath"]
    patch += ["--set-interpreter", str(final / "lib64" / "ld-linux-x86-64.so.2")]
    patch += ["--set-rpath", f"{libraries}:{libraries / 'slurm-wlm'}"]
    for folder, names in PROGRAMS.items():
        for name in names:
            program = new / "bin" / name.removesuffix("-wlm")
            shutil.copy(new / "root" / folder / name, program)
            call(*patch, str(program))
    (new / "plugins").symlink_to(libraries / "slurm-wlm")


def call(*argv: str) -> None:
    """Runs one command without showing its output.

    Raises:
        SubprocessError: it failed; its error output is in `stderr`.
    """
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(
        argv,
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment,
        timeout=LIMIT_S,
    )


if __name__ == "__main__":
    main()
