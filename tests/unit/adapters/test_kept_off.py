"""Which nodes a job is kept off: no more than it can do without, and what others have asked for stays."""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from yatt.adapters.files.files import sealed_record, write_atomically
from yatt.adapters.run_folder import ledger
from yatt.adapters.slurm.kept_off import TRIES, KeptOff, affordable_exclusions, slurm_mebibytes
from yatt.adapters.slurm.slurm import Slurm
from yatt.paths import RunPaths

NODE = {
    "State": "IDLE", "Partitions": "gpu,all", "ActiveFeatures": "ib,fast", "Gres": "gpu:a100:8",
    "CPUTot": "64", "RealMemory": "512000",
}  # fmt: skip
PART = {"Partition": "gpu", "NumNodes": "2", "ExcNodeList": "(null)", "ReqNodeList": "(null)"}
NAMES = ("n1", "n2", "n3", "n4")


@pytest.mark.parametrize(
    ("part", "changed", "others", "off"),
    [
        ({}, {}, [], ["n3", "n1"]),
        ({}, {"n4": {"State": "DOWN*"}}, [], ["n3"]),
        ({}, {"n3": {"State": "DOWN"}}, [], ["n1"]),
        ({}, {"n4": {"State": "IDLE+RESERVED"}}, [], ["n3"]),
        ({}, {"n4": {"State": "MAINT"}}, [], ["n3"]),
        ({"Reservation": "mine"}, {"n4": {"State": "IDLE+RESERVED"}}, [], ["n3", "n1"]),
        ({}, {"n4": {"Partitions": "cpu"}}, [], ["n3"]),
        ({}, {}, ["n4"], ["n3"]),
        ({}, {}, ["n3"], ["n1"]),
        ({"ReqNodeList": "n[1-2]"}, {}, [], []),
        ({"Features": "fast"}, {"n4": {"ActiveFeatures": "slow"}}, [], ["n3"]),
        ({"Features": "fast&ib"}, {}, [], []),
        ({"TresPerNode": "gres:gpu:a100:2"}, {"n4": {"Gres": "gpu:t4:8"}}, [], ["n3"]),
        ({"TresPerNode": "gres/gpu:a100:2"}, {"n4": {"Gres": "gpu:t4:8"}}, [], ["n3"]),
        ({"TresPerNode": "gres/gpu:a100:2"}, {"n4": {"Gres": "gpu:a100_1g.5gb:8"}}, [], ["n3"]),
        ({"TresPerNode": "gres/gpu:2"}, {"n4": {"Gres": "gpu:t4:8"}}, [], ["n3", "n1"]),
        ({"TresPerNode": "gres/gpu:8"}, {"n4": {"Gres": "gpu:t4:4"}}, [], ["n3"]),
        ({"TresPerNode": "gres:gpu:2"}, {"n4": {"Gres": "(null)"}}, [], ["n3"]),
        ({"TresPerNode": "gpu in words of tomorrow"}, {}, [], []),
        ({"MinMemoryNode": "400G"}, {"n4": {"RealMemory": "256000"}}, [], ["n3"]),
        ({"MinMemoryCPU": "8000M", "MinCPUsNode": "40"}, {"n4": {"RealMemory": "256000"}}, [], ["n3"]),
        ({"MinCPUsNode": "64"}, {"n4": {"CPUTot": "32"}}, [], ["n3"]),
    ],
)
def test_a_job_is_kept_off_no_more_nodes_than_it_can_do_without(part, changed, others, off) -> None:
    nodes = {name: {**NODE, **changed.get(name, {})} for name in NAMES}

    def kept_off(num_nodes: int) -> list[str]:
        mine = {**PART, **part, "NumNodes": f"{num_nodes}"}
        return affordable_exclusions(["n3", "n1", "n3", "gone"], [mine], [nodes], [others])[0]

    assert kept_off(2) == off
    assert len(kept_off(3)) == max(0, len(off) - 1)
    assert kept_off(5) == []


