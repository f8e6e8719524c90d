"""The environment on a node's disk: used if it is the same one and works, else the original."""

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.small_environments import make_environment, pack, packages_of
from yatt.config.site import SiteConfig, StageSection, load_site
from yatt.errors import ConfigError
from yatt.launch.node import staging as staging_module
from yatt.launch.node.staging import Staging, fault_of


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that this process seems to run in, packed as `env.tar`."""
    python = make_environment(tmp_path / "venv")
    pack(tmp_path / "venv", tmp_path / "env.tar")
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setattr(sys, "executable", str(python))
    return tmp_path / "venv"


def python_on_node(folder: Path, said: list[str], **more: object) -> str:
    section = {"folder": str(folder / "disk"), "environment": str(folder / "env.tar"), "keep_h": 0, **more}
    staging = Staging(StageSection(**section), os.environ, said.append, lambda: False, _python=sys.executable)
    return staging.local_python()


@pytest.mark.usefixtures("environment")
def test_processes_start_from_the_copy_of_the_environment(tmp_path: Path) -> None:
    said: list[str] = []
    python = python_on_node(tmp_path, said)
    assert python.startswith(str(tmp_path / "disk")) and not said
    code = "import own, sys; print(own.__file__)"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.startswith(str(tmp_path / "disk"))


def test_an_archive_may_have_the_environments_folder(environment: Path, tmp_path: Path) -> None:
    subprocess.run(["tar", "-cf", tmp_path / "env.tar", "-C", tmp_path, environment.name], check=True)
    assert python_on_node(tmp_path, []).startswith(str(tmp_path / "disk"))


def installed_again(environment: Path) -> None:
    os.utime(packages_of(environment) / "own-1.0.dist-info" / "RECORD", (1, 1))


def newer_installed(environment: Path) -> None:
    info = packages_of(environment) / "own-1.0.dist-info"
    info.rename(info.with_name("own-2.0.dist-info"))


def broken_packed(environment: Path) -> None:
    (packages_of(environment) / "others.pth").unlink()
    pack(environment, environment.parent / "env.tar")


def other_packed(environment: Path) -> None:
    pack(environment / "lib", environment.parent / "env.tar")


def no_python_packed(environment: Path) -> None:
    (environment / "bin" / Path(sys.executable).name).rename(environment / "bin" / "gone")
    pack(environment, environment.parent / "env.tar")


def cut(environment: Path) -> None:
    os.truncate(environment.parent / "env.tar", 3000)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (installed_again, r"made of another state of \S+/venv \(own-1.0.dist-info\); make it again"),
        (newer_installed, r"\(own-1.0.dist-info, own-2.0.dist-info\); make it again"),
        (broken_packed, r"its python3? does not work: ModuleNotFoundError: No module named 'yatt'"),
        (other_packed, "the archive has no pyvenv.cfg at its root or in a folder there"),
        (no_python_packed, "cannot be run: .*No such file"),
        (cut, "it is not a whole tar archive"),
        (lambda environment: (environment.parent / "env.tar").unlink(), "No such file or directory"),
    ],
)
def test_another_environment_is_not_used(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None], why: str,
) -> None:  # fmt: skip
    monkeypatch.delenv("PYTHONPATH")  # by which tests find yatt
    change(environment)
    said: list[str] = []
    assert python_on_node(tmp_path, said) == sys.executable
    (line,) = said
    assert line.startswith(f"the environment {environment} is not used from stage.environment, ")
    assert re.search(why, line), line


@pytest.mark.usefixtures("environment")
def test_what_is_no_virtual_environment_is_not_unpacked_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    said: list[str] = []
    assert python_on_node(tmp_path, said) == sys.executable
    assert "is not a virtual environment" in said[0] and not list((tmp_path / "disk").glob("*/*/*"))


@pytest.mark.usefixtures("environment")
def test_the_environment_and_the_models_have_one_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    now_s = itertools.chain([0.0, 0.0], itertools.repeat(11.0))  # asked as often as a slow disk takes
    stage = StageSection(folder=str(tmp_path / "disk"), environment=str(tmp_path / "env.tar"), limit_s=10)
    said: list[str] = []
    staging = Staging(stage, os.environ, said.append, lambda: False)
    assert staging.local_python() != sys.executable
    assert staging._until_s is not None
    monkeypatch.setattr(staging_module.clock, "monotonic_s", lambda: staging._until_s + next(now_s))
    assert staging.run([str(tmp_path / "model")]) == {}
    assert "was not copied within 10 s" in said[0]


def test_a_site_file_says_where_the_archive_is(tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    for text, why in (
        ("stage: {environment: /x.tar}", "write a folder"),
        ("stage: {environment: x.tar, folder: /local}", "is relative"),
        (
            "stage: {environment: /x.tar, folder: /local}\ncontainer: {runtime: apptainer, image: /i.sif}",
            "is for nodes without a container",
        ),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=why):
            load_site(file)
    stage = SiteConfig(stage=StageSection(folder=str(tmp_path), environment="/nowhere/x.tar")).stage
    assert fault_of(stage, {}) == "stage.environment /nowhere/x.tar cannot be read"
