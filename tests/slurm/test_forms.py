"""Clusters of other forms: the same life of a run on each, bit-equal at its end.

Looked at, submitted, preempted, a trainer node lost, cancelled, resumed. One form a day here, all of them in
`make soak` (`YATT_FORMS=all`).
"""

import html
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SLOW_REWARD, SubmittedRun, ends
from tests.slurm.test_containers import stand_in
from tests.slurm.test_lost_machines import hosts
from tools.install_slurm import SEARCH
from tools.other_slurm import place
from yatt.adapters.run_folder.ledger import started_attempts

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(1600)]

REWRITES = """
function slurm_job_submit(job, partitions, uid)
   if job.account == "physics" then
      job.partition = "low"
      job.comment = "rewritten"
   end
   return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
   return slurm.SUCCESS
end
"""
FORBIDS = REWRITES.replace('job.account == "physics"', "job.requeue == 1").replace(
    'job.partition = "low"', "job.requeue = 0"
)
BOUND = {"cpus_per_node": 2, "exclusive": True}
NO_ENVIRONMENT = ["export SLURM_EXPORT_ENV=NONE", "export SBATCH_EXPORT=NONE"]


@dataclass(frozen=True)
class Form:
    """`settings` are the cluster's, `plugin` rewrites jobs, `site` is laid over the site file."""

    settings: dict[str, object] = field(default_factory=dict)
    site: dict[str, Any] = field(default_factory=dict)
    plugin: str = ""
    in_container: bool = False


FORMS = {
    "a centre: accounts, typed GPUs, a plugin that rewrites jobs": Form(
        {"ACCOUNTS": 1, "GPUTYPE": "a100"},
        {"account": "physics", "gpu_type": "a100", "partition": "high"},
        plugin=REWRITES,
    ),
    "no steps over components, GPUs by gres, bound to cores": Form(
        {"NOHET": 1, "CPUS": 2, "BIND": "cores"}, {"gpus_directive": "gres", **BOUND}
    ),
    "bound by themselves": Form({"CPUS": 2, "BIND": "autobind=cores"}, BOUND),
    "nothing is requeued": Form(plugin=FORBIDS),
    "no environment for steps": Form(site={"setup": NO_ENVIRONMENT}),
    "no scontrol in steps": Form(in_container=True),
    "a newer Slurm": Form({"OTHER": place()}),
}
TODAYS = "today's"
"""Another one each day; test_newer has more of a newer Slurm."""


@pytest.fixture(params=list(FORMS) if os.environ.get("YATT_FORMS") == "all" else [TODAYS])
def form(request: pytest.FixtureRequest) -> Form:
    name = str(request.param)
    if name == TODAYS:
        name = list(FORMS)[datetime.now(UTC).toordinal() % (len(FORMS) - 1)]
        print(f"the form of this day: {name}")  # noqa: T201 (shown if the test fails)
    found = FORMS[name]
    if "ACCOUNTS" in found.settings and shutil.which("slurmdbd", path=SEARCH) is None:
        pytest.skip("no slurmdbd: make slurm as root installs it")
    if "OTHER" in found.settings and not place().exists():
        pytest.skip("no newer Slurm: tools/other_slurm.py says why")
    return found


@pytest.fixture
def formed(form: Form, tmp_path: Path) -> Iterator[Cluster]:
    settings = {**form.settings}
    if form.plugin:
        (tmp_path / "job_submit.lua").write_text(form.plugin)
        settings["JOBSUBMIT"] = tmp_path / "job_submit.lua"
    made = Cluster(NODES=5, GRACE=10, KILLWAIT=5, SLURMD_TIMEOUT=20, **settings)
    try:
        yield made.up()
    finally:
        made.down()


def test_a_run_lives_its_life(formed: Cluster, form: Form, real_reference, tmp_path: Path) -> None:
    site = {"container": stand_in(tmp_path), "python": sys.executable} if form.in_container else form.site
    # For GPUs; where there is no driver they are slots. With the real trainer, as in no other test here.
    asks = {"launch": {"device": "auto"}, "model": {"trainer": "megatron"}}
    run = SubmittedRun(formed, tmp_path / "run", asks, reward=SLOW_REWARD, **site)
    said = run.yatt("diagnose", "--site", str(run.site), str(run.config), "--nodes", "2", "--json")
    found = json.loads(said.stdout)["findings"]
    wrong = [f for f in found if f["level"] == "fail" and "scontrol" not in f["says"]]
    assert wrong == [], found
    first = run.submit()
    run.wait_step(2)
    job = formed.show_job(int(first))
    asked = job["TresPerNode"].replace("gres/", "gres:")  # as newer versions write it
    assert asked.startswith(f"gres:gpu:{form.site.get('gpu_type', '')}"), job
    assert job["Requeue"] == ("0" if form.plugin == FORBIDS else "1")
    if form.plugin == REWRITES:
        assert (job["Partition"], job["Comment"]) == ("low", "rewritten")
    formed.sbatch("#!/bin/bash\nsleep 3\n", "--partition=high", "--nodes=3", "--exclusive")
    run.wait_attempts(2)
    run.wait_step(5)
    formed.crash(hosts(run)[1])
    run.wait_attempts(3, timeout_s=150)
    run.wait_step(7)
    done = run.yatt("cancel", str(run.paths.root))
    assert done.returncode == 0, done.stderr
    cancelled = run.job_id
    run.hurry()
    done = run.yatt("resume", str(run.paths.root))
    assert done.returncode == 0, done.stderr
    assert run.job_id != cancelled
    run.wait_finished(run.job_id)
    starts = [(each.started["job"], each.started["restarts"]) for each in started_attempts(run.paths)]
    assert len(set(starts)) == 4, f"one for each event: {starts}"
    assert ends(run.paths)[0][1] == "preempted"
    assert "cancelled by its user" in [why for _, why in ends(run.paths)]
    if "BIND" in form.settings:
        assert {event["cpus"] for event in run.events("worker.start")} == {"0-1"}
    if "ACCOUNTS" in form.settings:
        done = run.yatt("report", str(run.paths.root))
        assert done.returncode == 0, done.stderr
        assert "GPU hours in Slurm's accounting" in html.unescape(run.paths.report.read_text())
    run.check(real_reference)
