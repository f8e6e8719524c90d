"""What `yatt diagnose` makes of what a real Slurm printed, with one thing changed at a time."""

from dataclasses import replace
from pathlib import Path

import pytest

from yatt.adapters.files.shared_folder import Report, Spread
from yatt.adapters.slurm.slurm import node_gpus_by_type, parse_config, parse_lines
from yatt.config.load import load_as, load_run_config
from yatt.config.site import SiteConfig, site_rules
from yatt.launch.diagnose.folders import (
    Folder,
    local_folder_findings,
    mount_of,
    run_folder_findings,
    shm_findings,
)
from yatt.launch.diagnose.nodes import is_up
from yatt.launch.diagnose.partitions import has_user_signal
from yatt.launch.diagnose.records import Demand, Finding, Snapshot, UserLimits
from yatt.launch.diagnose.report import demands_of, findings_about
from yatt.launch.diagnose.settings import requeue_delay_s
from yatt.launch.diagnose.user_limits import ASSOCIATION, QOS, limit_findings, rows_of

TEXTS = Path(__file__).parent / "slurm-22.05"
TRAINER = Demand(component="trainer", nodes=2, gpus_per_node=4)
ENGINES = Demand(component="engines", nodes=2, gpus_per_node=4)


def snapshot(config=(), low=(), nodes=()) -> Snapshot:
    """As captured, with settings of the cluster, of partition `low` and of every node changed."""
    partitions = {p["PartitionName"]: p for p in parse_lines((TEXTS / "partition.txt").read_text())}
    captured = Snapshot(
        config={**parse_config((TEXTS / "config.txt").read_text()), **dict(config)},
        partitions={**partitions, "low": {**partitions["low"], **dict(low)}},
        nodes={n["NodeName"]: {**n, **dict(nodes)} for n in parse_lines((TEXTS / "node.txt").read_text())},
    )
    return captured


def site(folder: Path, text: str = "") -> SiteConfig:
    path = folder / "site.yaml"
    path.write_text(f"signal_lead_s: 10\n{text}")
    return load_as(SiteConfig, [path], [], site_rules)


def problems(found: list[Finding]) -> list[str]:
    return [f"{f.level} {f.key}: {f.says} -> {f.cure}" for f in found if f.level != "ok"]


def test_the_captured_cluster_has_one_weakness(tmp_path: Path) -> None:
    found = problems(findings_about(snapshot(), site(tmp_path), (TRAINER, ENGINES)))
    assert [line.split(":")[0] for line in found] == ["warn kill"]


@pytest.mark.parametrize(
    ("config", "level", "says"),
    [
        ({"SLURM_VERSION": "20.02.7"}, "fail", "lacks srun --overlap"),
        ({"SLURM_VERSION": "21.08.8"}, "warn", "the oldest tested version is 22.05"),
        ({"SchedulerType": "sched/builtin"}, "warn", "does not start heterogeneous jobs"),
        ({"AuthInfo": "cred_expire=900"}, "warn", "waits at least 900 s"),
        ({"SlurmdTimeout": "0 sec"}, "warn", "never marks a silent node down"),
        ({"SlurmdTimeout": "10 sec"}, "warn", "maybe before yatt does"),
        ({"RequeueExit": "1,93"}, "warn", "requeues jobs that end with 93"),
        ({"RequeueExitHold": "75"}, "warn", "requeues and holds jobs that end with 75"),
        ({"SlurmctldParameters": "(null)"}, "warn", "get a signal: SIGTERM"),
        ({"PreemptType": "preempt/qos"}, "warn", "sacctmgr show qos"),
        ({"AccountingStorageType": "accounting_storage/slurmdbd"}, "warn", "does not answer"),
    ],
)
def test_settings_of_the_cluster(tmp_path: Path, config, level: str, says: str) -> None:
    found = problems(findings_about(snapshot(config), site(tmp_path), (TRAINER,)))
    assert [line.startswith(level) for line in found if says in line] == [True], found


