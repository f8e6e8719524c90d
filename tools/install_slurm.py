"""Installs Slurm and munge for the test cluster, if they are missing.

`make slurm` runs it with the system's Python, so it uses only the standard library. It starts and enables
nothing: the test cluster (`slurm/testcluster/up`) runs its own daemons on its own ports.

    python3 tools/install_slurm.py
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGES = ("slurm-wlm", "slurm-client", "munge")
TEST_PACKAGES = ("libfaketime", "slurmdbd", "slurm-wlm-mysql-plugin", "mariadb-server-core")
"""Packages for some tests, which are skipped without them."""

TEST_COMMANDS = ("slurmdbd", "mariadbd")

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
POLICY = Path("/usr/sbin/policy-rc.d")
SEARCH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
"""PATH with the folders of Debian's daemons, which an ordinary user's PATH does not have."""


def main() -> None:
    """Installs what is missing."""
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
    if not missing():
        install_for_tests()
        return
    if shutil.which("apt-get") is None:
        sys.exit(
            f"Slurm is missing ({', '.join(missing())}) and there is no apt-get here: install slurmctld, "
            "slurmd, Slurm's client commands and munge with this system's package manager."
        )
    if os.geteuid() != 0:
        sys.exit(
            f"Slurm is missing ({', '.join(missing())}): sudo apt-get update && sudo {' '.join(install)}"
        )
    print("installing Slurm and munge (about ten seconds, once)", flush=True)
    with daemons_kept_off():
        if not _run(install):
            _run(["apt-get", "update", "-qq"])
            _run(install)
    if left := missing():
        sys.exit(f"still missing after the installation: {', '.join(left)}")
    install_for_tests()


def install_for_tests() -> None:
    """Installs packages for some tests if possible; another system may not have a package."""
    if missing(TEST_COMMANDS) and shutil.which("apt-get") and os.geteuid() == 0:
        with daemons_kept_off():
            for package in TEST_PACKAGES:
                _run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", package])


def missing(commands: tuple[str, ...] = COMMANDS) -> list[str]:
    """The commands that this machine lacks; the test cluster needs `COMMANDS`."""
    return [name for name in commands if shutil.which(name, path=SEARCH) is None]


@contextmanager
def daemons_kept_off() -> Iterator[None]:
    """Writes `POLICY`, which keeps Debian from starting a daemon when its package is installed. An existing
    file belongs to the administrator and is not changed."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()


def _run(argv: list[str]) -> bool:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(argv, check=False, stdin=subprocess.DEVNULL, env=environment).returncode == 0


if __name__ == "__main__":
    main()
