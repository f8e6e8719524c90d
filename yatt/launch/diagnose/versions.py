"""Findings about versions: those of the libraries with which yatt's tests run, and the GPU driver's.

Other versions are a warning only: clusters have builds of their own, and yatt states the ranges that it
accepts in pyproject.toml.
"""

import contextlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from yatt.config.site import SiteConfig
from yatt.launch.diagnose.records import Finding, ok, warn
from yatt.launch.steps import python_of

TESTED = {"torch": "2.13.0", "megatron-core": "0.16.1", "vllm": "0.32.0", "transformers": "5.19.0"}
"""Versions with which the tests run. A local part (+cpu, +cu130) is not compared."""

OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""Oldest driver for any CUDA of a major version. Source: docs.nvidia.com/deploy/cuda-compatibility, "Minor
Version Compatibility", table 1."""

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


def installed(driver: Path = DRIVER) -> Installed:
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


def version_findings(about: str, seen: Installed) -> Iterator[Finding]:
    """Compares with the tested versions.

    Args:
        about: what has these versions: `versions` for this machine, or nodes.
    """
    others = [name for name in TESTED if _release(seen.packages.get(name, "")) != TESTED[name]]
    for name in others:
        if name not in seen.packages:
            what = f"{name} is not installed; the tests run with {TESTED[name]}."
            yield warn(about, what, "Install it, or ignore this if the nodes have another environment.")
        else:
            what = f"{name} {seen.packages[name]} is installed; the tests run with {TESTED[name]}."
            yield warn(about, what, "Try a small run first; if it fails, install the tested version.")
    if not others:
        listed = ", ".join(f"{name} {version}" for name, version in seen.packages.items())
        yield ok(about, f"{listed}: the tests run with these.")
    yield from _driver(about, seen)


def findings_here(site: SiteConfig) -> Iterator[Finding]:
    """Findings about this machine, if the nodes use the Python environment of this process."""
    if python_of(site) == sys.executable:
        yield from version_findings("versions", installed())


def _driver(about: str, seen: Installed) -> Iterator[Finding]:
    if not (seen.cuda and seen.driver):
        return
    oldest = OLDEST_DRIVER.get(int(seen.cuda.split(".")[0]), 0)
    if int(seen.driver.split(".")[0]) < oldest:
        what = f"the GPU driver is {seen.driver}; torch is built for CUDA {seen.cuda}, which needs {oldest}."
        cure = "Install a build of torch for an older CUDA. Administrators: update the driver."
        yield warn(about, what, cure)


def _release(version: str) -> str:
    return version.partition("+")[0]


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1] if match else ""