@pytest.mark.parametrize(
    ("low", "text", "level", "says"),
    [
        ({"State": "DRAIN"}, "", "fail", "the partition is DRAIN"),
        ({"MaxTime": "02:00:00"}, "time_limit_min: 240", "fail", "time_limit_min: 120."),
        (
            {"AllowAccounts": "a,b"},
            "account: c",
            "fail",
            "does not accept account 'c'. -> Write account: one of a, b",
        ),
        ({"AllowQos": "normal"}, "qos: long", "fail", "does not accept qos 'long'"),
        ({"GraceTime": "5"}, "", "warn", "5 s from the notice"),
        ({"PreemptMode": "SUSPEND"}, "", "warn", "they keep their GPU memory"),
        ({"PreemptMode": "GANG,SUSPEND"}, "", "warn", "they keep their GPU memory"),
        ({"PreemptMode": "CANCEL", "GraceTime": "0"}, "", "warn", "without notice"),
        ({"Default": "NO"}, "", "fail", "no default partition"),
        ({}, "partition: gpu", "fail", "there is no partition 'gpu'. -> Write partition: one of low, high"),
        ({"MaxNodes": "1"}, "", "fail", "low allows 1 per job"),
        ({}, "components: {engines: {partition: high}}", "fail", "are preempted differently"),
    ],
)
def test_partitions(tmp_path: Path, low, text: str, level: str, says: str) -> None:
    found = problems(findings_about(snapshot(low=low), site(tmp_path, text), (TRAINER, ENGINES)))
    assert any(line.startswith(level) and says in line for line in found), found


@pytest.mark.parametrize(
    ("nodes", "text", "level", "says"),
    [
        ({"Gres": "gpu:2"}, "", "fail", "4 GPUs are needed; 0 of 5 have that. -> The largest have 2 GPUs"),
        ({"Gres": "(null)"}, "", "fail", "0 of 5 have that"),
        (
            {"Gres": "gpu:a:4(S:0-1)"}, "gpu_type: b", "fail",
            "no node has a GPU of type 'b'. -> Write gpu_type: a",
        ),
        ({}, "cpus_per_node: 17", "fail", "4 GPUs, 17 CPUs are needed"),
        ({}, "mem_gb: 16", "fail", "The largest have 4 GPUs, 16 CPUs, 15 GiB"),
        ({}, "constraint: ib", "fail", "feature ib are needed"),
        ({}, "gpus_directive: none", "warn", "the job gets no GPUs"),
        ({"State": "DOWN*"}, "", "warn", "0 of 5 are up now"),
        ({"State": "IDLE+DRAIN"}, "", "warn", "0 of 5 are up now"),
    ],
)  # fmt: skip
def test_nodes(tmp_path: Path, nodes, text: str, level: str, says: str) -> None:
    found = problems(findings_about(snapshot(nodes=nodes), site(tmp_path, text), (TRAINER,)))
    assert any(line.startswith(level) and says in line for line in found), found


def test_what_a_run_needs(tmp_path: Path) -> None:
    run = (
        "run: {dir: /r}\ndata: {train_files: [a]}\nmodel: {path: /m}\noptimizer: {lr: 1.0e-6}\n"
        "rewards: [{name: rule, path: 'builtin:gsm8k'}]\n"
        "trainer: {total_iterations: 1, train_batch_size: 4, mini_batch_size: 4}\n"
        "launch: {nodes: 3, gpus_per_node: 2}\n"
    )
    (tmp_path / "run.yaml").write_text(run)

    def demands(*arguments: str) -> list[tuple[str, int, int]]:
        config = load_run_config([tmp_path / "run.yaml"], list(arguments))
        return [(d.component, d.nodes, d.gpus_per_node) for d in demands_of(config)]

    assert demands() == [("trainer", 3, 2)]
    assert demands("launch.device=cpu") == [("trainer", 3, 0)]
    apart = demands(
        "placement.mode=disaggregated", "placement.trainer_nodes=1", "launch.engine_gpus_per_node=4"
    )
    assert apart == [("trainer", 1, 2), ("engines", 2, 4)]


