"""`yatt diagnose` and `tools/check_fs.py` on the real cluster."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import HANG_S, ROOT, command, run_to_end
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.slurm
SITE = str(ROOT / "configs" / "sites" / "testcluster.yaml")


def diagnose(cluster: Cluster, *arguments: str) -> "subprocess.CompletedProcess[str]":
    argv = command("diagnose", "--site", SITE, *arguments)
    return run_to_end(argv, env=cluster.env, timeout_s=HANG_S)


def test_the_test_cluster_is_fit_for_a_run_but_kills_soon(cluster: Cluster) -> None:
    done = diagnose(cluster, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["worst"]) == (0, "warn"), found
    assert [f["key"] for f in found["findings"] if f["level"] == "warn"] == ["kill"], found


def test_a_run_that_does_not_fit_is_refused(cluster: Cluster) -> None:
    run = str(ROOT / "configs" / "quickstart.yaml")
    done = diagnose(cluster, run, "launch.nodes=6", "launch.gpus_per_node=5", "launch.device=auto")
    assert done.returncode == 2
    assert "6 nodes with 5 GPUs are needed; 0 of 5 have that" in done.stdout
    assert "6 nodes are needed in partition low, which has 5" in done.stdout


def test_a_controller_that_is_down_is_said(cluster: Cluster) -> None:
    cluster.ctld("stop")
    done = diagnose(cluster)
    assert done.returncode == 2
    assert "the controller does not answer" in done.stdout


def test_real_nodes_are_tried(cluster: Cluster, tmp_path: Path) -> None:
    run = [str(ROOT / "configs" / "quickstart.yaml"), f"run.dir={tmp_path}/run", "launch.device=auto"]
    done = diagnose(cluster, *run, "launch.gpus_per_node=2", "--nodes", "3")
    assert done.returncode == 0, done.stdout
    assert "n1, n2, n3: 2 GPUs each; all nodes reach each other." in done.stdout
    assert "between nodes" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_network_interface_that_nodes_lack_is_said_of_each(cluster: Cluster, tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("interface: ib7\nsignal_lead_s: 10\n")
    argv = command("diagnose", "--site", str(site), "--nodes", "2")
    done = run_to_end(argv, env=cluster.env, cwd=tmp_path, timeout_s=HANG_S)
    assert done.returncode == 2
    assert "fail n1: site interface: 'ib7' has no address" in done.stdout
    assert "fail n2: site interface: 'ib7' has no address" in done.stdout


def test_nodes_try_a_folder_among_each_other(cluster: Cluster) -> None:
    tool = str(ROOT / "tools" / "check_fs.py")
    folder = cluster.root / "shared"
    folder.mkdir()
    says = cluster.call("srun", "-N3", "--ntasks-per-node=1", sys.executable, tool, str(folder))
    assert "processes, nodes                3, 3" in says
    assert "exclusive creates and renames work; 3 node(s)" in says
    assert list(folder.iterdir()) == []
