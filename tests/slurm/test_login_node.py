"""A login node: the wheel and the login lock in an empty environment, without torch; jobs run in another."""

import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs import LOADED, ROOT
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SubmittedRun

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]

Call = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment's folder."""
    folder = tmp_path_factory.mktemp("login")
    source = folder / "source"
    for name in ("yatt", "configs", "slurm", "tools", "requirements"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    venv.create(folder / "venv", with_pip=True)
    pip = [
        str(folder / "venv" / "bin" / "pip"),
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
    ]
    locked = ["--require-hashes", "--only-binary", ":all:", "-r", str(source / "requirements" / "login.txt")]
    for arguments in (locked, [str(source)]):
        done = subprocess.run([*pip, *arguments], capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(source)  # nothing of the checkout is used
    return folder / "venv"


def test_the_environment_has_no_torch_and_the_wheel_its_files(environment: Path, tmp_path: Path) -> None:
    names = "('torch', 'vllm', 'megatron', 'transformers')"
    code = f"import importlib.util as u; print([n for n in {names} if u.find_spec(n)])"
    python = str(environment / "bin" / "python")
    done = subprocess.run(
        [python, "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.strip() == "[]"
    (package,) = environment.glob("lib/python*/site-packages/yatt")
    assert (package / "py.typed").is_file() and (package / "launch" / "diagnose" / "check_fs.py").is_file()
    yatt = str(environment / "bin" / "yatt")
    done = subprocess.run(
        [yatt, "init", "--examples", "mine"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in (
        "configs/quickstart.yaml",
        "configs/sites/example.yaml",
        "slurm/train.sbatch",
        "tools/check_fs.py",
    ):
        assert (tmp_path / "mine" / name).read_bytes() == (ROOT / name).read_bytes()


@pytest.fixture
def run(cluster: Cluster, tmp_path: Path) -> SubmittedRun:
    """A run whose job uses the interpreter of the tests, with this checkout."""
    return SubmittedRun(cluster, tmp_path, python=sys.executable, setup=[f"export PYTHONPATH={ROOT}"])


@pytest.fixture
def call(cluster: Cluster, environment: Path, tmp_path: Path) -> Call:
    """The command as the login node has it; no checkout in its path."""

    def called(*words: str, timeout_s: float = 120) -> "subprocess.CompletedProcess[str]":
        env = {**cluster.env, "XDG_STATE_HOME": str(tmp_path / "state")}
        env.pop("PYTHONPATH", None)
        argv = [str(environment / "bin" / "yatt"), *words]
        return subprocess.run(
            argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=timeout_s * LOADED,
            check=False,
        )  # fmt: skip

    return called


def test_a_run_from_the_login_node(run: SubmittedRun, call: Call, tmp_path: Path) -> None:
    root, given = str(run.paths.root), (str(run.config), "--site", str(run.site))
    checked = call("check", *given)
    assert checked.returncode == 0 and "run.yaml: ok" in checked.stdout, checked.stdout + checked.stderr
    shown = call("submit", *given, "--dry-run")
    assert shown.returncode == 0 and "#SBATCH" in shown.stdout, shown.stderr
    assert sys.executable in shown.stdout and not run.paths.root.exists()
    done = call("submit", *given)
    assert done.returncode == 0, done.stdout + done.stderr
    job_id = done.stdout.split("job ")[1].split()[0]
    assert job_id in call("list").stdout
    run.wait_finished(job_id)
    state = json.loads(call("status", root, "--json").stdout)
    assert state["state"] == "finished" and state["iteration"] == state["total_iterations"]
    watched = call("watch", root)
    assert watched.returncode == 0 and "finished" in watched.stdout
    assert call("report", root, "--out", str(tmp_path / "page.html")).returncode == 0
    assert "<html" in (tmp_path / "page.html").read_text()
    assert "trainer" in call("logs", root).stdout
    assert "changed" not in call("status", root).stdout
    assert call("ckpt", "list", root).returncode == 0
    refused = call("run", str(run.config))
    assert refused.returncode == 2 and "pip install" in refused.stderr
