"""`yatt diagnose` on a cluster with an accounting database: what a job of this user would wait for."""

import getpass
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SubmittedRun
from tests.slurm.test_forms import SEARCH

pytestmark = pytest.mark.slurm


@pytest.fixture
def counted() -> Iterator[Cluster]:
    if shutil.which("slurmdbd", path=SEARCH) is None:
        pytest.skip("no slurmdbd: make slurm as root installs it")
    made = Cluster(NODES=4, ACCOUNTS=1)
    try:
        yield made.up()
    finally:
        made.down()


def test_limits_that_a_run_cannot_meet_are_said_and_are_slurms(counted: Cluster, tmp_path: Path) -> None:
    """No whole run, but a cluster with a database: sacctmgr's words, and Slurm's order of limits."""
    limits = ("MaxJobsPerUser=1", "MaxTRESPerJob=node=1", "MaxWall=01:00:00")
    counted.call("sacctmgr", "-iQ", "add", "qos", "small", "set", *limits)
    counted.call("sacctmgr", "-iQ", "modify", "user", getpass.getuser(), "set", "qos+=small")

    def said(**site: object) -> list[tuple[str, str]]:
        run = SubmittedRun(counted, tmp_path / str(len(site)), account="physics", **site)
        done = run.yatt("diagnose", "--site", str(run.site), str(run.config), "--json")
        found = json.loads(done.stdout)["findings"]
        return [(f["level"], f["says"]) for f in found if f["key"] == "limits"]

    fine = "no limit of this account and QOS is below the run (group limits were not looked at)."
    assert said() == [("ok", fine)]
    assert said(qos="small", time_limit_min=90) == [
        ("warn", "QOS 'small' (MaxJobsPU) allows a user 1 jobs running; the run's job counts as 2."),
        ("warn", "QOS 'small' (MaxTRES) allows 1 nodes; trainer of the run need 2."),
        ("warn", "QOS 'small' (MaxTRES) allows 1 nodes; engines of the run need 2."),
        ("warn", "time_limit_min is 90, more than QOS 'small' (MaxWall) allows (01:00:00)."),
    ]
    me = getpass.getuser()
    counted.call("sacctmgr", "-iQ", "modify", "user", me, "set", "MaxWall=00:30:00", "MaxTRESPerJob=node=2")
    account = "more than account 'physics' (MaxWall) allows (00:30:00)"
    assert [what for _, what in said(time_limit_min=45)] == [f"time_limit_min is 45, {account}."]
    assert len(said(qos="small", time_limit_min=45)) == 3, "the QOS's hour counts, and Slurm agrees:"
    tried = counted.sbatch("#!/bin/bash\ntrue\n", "--account=physics", "--qos=small", "--time=45")
    counted.wait_state(tried, "COMPLETED")
    job = counted.sbatch("#!/bin/bash\ntrue\n", "--account=physics", "--qos=small", "--nodes=2")

    def reason() -> str:
        return next((row["reason"] for row in counted.squeue() if row["reason"].startswith("QOS")), "")

    assert wait_for(reason, what=f"job {job} to wait for its QOS") == "QOSMaxNodePerJobLimit"
