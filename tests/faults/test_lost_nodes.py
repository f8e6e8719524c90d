"""A node that only runs engines may be lost, dead or standing still: only the pool shrinks.

The undisturbed run is *colocated* on two nodes; the others are disaggregated with the same two trainer ranks.
All must end bit-equal, however many engine nodes there are and whatever becomes of them.
"""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_resume_exact import final_state, metrics
from tests.runs import RunFile, environment, held_after, kill, living, popen, rows, start, wait_for, yatt
from tests.tiny_models import make_qwen3, make_scripted_model
from yatt.adapters.files.files import record_in
from yatt.adapters.run_folder.attempt_claim import claim_attempt
from yatt.config.load import load_run_config
from yatt.launch.folder.folder import open_folder
from yatt.launch.resolve.completed import completed_config
from yatt.paths import RunPaths

pytestmark = pytest.mark.faults

SILENCE_S = 10.0
SOON = "(ended, and was started again|was not heard of for 10)"  # whichever is sooner
ITERATIONS = 16
SPLIT = {"mode": "disaggregated", "trainer_nodes": 2, "genrm_gpu_sets": 2}  # nodes 2, 3 sample, 4, 5 judge


def run_file(folder: Path, nodes: int, placement: dict[str, Any]) -> RunFile:
    judge = make_scripted_model(folder / "judge", mean_tokens=3, steps_per_token=50)
    (Path(judge) / "model.safetensors").write_bytes(b"")
    make_qwen3(folder / "policy", tied=True, seed=0)
    (folder / "policy" / "scripted.json").write_text(json.dumps({"steps_per_token": 200}))
    section = {"name": "judge", "model": judge, "template": "{prompt}{completion}", "engine": "scripted",
               "verdict": {"pattern": "([a-m])", "scores": {}}, "max_model_tokens": 64,
               "on_unparsable": "score", "unparsable_score": 0.5}  # fmt: skip
    return RunFile(
        folder,
        {
            "launch": {"nodes": nodes, "node_silence_s": SILENCE_S},
            "lease": {"ttl_s": 3 * SILENCE_S},
            "genrms": [section],
            "placement": placement,
            "trainer": {"total_iterations": ITERATIONS},
        },
    )


def events(run: RunFile, kind: str) -> list[dict[str, Any]]:
    return [e for e in rows(run.run_dir / "events.jsonl") if e["kind"] == kind]


def controller(run: RunFile, node: int) -> int:
    """Process id of a node's controller."""
    for pid, module in living(run.run_dir).items():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if module == "yatt.control" and words[words.index("--node") + 1] == str(node):
                return pid
    raise AssertionError(f"node{node} has no controller")


def workers(run: RunFile, node: int) -> list[int]:
    ended = {e["pid"] for e in events(run, "worker.end")}
    return [e["pid"] for e in events(run, "worker.start") if e["node"] == node and e["pid"] not in ended]


def lost(run: RunFile, node: int) -> dict[str, Any]:
    """The event of a node's loss, waited for."""

    def found() -> list[dict[str, Any]]:
        return [e for e in events(run, "node.lost") if e["node"] == node]

    return wait_for(found, what=f"the loss of node{node}")[0]


