"""The srun lines of an attempt, and what Slurm gave the job, from its environment."""

from pathlib import Path

import pytest

from tests.unit.launch.test_findings import site
from yatt.adapters.slurm.slurm import expand_counts
from yatt.launch.node.allocation import Allocation, allocation_of
from yatt.launch.node.steps import srun_line
from yatt.launch.resolve.plan import Component

TRAINER = Component(name="trainer", first=0, nodes=2, gpus_per_node=4)
ENGINES = Component(name="engines", first=2, nodes=1, gpus_per_node=2)
FLAT = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_CPUS_PER_NODE": "72(x2),36"}
HET = {
    "SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n9", "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "64,32",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "8",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "counts"), [("", []), ("16", [16]), ("72(x2),36", [72, 72, 36]), ("1,2(x1),3", [1, 2, 3])]
)
def test_counts_are_expanded(text, counts):
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["x", "72(2)", "72(x2", "-1", "1,,2,a"])
def test_what_is_no_list_of_counts_is_said(text):
    with pytest.raises(ValueError, match="is not a list of counts"):
        expand_counts(text)


@pytest.mark.parametrize(("env", "cpus"), [
    (FLAT, {"trainer": 72, "engines": 36}),
    (HET, {"trainer": 32, "engines": 8}),
    ({k: v for k, v in FLAT.items() if "CPUS" not in k}, {}),
])  # fmt: skip
def test_a_component_has_the_cpus_of_its_smallest_node(env, cpus):
    assert allocation_of(env, (TRAINER, ENGINES)).cpus == cpus


def line(folder: Path, text: str, allocation: Allocation | None) -> list[str]:
    return list(srun_line((TRAINER, ENGINES), 0, site(folder, text), allocation))


def test_a_step_asks_for_all_cpus_and_hands_the_environment_on(tmp_path):
    argv = line(tmp_path, "", allocation_of(HET, (TRAINER, ENGINES)))
    assert {"--cpus-per-task=32", "--cpu-bind=cores", "--mpi=none", "--export=ALL"} <= set(argv)


def test_what_the_site_says_of_sruns_options_comes_last(tmp_path):
    argv = line(tmp_path, "srun_args: [--cpu-bind=none, --mpi=pmix]", allocation_of(HET, (TRAINER, ENGINES)))
    assert argv[-2:] == ["--cpu-bind=none", "--mpi=pmix"]


def test_before_there_is_a_job_the_site_says_how_many_cpus(tmp_path):
    assert "--cpus-per-task=24" in line(tmp_path, "cpus_per_node: 24", None)
    assert not any("cpu" in word for word in line(tmp_path, "", None))
