"""Versions of libraries and of the GPU driver on this machine."""

import contextlib
import re
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

TESTED = {"torch": "2.13.0", "megatron-core": "0.16.1", "vllm": "0.32.0", "transformers": "5.19.0"}
"""Versions with which the tests run. A local part (+cpu, +cu130) is not compared."""


DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Versions on one machine, in one Python environment. Empty text: there is none.

    Attributes:
        packages: by name, those of `TESTED` that are installed.
        cuda: that torch was built for.
        driver: of the GPUs.
    """

    packages: dict[str, str] = field(default_factory=dict)
    cuda: str = ""
    driver: str = ""


def versions_here(driver: Path = DRIVER) -> Installed:
    """Reads the versions of this machine and this Python environment; imports none of the packages."""
    packages, cuda = {}, ""
    for name in TESTED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    with contextlib.suppress(metadata.PackageNotFoundError, OSError):
        written = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text()
        cuda = _found(r"^cuda\b[^=\n]*=\s*'([\d.]+)'", written)
    text = ""
    with contextlib.suppress(OSError):
        text = driver.read_text(errors="replace")
    return Installed(packages=packages, cuda=cuda, driver=_found(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", text))


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1] if match else ""