def test_components_never_share_a_node(tmp_path: Path) -> None:
    demands = (replace(TRAINER, nodes=3), replace(ENGINES, nodes=3))
    found = problems(findings_about(snapshot(), site(tmp_path), demands))
    assert any("6 nodes are needed in partition low, which has 5" in line for line in found), found


@pytest.mark.parametrize(
    ("more", "text", "says"),
    [
        ({"missing_commands": ("srun",)}, "", "fail commands: not on the PATH: srun"),
        ({"overriding": ("SBATCH_PARTITION",)}, "", "warn environment: SBATCH_PARTITION"),
        ({"config": None}, "", "fail slurm: the controller does not answer"),
        ({"nodes": None}, "", "warn nodes: Slurm does not list its nodes"),
        (
            {},
            "container: {runtime: pyxis, image: a}",
            "warn container: srun has no --container-image on this machine",
        ),
    ],
)
def test_what_is_missing(tmp_path: Path, more, text: str, says: str) -> None:
    found = problems(findings_about(replace(snapshot(), **more), site(tmp_path, text), (TRAINER,)))
    assert any(says in line for line in found), found


def test_accounts(tmp_path: Path) -> None:
    config = {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageEnforce": "associations",
    }

    def about(text: str, accounts: tuple[str, ...]) -> Finding:
        limits = UserLimits(tuple({"Account": each} for each in accounts))
        found = findings_about(replace(snapshot(config), limits=limits), site(tmp_path, text), ())
        return next(f for f in found if f.key == "account")

    assert about("account: a", ("a", "b")).level == "ok"
    assert about("account: c", ("a", "b")).cure == "Write account: one of a, b."
    assert about("", ()).level == "fail"


MINE = "yatt-test||proj|normal|normal,long|||node=8|"
NORMAL = "normal|||||2-00:00:00"
ENFORCED = {
    "AccountingStorageEnforce": "associations,limits,qos", "ClusterName": "yatt-test",
    "SchedulerType": "sched/backfill",
}  # fmt: skip
TWO = ["yatt-test||a|normal|normal|1|||", "yatt-test||b|normal|normal||||"]
LONG = "long|2|4|node=4|gres/gpu=16|7-00:00:00"
CLOSE = "yatt-test||proj||normal,long|1|1|gres/gpu=4,node=1|00:30:00"
"""An association whose limits count only where the QOS has none."""


