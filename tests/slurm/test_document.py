"""Every command of docs/slurm.md, in its order, on a real cluster: what the document says can be typed."""

import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.runs import LOADED, ROOT, command, run_to_end, wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SLOW_REWARD, SubmittedRun
from tests.small_environments import make_environment

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1500)]
USERS = ("yatt", "scancel")


def commands() -> list[str]:
    """Lines of the blocks that have no language, without their comments."""
    text = (ROOT / "docs" / "slurm.md").read_text()
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    blocks = [block for language, block in fenced if not language]
    lines = [re.split(r"\s+# ", line)[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def carried_out(line: str, cluster: Cluster, folder: Path, **words: str) -> str:
    """Run a line as it stands, but for words of the document's own; gives what it printed."""
    argv = [words.get(word, word) for word in shlex.split(line)]
    argv = command(*argv[1:]) if argv[0] == "yatt" else argv
    env = {**cluster.env, "XDG_STATE_HOME": str(folder / "state")}
    done = run_to_end(argv, env=env, cwd=folder, timeout_s=180 * LOADED, typed="exit\n")
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_all_commands_are_of_a_kind_that_is_run_here() -> None:
    kinds = {line.split()[0].removeprefix("slurm/").partition("/")[0] for line in commands()}
    assert kinds == {*USERS, "srun", "tar", "make", "testcluster", "."}


def test_the_commands_for_users(cluster: Cluster, tmp_path: Path) -> None:
    run = SubmittedRun(cluster, tmp_path, {"run": {"dir": str(tmp_path / "runs" / "a")}}, reward=SLOW_REWARD)
    shutil.copy(run.site, tmp_path / "mysite.yaml")
    config = yaml.safe_load(run.config.read_text())
    config["run"]["dir"] = str(tmp_path / "runs" / "b")
    (tmp_path / "next.yaml").write_text(yaml.safe_dump(config))

    def is_gone() -> bool:
        return cluster.squeue() == []

    before: dict[str, Callable[[], object]] = {
        "yatt logs": lambda: run.wait_step(1),
        "scancel": lambda: run.wait_step(2),
        "yatt cancel runs/a": lambda: run.wait_attempts(2),
        "yatt resume": lambda: wait_for(is_gone, timeout_s=60, what="the job to be gone"),
        "yatt cancel --now": lambda: run.wait_attempts(3),
    }
    printed = {}
    for line in (line for line in commands() if line.startswith(USERS)):
        for start, wait in before.items():
            if line.startswith(start):
                wait()
        printed[line] = carried_out(line, cluster, tmp_path, **{"4711": run.job_id, "nvidia-smi": "hostname"})
    said = "\n".join(printed.values())
    for text in ("submitted job", "#SBATCH", "iteration", "report.html"):
        assert text in said
    assert len(list((tmp_path / "runs" / "lr").iterdir())) == 4
    assert "-sweep" not in said
    listed = re.findall(r"^(\d+) +([A-Z]+) .* runs/lr/", printed["yatt list runs/lr"], re.MULTILINE)
    assert len({job for job, _ in listed}) == 4
    assert {state for _, state in listed} <= {"PENDING", "RUNNING", "COMPLETING", "COMPLETED"}


def test_the_filesystem_check(cluster: Cluster, tmp_path: Path) -> None:
    (line,) = [line for line in commands() if line.startswith("srun")]
    words = {
        "python": sys.executable,
        "FOLDER": str(tmp_path),
        "tools/check_fs.py": f"{ROOT}/tools/check_fs.py",
    }
    carried_out(line, cluster, tmp_path, **words)


def test_the_environment_is_packed(cluster: Cluster, tmp_path: Path) -> None:
    """What is unpacked from it is tried in `tests/slurm/test_local_disks.py`."""
    (line,) = [line for line in commands() if line.startswith("tar")]
    make_environment(tmp_path / "yatt")
    carried_out(line.replace("/shared/envs", str(tmp_path)), cluster, tmp_path)
    with tarfile.open(tmp_path / "yatt.tar") as archive:
        assert "./pyvenv.cfg" in archive.getnames()


@pytest.fixture
def place() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="yd", dir="/tmp"))
    yield folder
    subprocess.run([ROOT / "slurm/testcluster/down", folder, "--wipe"], capture_output=True, check=False)
    shutil.rmtree(folder, ignore_errors=True)


def test_the_commands_of_the_test_cluster(cluster: Cluster, place: Path) -> None:
    lines = [line for line in commands() if line.startswith(("make", "slurm/", ". "))]
    assert len(lines) == 7
    for line in lines:
        if line.startswith("make"):
            subprocess.run(["make", "-n", line.split()[1]], cwd=ROOT, capture_output=True, check=True)
            continue
        if line.startswith("slurm/testcluster/reset"):
            carried_out(f"{ROOT}/slurm/testcluster/ctld {place} start", cluster, ROOT)
        if line.startswith(". "):
            line = f"bash -c '{line} && sinfo -h'"
        carried_out(line.replace("/tmp/yc", str(place)), cluster, ROOT)
