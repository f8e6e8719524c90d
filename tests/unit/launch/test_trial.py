"""What is asked of Slurm for a trial, and what is made of what real nodes said."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.launch.test_findings import TRAINER, report, site
from yatt.adapters.files.shared_folder import Spread
from yatt.launch.diagnose.probe import NodeFacts
from yatt.launch.diagnose.trial import Trial
from yatt.launch.diagnose.trial_findings import trial_findings
from yatt.launch.resolve.asking import as_arguments, component_options

GOOD = NodeFacts(
    node="n1", python="3.11.2", gpus=4, cpus=16, granted=16, address="10.0.0.1", unreached=(),
    missing_commands=(), locked_memory_bytes=-1,
)  # fmt: skip
BOTH = Trial(facts=(GOOD, replace(GOOD, node="n2")), report=report())


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("", "--nodes=2 --ntasks-per-node=1 --gpus-per-node=4"),
        ("gpu_type: h100", "--nodes=2 --ntasks-per-node=1 --gpus-per-node=h100:4"),
        ("gpus_directive: gres\ngpu_type: a", "--nodes=2 --ntasks-per-node=1 --gres=gpu:a:4"),
        ("gpus_directive: none", "--nodes=2 --ntasks-per-node=1"),
        ("exclusive: true", "--nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --mem=0 --exclusive"),
        (
            "exclusive: true\nsbatch_args: {mem-per-cpu: 4G}",
            "--nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --exclusive",
        ),
        ("mem_gb: 64", "--nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --mem=64G"),
        (
            "account: a\npartition: p\nqos: q\nconstraint: c\ncpus_per_node: 8\n"
            "components: {trainer: {nodelist: 'n[1-2]'}}",
            "--account=a --partition=p --qos=q --constraint=c --nodelist=n[1-2] --nodes=2 "
            "--ntasks-per-node=1 --gpus-per-node=4 --cpus-per-task=8",
        ),
    ],
)
def test_what_the_site_file_asks_for(tmp_path: Path, text: str, asked: str) -> None:
    assert (
        " ".join(as_arguments(component_options(site(tmp_path, text), "trainer", nodes=2, gpus_per_node=4)))
        == asked
    )


def test_two_good_nodes(tmp_path: Path) -> None:
    found = list(trial_findings(BOTH, site(tmp_path), TRAINER))
    assert [f.level for f in found] == ["ok", "ok"]
    assert found[0].says == "n1, n2: 4 GPUs each; all nodes reach each other."


def test_a_memory_filesystem_that_is_too_small_for_the_run_is_named(tmp_path: Path) -> None:
    demand, small = replace(TRAINER, shm_bytes=9 << 30), replace(GOOD, shm_bytes=8 << 30)
    for facts, num in ((small, 1), (replace(GOOD, shm_bytes=9 << 30), 0), (GOOD, 0)):
        found = list(
            trial_findings(Trial(facts=(facts,), report=report()), site(tmp_path), replace(demand, nodes=1))
        )
        faults = [each for each in found if each.level == "fail"]
        assert len(faults) == num
        for fault in faults:
            assert fault.key == "n1" and "shm_dir: a node of the run holds 9.0 GiB" in fault.says
            assert "which has 8.0 GiB" in fault.says and "remount,size" in fault.cure


@pytest.mark.parametrize(
    ("changes", "level", "says"),
    [
        ({"problem": "no interface ib0"}, "fail", "no interface ib0"),
        ({"unreached": ("10.0.0.2",)}, "fail", "cannot reach 10.0.0.2"),
        ({"gpus": 3}, "fail", "sees 3 GPUs; 4 were requested"),
        ({"cpus": 1}, "warn", "may use 1 CPUs, 8 were requested"),
        ({"cpus": 8}, "warn", "may use 8 CPUs, 8 were requested"),
        ({"granted": 2, "cpus": 8}, "warn", "has 2 CPUs on the node for 4 GPUs"),
        ({"unfit": "/scratch cannot be written to"}, "fail", "unfit: /scratch cannot be written to"),
        ({"missing_commands": ("scontrol",)}, "fail", "scontrol not on the PATH"),
        ({"locked_memory_bytes": 65536}, "warn", "only 64 KiB may be locked"),
    ],
)
def test_a_node_that_lacks_something(tmp_path: Path, changes, level: str, says: str) -> None:
    trial = replace(BOTH, facts=(GOOD, replace(GOOD, node="n2", **changes)))
    found = [f for f in trial_findings(trial, site(tmp_path, "cpus_per_node: 8"), TRAINER) if f.key == "n2"]
    assert [f.level for f in found] == [level]
    assert says in found[0].says


@pytest.mark.parametrize(
    ("trial", "level", "says"),
    [
        (Trial(facts=(), report=None, problem="Unable to allocate resources"), "fail", "Unable to allocate"),
        (replace(BOTH, facts=(GOOD,), report=None), "fail", "1 of 2 nodes wrote no report"),
        (replace(BOTH, report=report(claim_faults=2)), "fail", "2 of 40 claims"),
        (replace(BOTH, report=report(new_name=Spread(median_s=1, longest_s=9))), "warn", "within 9000 ms"),
    ],
)
def test_a_trial_that_went_wrong(tmp_path: Path, trial: Trial, level: str, says: str) -> None:
    found = [f for f in trial_findings(trial, site(tmp_path), TRAINER) if f.level != "ok"]
    assert [f.level for f in found] == [level]
    assert says in found[0].says
