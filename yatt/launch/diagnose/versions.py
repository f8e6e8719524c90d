"""Findings about versions: those of the libraries with which yatt's tests run, and the GPU driver's.

Other versions are a warning only: clusters have builds of their own, and yatt states the ranges that it
accepts in pyproject.toml.
"""

import sys
from collections.abc import Iterator

from yatt.config.site import SiteConfig
from yatt.errors import Finding
from yatt.launch.diagnose.records import ok, warn
from yatt.launch.folder.installed_versions import TESTED, Installed, versions_here
from yatt.launch.node.steps import python_of

OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""Oldest driver for any CUDA of a major version. Source: docs.nvidia.com/deploy/cuda-compatibility, "Minor
Version Compatibility", table 1."""


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
        yield from version_findings("versions", versions_here())


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
