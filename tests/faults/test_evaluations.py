"""An evaluation on several nodes of this machine: what is killed there changes no byte of the result."""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_eval_command import Evaluation, begun, children
from tests.runs import kill, rows, wait_for, yatt
from tests.tiny_models import make_scripted_model

pytestmark = [pytest.mark.faults, pytest.mark.slow]

HELD_REWARD = """
import pathlib, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    while pathlib.Path(__file__).with_name("hold").exists():
        time.sleep(0.05)
    return sum(c in "abcdefghijklm" for c in solution_str) / 8
"""


class HeldEvaluation(Evaluation):
    """A scripted policy with a GenRM, whose function waits while there is a file `hold`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(folder, HELD_REWARD, prompts=12)
        judge = Path(make_scripted_model(folder / "judge", mean_tokens=3))
        (judge / "model.safetensors").write_bytes(b"")
        section = {"name": "judge", "model": str(judge), "template": "{prompt}{completion}",
                   "engine": "scripted", "verdict": {"pattern": "([a-m])", "scores": {}}, "max_tokens": 8,
                   "max_model_tokens": 64, "on_unparsable": "score", "unparsable_score": 0.5}  # fmt: skip
        (folder / "hold").touch()
        self.sections: dict[str, Any] = {
            "run": {"dir": str(folder / "none"), "deterministic": True}, "genrms": [section],
            "rollout": {"n": 3}, "rewards": [{"name": "reward", "path": self.own}],
            "launch": {"node_silence_s": 10.0},
        }  # fmt: skip

    def calm(self, *more: str) -> dict[str, bytes]:
        """The result on one node, when nothing happens."""
        (self.folder / "hold").unlink(missing_ok=True)
        self.out = self.folder / "calm"
        done = yatt(*self.words(*more, engine="scripted", like=self.sections))
        assert done.returncode == 0, done.stderr
        return self.files()

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(self.out.iterdir())}

    @property
    def run_folder(self) -> Path:
        return next(iter(self.scratch.glob("yatt-*/run")), self.scratch / "none")

    def events(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        return [
            event
            for event in rows(self.run_folder / "events.jsonl")
            if event["kind"] == kind and all(event.get(k) == v for k, v in fields.items())
        ]

    def wait_kept(self) -> None:
        """Until every group is sampled and kept; their scores are not there yet."""

        def num_kept() -> int:
            files = (self.run_folder / "kept_groups").glob("*")
            return sum(path.read_bytes().count(b"prompt_text") for path in files)

        wait_for(lambda: num_kept() >= 12, timeout_s=90, what="the groups to be kept")


@contextlib.contextmanager
def held(one: HeldEvaluation, *more: str) -> Iterator["subprocess.Popen[str]"]:
    """An evaluation that stands still; goes on, and to its end, after the context."""
    process = begun(one, *more, engine="scripted", like=one.sections)
    try:
        yield process
        (one.folder / "hold").unlink()
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert one.leftovers() == []


def controllers(process: "subprocess.Popen[str]") -> dict[str, int]:
    """Controllers' process ids, by node."""
    found = {}
    for pid in children(process.pid, "yatt.control"):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        found[words[words.index("--node") + 1]] = pid
    return found


def test_a_killed_controller_costs_a_start_and_no_group(tmp_path: Path) -> None:
    """A whole run: the walk knows neither what is kept in files nor what comes of it in another attempt."""
    one = HeldEvaluation(tmp_path / "one")
    with held(one, "--nodes", "2") as process:
        one.wait_kept()
        assert kill(controllers(process)["1"])
        wait_for(lambda: one.events("groups.reuse", attempt=2), timeout_s=90, what="kept groups to be used")
        numbers = [n for event in one.events("groups.reuse", attempt=2) for n in event["numbers"]]
        assert len(set(numbers)) == len(numbers)
    assert one.files() == HeldEvaluation(tmp_path / "one").calm()


def test_an_engine_node_that_is_killed_comes_back_and_an_engine_is_started_again(tmp_path: Path) -> None:
    """A whole run: in the walk a node that returns has no engines that get requests, and samples nothing."""
    one = HeldEvaluation(tmp_path / "one")
    (one.model / "scripted.json").write_text(json.dumps({"steps_per_token": 50}))
    split = ("placement.mode=disaggregated", "placement.trainer_nodes=1", "placement.genrm_gpu_sets=1")
    with held(one, "--nodes", "4", *split) as process:
        wait_for(lambda: one.events("phase.begin", phase="validate"), timeout_s=90, what="prompts")
        node = controllers(process)["2"]
        assert kill(children(node, "yatt.rollout")[0])
        wait_for(
            lambda: len(one.events("worker.start", node=2)) > 1, timeout_s=60, what="the engine's next start"
        )
        assert kill(controllers(process)["1"])
        wait_for(lambda: one.events("node.joined", node=1), timeout_s=90, what="the node to come back")
        assert {event["attempt"] for event in one.events("phase.begin")} == {1}
    assert one.files() == HeldEvaluation(tmp_path / "one").calm()


def test_a_rank_of_an_engine_over_two_nodes_is_killed(tmp_path: Path) -> None:
    """A whole run: no walk has ranks, or an engine that samples with the weights of its folder."""
    one = HeldEvaluation(tmp_path / "one")
    (one.model / "scripted.json").write_text(json.dumps({"steps_per_token": 50}))
    with held(one, "rollout.tp_size=2", "launch.gpus_per_node=1", "--nodes", "2") as process:
        wait_for(lambda: one.events("phase.begin", phase="validate"), timeout_s=90, what="prompts")
        assert kill(children(controllers(process)["1"], "yatt.rollout")[0])
        for name in ("rollout-n0s0r0.2", "rollout-n1s0r1.2"):
            wait_for(lambda name=name: one.events("worker.start", worker=name), timeout_s=90, what=name)
    assert one.files() == HeldEvaluation(tmp_path / "one").calm()