@pytest.mark.parametrize(
    ("associations", "qos", "text", "says"),
    [
        ([MINE], [NORMAL, LONG], "", []),
        ([MINE], [NORMAL, LONG], "qos: long", []),
        ([], [], "", []),
        (
            [MINE], ["normal|1||||"], "",
            ["QOS 'normal' (MaxJobsPU) allows a user 1 jobs running; the run's job counts as 2."],
        ),
        ([MINE], ["normal|1||||"], "layout: flat", []),
        (
            ["yatt-test||proj|normal|normal||1||"], [], "",
            ["account 'proj' (MaxSubmit) allows a user 1 jobs in the queue"],
        ),
        (
            [MINE], [NORMAL, "long|||cpu=640,node=1||"], "qos: long",
            ["QOS 'long' (MaxTRES) allows 1 nodes; trainer of the run need 2.", "engines of the run need 2."],
        ),
        (
            [MINE], [NORMAL, "long|||node=3||"], "qos: long\nlayout: flat",
            ["QOS 'long' (MaxTRES) allows 3 nodes; trainer of the run need 4."],
        ),
        (
            [MINE], ["normal||||cpu=9999,gres/gpu=12|"], "",
            ["QOS 'normal' (MaxTRESPU) allows 12 GPUs; trainer and engines of the run need 16."],
        ),
        ([MINE], ["normal||||gres/gpu=12|"], "gpus_directive: none", []),
        ([MINE], ["normal|||gres/gpu:h100=4||"], "gpu_type: a100", []),
        (
            [MINE], ["normal|||gres/gpu:h100=4||"], "gpu_type: h100\nlayout: flat",
            ["QOS 'normal' (MaxTRES) allows 4 GPUs; trainer of the run need 16."],
        ),
        (
            [MINE], ["normal|||||00:30:00"], "",
            ["time_limit_min is 60, more than QOS 'normal' (MaxWall) allows (00:30:00)."],
        ),
        ([MINE], [NORMAL], "qos: fast", ["the account of this job may not use QOS 'fast'."]),
        ([CLOSE], [LONG], "qos: long", []),
        (
            [CLOSE], ["long|10|10|||7-00:00:00"], "qos: long\nlayout: flat",
            ["account 'proj' (MaxTRES) allows 1 nodes", "account 'proj' (MaxTRES) allows 4 GPUs"],
        ),
        # of two accounts it is not known which one a job has, unless it is written; nor of partitions
        (TWO, [NORMAL], "", []),
        (TWO, [NORMAL], "account: a", ["account 'a' (MaxJobs) allows a user 1 jobs running"]),
        (["other||proj|normal|normal|1|1|node=1|", MINE], [NORMAL], "", []),
        (["yatt-test|debug|proj||debug|1|1|node=1|", MINE], [NORMAL], "qos: long", []),
        # without a default the only one is taken
        (["yatt-test||proj||long||||"], ["long|||||00:10:00"], "", ["more than QOS 'long' (MaxWall)"]),
    ],
)  # fmt: skip
def test_limits_of_the_accounting_database(
    tmp_path: Path, associations: list[str], qos: list[str], text: str, says: list[str]
) -> None:
    limits = UserLimits(rows_of(ASSOCIATION, "\n".join(associations)), rows_of(QOS, "\n".join(qos)))
    section, demands = site(tmp_path, f"time_limit_min: 60\n{text}"), (TRAINER, ENGINES)
    lax = {**ENFORCED, "AccountingStorageEnforce": "associations"}
    assert not list(limit_findings(limits, lax, section, demands))
    found = list(limit_findings(limits, ENFORCED, section, demands))
    faults = [f.says for f in found if f.level != "ok"]
    assert len(faults) == len(says), faults
    assert all(part in what for part, what in zip(says, faults, strict=True)), faults
    assert {f.level for f in found} <= {"ok", "warn"}, "a job is queued in any case"


def test_answers_of_another_form_give_no_limits(tmp_path: Path) -> None:
    for text in ("", "sacctmgr: error\n", "a|b\n", "x|" * 40, "normal|many|-1|node=x,,=|cpu|soon"):
        limits = UserLimits(rows_of(ASSOCIATION, f"{text}\n{MINE}"), rows_of(QOS, text))
        found = list(limit_findings(limits, ENFORCED, site(tmp_path, "qos: normal"), (TRAINER, ENGINES)))
        assert all(f.level == "ok" for f in found), found


def test_a_partition_that_cancels_after_a_notice_is_good_enough(tmp_path: Path) -> None:
    found = problems(findings_about(snapshot(low={"PreemptMode": "CANCEL"}), site(tmp_path), (TRAINER,)))
    assert [line.split(":")[0] for line in found] == ["warn kill"]


def test_settings_that_changed_their_name() -> None:
    assert requeue_delay_s({}) == 120
    assert requeue_delay_s({"AuthInfo": "socket=/x,cred_expire=5"}) == 5
    assert requeue_delay_s({"AuthInfo": "cred_expire=5", "SchedulerParameters": "requeue_delay=30"}) == 30
    assert has_user_signal({"PreemptParameters": "send_user_signal"})
    assert not has_user_signal({"PreemptParameters": "(null)"})


def test_gpus_of_a_node() -> None:
    assert node_gpus_by_type({"Gres": "gpu:4"}) == {"": 4}
    assert node_gpus_by_type({"Gres": "gpu:h100:8(S:0,1),nvme:2"}) == {"h100": 8}
    assert node_gpus_by_type({"Gres": "gpu:a:2,gpu:b:1"}) == {"a": 2, "b": 1}
    assert node_gpus_by_type({"Gres": "(null)"}) == {}


