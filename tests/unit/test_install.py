"""The install page, the locks and the container files: they belong together."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from yatt.launch.diagnose.versions import OLDEST_DRIVER
from yatt.launch.folder.installed_versions import TESTED

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "install.md").read_text()
INSTALL = "pip install --no-cache-dir --no-deps --require-hashes --only-binary :all: -r requirements/cuda.txt"


def pinned(name):
    text = (ROOT / "requirements" / name).read_text()
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


def test_files_of_the_package_that_are_no_modules_are_installed_with_it():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "yatt"
    ]
    package = ROOT / "yatt"
    found = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    others = {path for path in found if path.suffix not in (".py", ".pyc")}
    left_out = [path for path in others if not any(path.match(pattern) for pattern in wanted)]
    assert Path("obs/page/templates/style.css") in others and left_out == []


def test_the_locks_belong_to_the_project_and_to_the_tested_versions():
    done = subprocess.run(
        [sys.executable, "tools/lock.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_lock_of_other_requirements_is_noticed(tmp_path):
    for folder in ("tools", "requirements"):
        (tmp_path / folder).mkdir()
    for name in ("tools/lock.py", *(f"requirements/{p.name}" for p in (ROOT / "requirements").iterdir())):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    project = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(project.replace('"pyzmq>=26"', '"pyzmq>=27"'))
    argv = [sys.executable, str(tmp_path / "tools" / "lock.py"), "--check"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "is not current: run python tools/lock.py" in done.stderr


@pytest.mark.parametrize("name", ["cuda.txt", "login.txt"])
def test_every_package_of_a_lock_has_hashes(name):
    entries = (ROOT / "requirements" / name).read_text().split("\n", 1)[1].split("\n\n")
    packages = re.findall(
        r"^[\w.-]+==\S+ \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n?)+", "\n".join(entries), re.M
    )
    assert len(packages) == len(pinned(name)) > 30


def test_the_login_lock_has_no_library_of_training_or_engines():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[\[=><]", wanted)[0] for wanted in project["dependencies"]}
    locked = pinned("login.txt").keys()
    assert names <= locked
    assert not locked & {"torch", "vllm", "megatron-core", "transformers", "triton"}


def test_the_cuda_lock_and_the_page_have_the_tested_versions():
    locked = pinned("cuda.txt")
    for package, version in TESTED.items():
        assert locked[package] == version
        assert f"| {package} | {version} |" in PAGE
    assert (
        locked["nvidia-cuda-runtime"].startswith("13.0.") and "| CUDA (libraries in wheels) | 13.0 |" in PAGE
    )
    assert f"({OLDEST_DRIVER[13]} or newer)" in PAGE


@pytest.mark.parametrize("name", ["Dockerfile", "yatt.def"])
def test_a_container_file_copies_what_exists_and_installs_by_hash(name):
    text = (ROOT / "containers" / name).read_text()
    if name == "Dockerfile":
        copied = [word for line in re.findall(r"^COPY (.+)$", text, re.M) for word in line.split()[:-1]]
    else:
        files = re.search(r"^%files\n(.*?)^%", text, re.M | re.S)
        copied = [line.split()[0] for line in files[1].splitlines() if line.strip()]
        targets = [line.split()[1] for line in files[1].splitlines() if line.strip()]
        assert targets == [f"/opt/yatt/{source}" for source in copied]
    assert copied and all((ROOT / source).exists() for source in copied)
    assert INSTALL in text and "pip install --no-cache-dir --no-deps ." in text
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    needed = {pattern.split("/")[0] for patterns in data.values() for pattern in patterns} | {"yatt"}
    assert needed <= {source.split("/")[0] for source in copied}, "the wheel is built from them"
    assert "FROM python:3.11" in text or "From: python:3.11" in text


def test_the_commands_of_the_page_install_by_hash():
    commands = [line for block in re.findall(r"```\n(.*?)```", PAGE, re.S) for line in block.splitlines()]
    locked = [shlex.split(line) for line in commands if "-r requirements/" in line]
    assert len(locked) == 2
    for words in locked:
        assert {"--no-deps", "--require-hashes", "--only-binary"} <= set(words)
        assert (ROOT / words[-1]).exists()


IMPORTED_AS = {
    "pyyaml": "yaml", "pyzmq": "zmq", "megatron-core": "megatron", "nvidia-ml-py": "pynvml",
    "mlflow-skinny": "mlflow", "pillow": "PIL",
    "psutil": "", "torchvision": "",  # megatron-core and transformers import them, and do not require them
}  # fmt: skip


def test_what_the_project_requires_it_imports():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: wanted for name, wanted in project["optional-dependencies"].items() if name != "dev"}
    wanted = {re.match(r"[\w-]+", each)[0] for each in sum(extras.values(), project["dependencies"])}
    texts = "\n".join(path.read_text() for path in (ROOT / "yatt").rglob("*.py"))
    names = {name: IMPORTED_AS.get(name, name) for name in wanted}
    assert len(names) > 15 and names.keys() >= IMPORTED_AS.keys()
    patterns = {
        name: rf"(import|from) {imported}\b|\"{imported}\"" for name, imported in names.items() if imported
    }
    assert [name for name, pattern in patterns.items() if not re.search(pattern, texts)] == []
