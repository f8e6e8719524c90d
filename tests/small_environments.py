"""Virtual environments of a few files that find all packages of this one."""

import subprocess
import sys
import sysconfig
from pathlib import Path


def make_environment(folder: Path) -> Path:
    """Makes one with a package of its own, `own`; returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = packages_of(folder)
    here = sysconfig.get_path("purelib")
    (packages / "others.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    (packages / "own.py").write_text("VALUE = 1\n")
    (packages / "own-1.0.dist-info").mkdir()
    (packages / "own-1.0.dist-info" / "RECORD").write_text("own.py,,\n")
    return folder / "bin" / Path(sys.executable).name


def packages_of(folder: Path) -> Path:
    """Returns the folder of its packages."""
    return folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def pack(environment: Path, archive: Path) -> Path:
    """Makes the archive by the command of docs/slurm.md."""
    subprocess.run(["tar", "-cf", archive, "-C", environment, "."], check=True)
    return archive