def test_states_of_a_node() -> None:
    assert all(is_up({"State": state}) for state in ("IDLE", "MIXED", "ALLOCATED", "IDLE+CLOUD", "IDLE~"))
    assert not any(is_up({"State": s}) for s in ("DOWN", "IDLE*", "MIXED+DRAIN", "IDLE+NOT_RESPONDING"))


MOUNTS = """\
/dev/a / ext4 rw 0 0
server:/x /shared nfs4 rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
/dev/b /my\\040disk xfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/shared/run", "nfs4"),
        ("/shared", "nfs4"),
        ("/sharedX", "ext4"),
        ("/my disk/a", "xfs"),
        ("/", "ext4"),
    ],
)
def test_the_filesystem_of_a_path(path: str, kind: str) -> None:
    assert mount_of(path, MOUNTS) == kind


def report(**changes) -> Report:
    fast = Spread(median_s=0.01, longest_s=0.02)
    good = Report(
        members=4, nodes=1, claim_rounds=40, claim_faults=0, reads=100, torn=0, backward=0,
        new_name=fast, new_content=fast, write=fast,
    )  # fmt: skip
    return replace(good, **changes)


@pytest.mark.parametrize(
    ("changes", "one_machine", "levels"),
    [
        ({"filesystem": "nfs4"}, False, ["ok", "ok"]),
        ({"filesystem": "fuse.glusterfs"}, False, ["ok", "ok"]),
        ({"filesystem": "ext4"}, False, ["warn", "ok"]),
        ({"filesystem": "tmpfs"}, True, ["ok", "ok"]),
        ({"problem": "Permission denied"}, False, ["fail"]),
        ({"report": report(claim_faults=1)}, False, ["ok", "fail"]),
        ({"report": report(torn=1)}, False, ["ok", "fail"]),
        ({"report": report(new_name=Spread(median_s=1, longest_s=30))}, False, ["ok", "warn"]),
    ],
)
def test_the_run_folder(changes, one_machine: bool, levels: list[str]) -> None:
    folder = Folder(**{"key": "run.dir", "path": "/x", "filesystem": "lustre", "report": report(), **changes})
    assert [f.level for f in run_folder_findings(folder, is_one_machine=one_machine)] == levels


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({}, "ok"),
        ({"filesystem": "ext4"}, "warn"),
        ({"filesystem": "nfs4", "key": "scratch_dir"}, "warn"),
        ({"filesystem": "xfs", "key": "scratch_dir"}, "ok"),
        ({"free_bytes": 1 << 20}, "warn"),
        ({"problem": "it does not exist"}, "warn"),
    ],
)
def test_folders_of_the_node(changes, level: str) -> None:
    folder = Folder(
        **{"key": "shm_dir", "path": "/dev/shm", "filesystem": "tmpfs", "free_bytes": 8 << 30, **changes}
    )
    assert [f.level for f in local_folder_findings(folder)] == [level]


@pytest.mark.parametrize(
    ("held", "one_machine", "levels"),
    [
        (0, True, []), (7 << 30, True, ["ok"]), (8 << 30, False, ["ok"]), (9 << 30, False, ["warn"]),
        (9 << 30, True, ["fail"]),
    ],
)  # fmt: skip
def test_what_a_node_holds_in_memory_is_compared_with_the_filesystem(held, one_machine, levels) -> None:
    folder = Folder(key="shm_dir", path="/dev/shm", filesystem="tmpfs", size_bytes=8 << 30)
    found = list(shm_findings(folder, held, is_one_machine=one_machine))
    assert [each.level for each in found] == levels
    if held > 8 << 30:
        assert "holds 9.0 GiB" in found[0].says and "/dev/shm on this machine has 8.0 GiB" in found[0].says
        assert "remount,size" in found[0].cure and "more nodes" in found[0].cure
    nowhere = replace(folder, problem="it does not exist", size_bytes=0)
    assert not list(shm_findings(nowhere, held, is_one_machine=one_machine))