@pytest.mark.parametrize(
    ("partitions", "spare"), [(("gpu", "gpu"), 0), (("gpu", "all"), 0), (("gpu", "cpu"), 2)]
)
def test_components_that_might_be_given_the_same_nodes_need_them_together(partitions, spare) -> None:
    nodes = {name: NODE for name in NAMES} | {f"c{n}": {**NODE, "Partitions": "cpu"} for n in range(4)}
    parts = [{**PART, "Partition": partition} for partition in partitions]
    off = affordable_exclusions(["n3", "n1", "c1", "c2"], parts, [nodes, nodes], [[], []])
    assert [len(names) for names in off] == [spare, spare]


@pytest.mark.parametrize(
    ("text", "said"), [("1.5T", 1572864), ("2G", 2048), ("500M", 500), ("7", 7), ("", 0)]
)
def test_memory_is_read_as_slurm_writes_it(text: str, said: int) -> None:
    assert slurm_mebibytes(text) == said


SCONTROL = """
import json, sys
from pathlib import Path
file = Path(__file__).with_name("slurm.json")
state, argv = json.loads(file.read_text()), sys.argv[1:]
if argv[:2] == ["show", "job"]:
    for names in state["lists"]:
        print(f"JobId={argv[2]} Partition=gpu Reservation={state['reservation']}")
        print(f"   NumNodes={state['nodes']} TRES=cpu=8,node={state['tres']} ReqNodeList=(null)")
        print(f"   ExcNodeList={names or '(null)'}\\n")
elif argv[:2] == ["show", "node"]:
    for number in range(1, 1 + state["up"]):
        print(f"NodeName=n{number} State=IDLE Partitions=gpu,all Gres=(null) CPUTot=8 RealMemory=8000")
elif argv[:2] == ["show", "reservation"]:
    print(f"ReservationName={argv[-1]} Nodes=n[1-3]")
elif state["refusals"]:
    file.write_text(json.dumps({**state, "refusals": state["refusals"] - 1}))
    sys.exit("Job is being requeued")
else:
    whose, names = (word.partition("=")[2] for word in argv[1:])
    state["lists"][int(whose.partition("+")[2] or 0)] = names
    state["changes"] += [[whose, names]]
    file.write_text(json.dumps(state))
"""


class OneJob:
    """A job of components of two nodes on a cluster of the nodes n1 to n9, by a stand-in of scontrol."""

    def __init__(self, folder: Path, *excluded: str, **differs: Any) -> None:
        program = folder / "scontrol"
        program.write_text(f"#!{sys.executable} -IS\n{SCONTROL}")
        program.chmod(0o755)
        self.slurm, self._file = Slurm({**os.environ, "PATH": str(folder)}), folder / "slurm.json"
        state = {"up": 9, "nodes": 2, "tres": 2, "refusals": 0, "reservation": "(null)", "changes": []}
        self._file.write_text(json.dumps({**state, **differs, "lists": excluded}))

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._file.read_text())
        return found

    def excluded(self) -> list[str]:
        return list(self.state()["lists"])

    def be(self, **differs: Any) -> None:
        """By somebody else, or by Slurm."""
        self._file.write_text(json.dumps({**self.state(), **differs}))


def run_of(folder: Path, *unfit: int) -> RunPaths:
    """One whose only attempt found these of its nodes unfit: its node 0 was n1, and so on."""
    paths = RunPaths(folder / "run")
    paths.root.mkdir()
    ledger.write_record(paths, 1, ledger.STARTED, {"hosts": {}})
    ledger.write_record(paths, 1, ledger.ENDED, {"unfit": list(unfit)})
    for node in range(4):
        entry = paths.controller_record(1, node)
        entry.parent.mkdir(exist_ok=True)
        write_atomically(entry, sealed_record({"slurm_node": f"n{node + 1}"}, 1))
    return paths


def test_only_what_was_added_is_taken_away_again(tmp_path: Path) -> None:
    job = OneJob(tmp_path, "n8", "")
    keep = KeptOff(run_of(tmp_path), job.slurm)
    keep.renew("7", ["n1", "n8"], 1)
    assert job.excluded() == ["n8,n1", "n1,n8"]
    job.be(lists=["n8,n1,n9", "n1,n8"])  # by an administrator, meanwhile
    keep.renew("7", ["n2"], 2)
    assert job.excluded() == ["n8,n9,n2", "n2"]
    keep.renew("7", [], 3)
    assert job.excluded() == ["n8,n9", ""]
    changes = job.state()["changes"]
    keep.renew("7", [], 4)
    assert job.state()["changes"] == changes