@dataclass
class Disturbed:
    """One run, and what was seen of it. Its leader stands still for a while; it loses a rollout node by
    SIGKILL, an engine of the other one, and a judge's node by SIGSTOP."""

    run: RunFile
    output: str = ""
    code: int = -1
    losses: list[dict[str, Any]] = field(default_factory=list)
    orphans: set[int] = field(default_factory=set)

    def disturb(self) -> None:
        process = start("run", str(self.run.write()))
        try:
            wait_for(lambda: events(self.run, "ckpt.commit"), timeout_s=90, what="the first checkpoint")
            self._pause_leader()
            victims = [controller(self.run, 3), *workers(self.run, 3)]
            for pid in victims:
                kill(pid)
            self.losses.append(lost(self.run, 3))
            assert kill(workers(self.run, 2)[0]), "the last rollout engine; its node starts another"
            paused, engines = controller(self.run, 4), workers(self.run, 4)
            assert kill(paused, signal.SIGSTOP)
            try:
                self.losses.append(lost(self.run, 4))
            finally:
                kill(paused, signal.SIGCONT)
            wait_for(lambda: paused not in living(self.run.run_dir), what="node4 to end itself")
            self.orphans = living(self.run.run_dir).keys() & set(engines)
            self.output, _ = process.communicate(timeout=300)
            self.code = process.returncode
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def _pause_leader(self) -> None:
        """Longer than the silence that costs others their place, shorter than a lease."""
        leader, began_s = controller(self.run, 0), time.monotonic()
        assert kill(leader, signal.SIGSTOP)
        try:
            wait_for(lambda: time.monotonic() - began_s > SILENCE_S + 2, timeout_s=60, what="time to pass")
        finally:
            kill(leader, signal.SIGCONT)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    run = run_file(tmp_path_factory.mktemp("calm"), 2, {"mode": "colocated"})
    done = yatt("run", str(run.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    return run


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Disturbed:
    made = Disturbed(run_file(tmp_path_factory.mktemp("disturbed"), 6, SPLIT))
    made.disturb()
    return made


def test_the_run_goes_on_and_ends_bit_equal(calm: RunFile, disturbed: Disturbed) -> None:
    assert disturbed.code == 0, disturbed.output
    assert {e["attempt"] for e in rows(disturbed.run.run_dir / "events.jsonl")} == {1}, "one attempt"
    assert final_state(disturbed.run) == final_state(calm)
    assert metrics(disturbed.run) == metrics(calm)
    assert living(disturbed.run.run_dir) == {}


def test_a_leader_that_stood_still_blames_nobody(disturbed: Disturbed) -> None:
    assert [e["node"] for e in events(disturbed.run, "node.lost")] == [3, 4], "only the real ones"


def test_losses_are_noticed_in_time_and_written_down(disturbed: Disturbed) -> None:
    assert [(e["node"], e["goes_on"]) for e in disturbed.losses] == [(3, True), (4, True)]
    dead, silent = disturbed.losses
    assert re.match(SOON, dead["why"])
    assert silent["silence_s"] >= SILENCE_S
    for event in disturbed.losses:
        path = RunPaths(disturbed.run.run_dir).lost(1, event["node"])
        record = record_in(path.read_bytes(), 1)
        assert record is not None
        assert (record["node"], record["goes_on"]) == (event["node"], True)


def test_a_controller_that_stood_still_ends_itself_with_its_workers(disturbed: Disturbed) -> None:
    assert disturbed.orphans == set()
    first, *again = (e["t"] for e in events(disturbed.run, "attempt.start") if e["node"] == 4)
    (over,) = (e["t"] for e in events(disturbed.run, "attempt.end"))
    until = again[0] if again else over  # the run may end before the node is back
    ended = [e["t"] for e in events(disturbed.run, "worker.end") if e["node"] == 4]
    assert not [t for t in ended if first < t < until], "the leader does not listen to it any more"
    log = RunPaths(disturbed.run.run_dir).log(1, "node4").read_text()
    assert "this attempt ends here with exit code 76: this node was not heard of for 10" in log


def test_nobody_is_asked_to_hand_over_and_only_what_was_killed_is_granted_again(
    disturbed: Disturbed,
) -> None:
    grants = [(e["slab"], e["holder"]) for e in events(disturbed.run, "lease.grant")]
    roles = ["trainer"] * 2 + ["rollout"] * 2 + ["genrm:judge"] * 2
    once = [(f"n{node}s0", role) for node, role in enumerate(roles)]
    returned = [each for each in once if each[0] in ("n3s0", "n4s0")]  # their nodes came back
    assert set(grants) == set(once)
    assert set(Counter(grants) - Counter([*once, ("n2s0", "rollout")])) <= set(returned)
    again = [e["worker"] for e in events(disturbed.run, "worker.start") if not e["worker"].endswith(".1")]
    assert again == ["rollout-n2s0.2"]
    assert [e["slab"] for e in events(disturbed.run, "lease.release")] == ["n2s0"]


def test_weights_come_from_owners_in_turn(disturbed: Disturbed) -> None:
    fetched = [(e["node"], e["ranks"], e["policy_version"]) for e in events(disturbed.run, "weights.fetch")]
    assert [version for node, _, version in fetched if node == 2] == list(range(ITERATIONS + 1))
    assert {(node, rank) for node, (rank,), _ in fetched} == {(2, 0), (3, 1)}


def test_the_loss_of_the_only_judge_ends_the_attempt_and_the_next_one_finishes(tmp_path: Path) -> None:
    run = run_file(tmp_path, 3, {"mode": "disaggregated", "trainer_nodes": 1, "genrm_gpu_sets": 1})
    process = start("run", str(run.write()))
    try:
        wait_for(lambda: events(run, "ckpt.commit"), timeout_s=90, what="the first checkpoint")
        for pid in [controller(run, 2), *workers(run, 2)]:
            kill(pid)
        event = lost(run, 2)
        output, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0, output
    assert not event["goes_on"]
    assert re.search(rf"attempt 1 ended at iteration \d+: node2 {SOON}", output)
    assert "no node is left that can run genrm:judge" in output
    assert "starting again from iteration" in output
    assert [row["training/global_step"] for row in metrics(run)] == list(range(1, ITERATIONS + 1))


def test_a_node_whose_engine_fails_again_and_again_gives_up_and_the_run_goes_on(tmp_path: Path) -> None:
    run = run_file(tmp_path, 3, {"mode": "disaggregated", "trainer_nodes": 1})
    run.settings["genrms"] = []
    run.settings["trainer"] = {"total_iterations": 6}
    hold = held_after(run.folder, 4 * 16, pause_s=0)  # until eight starts have failed
    process = start("run", str(run.write()))
    try:
        wait_for(lambda: events(run, "ckpt.commit"), timeout_s=90, what="the first checkpoint")

        def strike() -> list[dict[str, Any]]:
            for pid in workers(run, 2):
                kill(pid)
            return events(run, "node.lost")

        (event,) = wait_for(strike, timeout_s=60, what="node2 to give up")
        hold.unlink()
        output, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0, output
    assert (event["node"], event["goes_on"]) == (2, True)
    assert event["why"].startswith("gave up: rollout-n2s0 ended 8 times in a row")
    assert {e["attempt"] for e in rows(run.run_dir / "events.jsonl")} == {1}, "one attempt"


# ---- absent from the start ----------------------------------------------------------------------


def controllers(run: RunFile, nodes: list[int], absent: str) -> Iterator["subprocess.Popen[str]"]:
    """An attempt without its launcher: the controllers of these nodes."""
    paths = open_folder(completed_config(load_run_config([run.write()], [])))
    attempt = claim_attempt(paths)
    for node in nodes:
        argv = [sys.executable, "-m", "yatt.control", "--run", str(paths.root), "--attempt", str(attempt)]
        argv += ["--node", str(node), "--device", "cpu", "--absent", absent]
        yield popen(argv, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def test_an_attempt_without_two_engine_nodes_ends_bit_equal(calm: RunFile, tmp_path: Path) -> None:
    run = run_file(tmp_path, 6, SPLIT)
    processes = list(controllers(run, [0, 1, 2, 4], "3,5"))
    try:
        said = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * 4, said
    assert final_state(run) == final_state(calm)
    assert metrics(run) == metrics(calm)
    assert not events(run, "node.lost"), "they were never there"


@pytest.mark.parametrize(
    ("absent", "says"),
    [
        ("4,5", "cannot begin with --absent 4,5: no node is left that can run genrm:judge"),
        ("1", "cannot begin with --absent 1: node1 has trainer ranks, and the run cannot do without them"),
    ],
)
def test_an_attempt_that_cannot_begin_says_why(tmp_path: Path, absent: str, says: str) -> None:
    (process,) = controllers(run_file(tmp_path, 6, SPLIT), [0], absent)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1
    assert f"node0: this attempt {says}" in said
