"""Nodes that Slurm has taken out of a job, as an attempt's launcher sees them before its controllers met."""

import pytest

from yatt import clock
from yatt.adapters.slurm.slurm import Slurm
from yatt.launch.attempt.watch import LOST_LOOK_S, LostNodes
from yatt.launch.node.allocation import Allocation
from yatt.launch.resolve.plan import Component
from yatt.paths import RunPaths

PARTS = (
    Component(name="trainer", first=0, nodes=2, gpus_per_node=0),
    Component(name="engines", first=2, nodes=2, gpus_per_node=0),
)
HELD = Allocation(job_id="7", restarts=0, hosts={"trainer": ("n1", "n2"), "engines": ("n3", "n4")}, groups={})


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """What scontrol prints from now on: one node list a component; nothing: it fails."""
    said = tmp_path / "said"
    said.write_text("")
    command = tmp_path / "bin" / "scontrol"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n[ -s {said} ] && cat {said}\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=":")

    def say(*lists: str, restarts: int = 0, state: str = "RUNNING") -> None:
        parts = [
            f"JobId=7 JobName=x\n   JobState={state} Restarts={restarts}\n   NodeList={names} NumNodes=1\n"
            for names in lists
        ]
        said.write_text("\n".join(parts))

    return say


@pytest.fixture
def look(tmp_path, monkeypatch, answers):
    lost = LostNodes(RunPaths(tmp_path / "run"), 1, PARTS, HELD, Slurm())
    now = [100.0]
    monkeypatch.setattr(clock, "monotonic_s", lambda: now[0])
    lost.look()

    def later() -> frozenset[int]:
        now[0] += LOST_LOOK_S
        return lost.look()

    return later


def test_a_node_that_is_not_in_the_list_any_more_is_lost(look, answers):
    answers("n[1-2]", "n[3-4]")
    assert look() == set()
    answers("n[1-2]", "n4")
    assert look() == {2}


@pytest.mark.parametrize(
    ("lists", "about"),
    [
        ((), {}),
        (("(null)", "(null)"), {"state": "PENDING", "restarts": 1}),
        (("n[1-2]", "n[4-5]"), {"restarts": 1}),
        (("n[1-2]", "n[x-y]"), {}),
    ],
    ids=["no answer", "waits", "next start", "no list"],
)
def test_an_answer_that_is_not_about_this_start_changes_nothing(look, answers, lists, about):
    answers("n[1-2]", "n4")
    assert look() == {2}
    answers(*lists, **about)
    assert look() == {2}
    answers("n1", "n[3-4]")
    assert look() == {1}


def test_slurm_is_not_asked_before_its_time_nor_after_the_controllers_met(look, answers, tmp_path):
    answers("n[1-2]", "n4")
    assert not (tmp_path / "asked").exists()
    met = RunPaths(tmp_path / "run").all_endpoints(1)
    met.parent.mkdir(parents=True)
    met.touch()
    assert look() == set()
    assert not (tmp_path / "asked").exists()
