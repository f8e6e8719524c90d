"""The Python environment on a node's local disk: unpacked from an archive, compared, and tried before use.

An environment with torch and vLLM has about 80,000 files, and each worker opens thousands of them when it
starts; from a shared filesystem, hundreds of nodes together open millions.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

TRIAL_S = 60.0
"""Time limit of the process that tries the unpacked environment."""

_TRIAL = "import sys, yatt.control.__main__; print(sys.prefix)"


class UnusableEnvironment(Exception):
    """The unpacked environment is not the one that this process runs in."""


def refuse_other_environments() -> None:
    """Raises UnusableEnvironment unless this process runs in a virtual environment, which can be moved."""
    if sys.prefix == sys.base_prefix:
        raise UnusableEnvironment(f"{sys.prefix} is not a virtual environment")


def python_of_copy(copy: Path, env: Mapping[str, str]) -> str:
    """Returns the interpreter of an unpacked copy of this process's environment.

    Raises:
        UnusableEnvironment: the copy has other packages, or its interpreter does not start there.
        OSError: a folder cannot be read.
    """
    original, root = Path(sys.prefix), _root_of(copy)
    here, there = _packages(original), _packages(root)
    if here != there:
        names = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
        raise UnusableEnvironment(
            f"the archive was made of another state of {original} ({', '.join(names[:3])}"
            f"{f' and {len(names) - 3} more' if len(names) > 3 else ''}); make it again"
        )
    python = root / "bin" / Path(sys.executable).name
    try:
        done = subprocess.run(
            [python, "-P", "-c", _TRIAL], env=dict(env), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=TRIAL_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnusableEnvironment(f"its {python.name} cannot be run: {error}") from error
    if done.returncode or done.stdout.strip() != os.path.abspath(root):
        last = (done.stderr.strip().splitlines() or [f"it belongs to {done.stdout.strip()}"])[-1]
        raise UnusableEnvironment(f"its {python.name} does not work: {last}")
    return str(python)


def _root_of(copy: Path) -> Path:
    """Returns the environment's folder: the archive's own root, or its only folder.

    Raises:
        UnusableEnvironment: it is neither.
        OSError: the copy cannot be read.
    """
    for folder in (
        copy,
        *(path for path in sorted(copy.iterdir()) if path.is_dir() and not path.is_symlink()),
    ):
        if (folder / "pyvenv.cfg").is_file():
            return folder
    raise UnusableEnvironment("the archive has no pyvenv.cfg at its root or in a folder there")


def _packages(prefix: Path) -> dict[str, int]:
    """Returns when each package was installed, in seconds since 1970, by the name of its folder."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return {
        record.parent.name: int(record.stat().st_mtime)
        for record in (prefix / "lib" / version / "site-packages").glob("*.dist-info/RECORD")
    }