def test_what_was_added_to_another_job_is_not_taken_from_this_one(tmp_path: Path) -> None:
    job = OneJob(tmp_path, "")
    keep = KeptOff(run_of(tmp_path), job.slurm)
    keep.renew("7", ["n1"], 1)
    keep.renew("8", [], 2)  # whose user keeps it off that node as well
    assert job.excluded() == ["n1"]


def test_nodes_found_unfit_come_after_those_just_lost(tmp_path: Path) -> None:
    job = OneJob(tmp_path, "")
    KeptOff(run_of(tmp_path, 1, 2), job.slurm).renew("7", ["n4", "", "n2"], 1)
    assert job.excluded() == ["n4,n2,n3"]


def test_in_a_reservation_only_its_nodes_are_counted(tmp_path: Path) -> None:
    job = OneJob(tmp_path, "", reservation="maintenance")
    KeptOff(run_of(tmp_path), job.slurm).renew("7", ["n4", "n1", "n2"], 1)
    assert job.excluded() == ["n1"]


def test_a_job_that_is_completing_needs_more_nodes_than_it_still_has(tmp_path: Path) -> None:
    job = OneJob(tmp_path, "", "", up=4, nodes=1)
    KeptOff(run_of(tmp_path), job.slurm).renew("7", ["n1"], 1)
    assert job.excluded() == ["", ""]


def test_a_job_that_has_lost_a_node_needs_as_many_as_it_had(tmp_path: Path) -> None:
    """Slurm forgets the number until the job has completed: seen after a death under --no-kill."""
    job, paths = OneJob(tmp_path, "", "", up=5, nodes=1, tres=1), run_of(tmp_path)
    KeptOff(paths, job.slurm).renew("7", ["n1"], 1)
    assert job.excluded() == ["n1", "n1"]
    ledger.write_record(
        paths, 2, ledger.STARTED, {"hosts": {"engines": ["n3", "n4"], "trainer": ["n1", "n2", "n5"]}}
    )
    KeptOff(paths, job.slurm).renew("7", ["n1"], 2)
    assert job.excluded() == ["", ""]


def test_a_refusal_is_asked_again_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yatt.adapters.slurm.kept_off.PAUSE_S", 0.0)
    job = OneJob(tmp_path, "", refusals=3)
    KeptOff(run_of(tmp_path), job.slurm).renew("7", ["n1"], 1)
    assert job.state()["changes"] == [["7", "n1"]]


def test_what_was_added_is_known_though_a_change_was_refused_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the job would collect one node after the other."""
    monkeypatch.setattr("yatt.adapters.slurm.kept_off.PAUSE_S", 0.0)
    job = OneJob(tmp_path, "n8")
    keep = KeptOff(run_of(tmp_path), job.slurm)
    keep.renew("7", ["n1"], 1)
    job.be(refusals=TRIES)
    keep.renew("7", ["n2"], 2)
    assert job.excluded() == ["n8,n1"]
    keep.renew("7", [], 3)
    assert job.excluded() == ["n8"]


def test_a_record_that_makes_no_sense_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job, paths = OneJob(tmp_path, "n[a-b]"), run_of(tmp_path, 0)
    write_atomically(paths.controller_record(1, 0), sealed_record({"no": "name"}, 1))
    with caplog.at_level(logging.WARNING):
        KeptOff(paths, job.slurm).renew("7", ["n1"], 1)
    assert "are not known: KeyError" in caplog.text
    ledger.write_record(paths, 1, ledger.ENDED, {})
    KeptOff(paths, job.slurm).renew("7", ["n1"], 1)
    assert job.excluded() == ["n[a-b]"]


def test_a_damaged_note_adds_what_is_to_be_added_and_takes_nothing_away(tmp_path: Path) -> None:
    job, paths = OneJob(tmp_path, "n8"), run_of(tmp_path)
    paths.kept_off.write_bytes(b"{")
    KeptOff(paths, job.slurm).renew("7", ["n1"], 1)
    assert job.excluded() == ["n8,n1"]
