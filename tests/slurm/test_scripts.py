"""The scripts that people read and adapt: Slurm takes them, and they do what their first lines say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import HANG_S, ROOT, RunFile, command, wait_for
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.slurm
SLURM = ROOT / "slurm"
LINK = """#!/bin/bash
#SBATCH --nodes=1
{second}
echo "start $SLURM_JOB_ID" >>"$1"
srun --overlap {step} sleep 0.3
echo "end $SLURM_JOB_ID" >>"$1"
exit 7
"""


@pytest.mark.parametrize(
    "path", sorted([*SLURM.glob("*.s*"), *(SLURM / "testcluster").iterdir()]), ids=lambda p: p.name
)
def test_bash_can_read_it(path: Path) -> None:
    if path.suffix not in (".in", ".md"):
        subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize("name", ["train.sbatch", "train-het.sbatch"])
def test_slurm_takes_it(cluster: Cluster, name: str) -> None:
    cluster.call("sbatch", "--test-only", str(SLURM / name), "RUN")


@pytest.mark.parametrize("is_het", [False, True])
def test_a_chain_runs_one_link_after_the_other_whatever_their_ends(cluster: Cluster, is_het: bool) -> None:
    script, trace = cluster.root / "link.sh", cluster.root / f"trace-{is_het}"
    second = "#SBATCH hetjob\n#SBATCH --nodes=1" if is_het else ""
    script.write_text(LINK.format(second=second, step="--het-group=0,1 -n2" if is_het else ""))
    out = cluster.call(str(SLURM / "resume-chain.sh"), "3", str(script), str(trace), "--output=/dev/null")
    ids = [int(line) for line in out.splitlines()]
    assert len(ids) == 3
    wait_for(
        lambda: trace.exists() and len(trace.read_text().splitlines()) == 6, timeout_s=60, what="three links"
    )
    assert trace.read_text().split() == [word for i in ids for word in ("start", str(i), "end", str(i))]
    assert {cluster.wait_state(i, "FAILED")["ExitCode"] for i in ids} == {"7:0"}


SETTINGS = {
    "train.sbatch": {"launch": {"nodes": 2}},
    "train-het.sbatch": {"launch": {"nodes": 4}, "placement": {"mode": "disaggregated", "trainer_nodes": 2}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_prepared_run_goes_from_script_to_finish(cluster: Cluster, tmp_path: Path, name: str) -> None:
    run, site = RunFile(tmp_path, SETTINGS[name]), str(ROOT / "configs" / "sites" / "testcluster.yaml")
    env = [
        "env",
        f"PATH={Path(sys.executable).parent}{os.pathsep}{cluster.env['PATH']}",
        f"XDG_STATE_HOME={tmp_path}/state",
    ]
    says = cluster.call(*env, *command("submit", "--site", site, "--prepare", str(run.write())))
    assert re.fullmatch(
        rf"{run.run_dir} is ready; submit it with: sbatch --job-name=yatt-\S+ slurm/{name} {run.run_dir}",
        says,
    )
    log = tmp_path / "job.log"
    job = cluster.call(*env, "sbatch", "--parsable", f"--output={log}", str(SLURM / name), str(run.run_dir))
    over = cluster.wait_state(int(job), "COMPLETED", "FAILED", "CANCELLED", timeout_s=100)
    assert over["JobState"] == "COMPLETED", log.read_text()
    assert (run.run_dir / "finished").exists()


def epilog(cluster: Cluster, folder: Path, job: int, **more: str) -> int:
    variables = {"SLURM_JOB_ID": str(job), "SLURM_JOB_UID": str(os.getuid()), "SLURMD_NODENAME": "n1"}
    env = {**cluster.env, **variables, "YATT_FOLDERS": str(folder), **more}
    return subprocess.run([str(SLURM / "epilog.sh")], env=env, check=False, timeout=HANG_S).returncode


def test_the_epilog_removes_our_folders_and_nothing_else(cluster: Cluster, tmp_path: Path) -> None:
    ours, others = tmp_path / f"yatt-{os.getuid()}-tag-3-0", tmp_path / "yatt-999999-tag-1-0"
    for folder in (ours, others, tmp_path / "data"):
        folder.mkdir()
        (folder / "file").touch()
    assert epilog(cluster, tmp_path, 1) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", others.name]


def test_the_epilog_leaves_the_folders_of_another_job_of_the_user(cluster: Cluster, tmp_path: Path) -> None:
    ours = tmp_path / f"yatt-{os.getuid()}-tag-3-0"
    ours.mkdir()
    job = cluster.sbatch("#!/bin/bash\nsleep 100\n", "--nodelist=n1")
    cluster.wait_state(job, "RUNNING")
    assert epilog(cluster, tmp_path, job + 1000) == 0
    assert ours.is_dir()
    assert epilog(cluster, tmp_path, job) == 0
    assert not ours.exists()


def test_the_epilog_touches_nothing_when_slurm_does_not_answer(cluster: Cluster, tmp_path: Path) -> None:
    ours = tmp_path / f"yatt-{os.getuid()}-tag-3-0"
    ours.mkdir()
    path = program(tmp_path, "squeue", "exit 1")
    assert epilog(cluster, tmp_path, 1, PATH=f"{path}{os.pathsep}{cluster.env['PATH']}") == 0
    assert ours.is_dir()


def test_the_epilog_drains_a_node_whose_gpu_is_still_held(cluster: Cluster, tmp_path: Path) -> None:
    path = program(tmp_path, "nvidia-smi", f"echo {os.getpid()}")
    assert epilog(cluster, tmp_path, 1, PATH=f"{path}{os.pathsep}{cluster.env['PATH']}") == 1


def program(folder: Path, name: str, line: str) -> Path:
    """A folder for the PATH in which `name` does `line`."""
    tool = folder / "bin" / name
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{line}\n")
    tool.chmod(0o755)
    return tool.parent
