"""Everything is killed in the middle of a rollout: finished prompt groups are used by the next attempt."""

import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_resume_exact import final_state, metrics
from tests.runs import NUM_PROMPTS, RunFile, kill, living, rows, start, wait_for, yatt
from yatt.adapters.files.record_file import RecordReader
from yatt.control.rollouts.groups.kept_files import LINE, kept_files
from yatt.core.samples.prompts import RowSource, row_order

pytestmark = pytest.mark.faults

BATCH, N = 8, 4
NUM_HELD = 3
"""The last prompts of an iteration, which are not scored before everything is killed."""

REWARD = """
import asyncio, json
from pathlib import Path

def is_held(index):
    mark = Path({mark!r})
    try:
        return index in json.loads(mark.read_text())
    except FileNotFoundError:
        return False

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    index = extra_info["index"]
    while is_held(index):
        await asyncio.sleep(0.01)
    with open({calls!r}, "a") as file:
        file.write(f"{{index}}\\n")
    return sum(c in "abcdefghijklm" for c in solution_str) / 8
"""

ORDER = row_order([RowSource(NUM_PROMPTS)], seed=0, data_epoch=0, shuffle=True)


class HeldRun(RunFile):
    """A run whose rollout of one iteration does not end while `mark` exists, with indexes of held rows."""

    def __init__(self, folder: Path, iteration: int, **settings: Any) -> None:
        trainer = {"total_iterations": 3, "train_batch_size": BATCH, "mini_batch_size": 4}
        super().__init__(folder, {"trainer": trainer, "rollout": {"n": N}, **settings})
        self.write()
        self.iteration, self.mark, self.calls = iteration, folder / "mark", folder / "calls"
        last = iteration * BATCH
        self.held = list(range(last - NUM_HELD, last))
        self.free = list(range(last - BATCH, last - NUM_HELD))
        (folder / "reward.py").write_text(REWARD.format(mark=str(self.mark), calls=str(self.calls)))

    def hold(self, numbers: list[int]) -> None:
        """From now on the samples of these prompts are not scored."""
        self.mark.with_suffix(".new").write_text(json.dumps([ORDER[number] for number in numbers]))
        self.mark.with_suffix(".new").replace(self.mark)

    def events(self, kind: str, attempt: int = 0) -> list[dict[str, Any]]:
        found = [each for each in rows(self.run_dir / "events.jsonl") if each["kind"] == kind]
        return [each for each in found if attempt in (0, each["attempt"])]

    def numbers(self, kind: str, attempt: int) -> list[int]:
        return sorted(n for each in self.events(kind, attempt) for n in each["numbers"])

    def kept(self) -> set[int]:
        """Prompt numbers of the groups that are in the files of the iteration."""
        folder, found = self.run_dir / "kept_groups", set()
        for file in kept_files(folder):
            if file.iteration == self.iteration:
                with RecordReader(folder / file.name, len(LINE)) as reader:
                    found |= {place.key for place in list(reader.places())[1:]}
        return found

    def kill_in_rollout(self) -> None:
        """Starts the run, and kills everything when only the held prompts are missing."""
        self.hold(self.held)
        process = start("run", str(self.write()))
        try:
            wait_for(lambda: self.kept() == set(self.free), timeout_s=120, what="groups to be kept")
            if self.iteration > 1:
                saved = self.iteration - 1
                wait_for(lambda: saved in self.committed(), timeout_s=60, what="the commit before")
        finally:
            kill_all(self, process)
        self.mark.unlink()

    def committed(self) -> list[int]:
        return [each["iteration"] for each in self.events("ckpt.commit")]

    def resume(self, *arguments: str) -> None:
        done = yatt("resume", str(self.run_dir), *arguments)
        assert done.returncode == 0, done.stdout + done.stderr


def kill_all(run: RunFile, process: "subprocess.Popen[str]") -> None:
    kill(process.pid)
    for pid in living(run.run_dir):
        kill(pid)
    wait_for(lambda: not living(run.run_dir), what="all to be gone")
    process.communicate()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    run = HeldRun(tmp_path_factory.mktemp("calm"), 1)
    assert (done := yatt("run", str(run.write()))).returncode == 0, done.stdout + done.stderr
    return run


def test_only_what_is_missing_is_sampled_again_and_the_end_is_bit_equal(
    tmp_path: Path, calm: RunFile
) -> None:
    """In the first iteration, which has no commit before it; the next test is about a later one."""
    run = HeldRun(tmp_path, 1)
    run.kill_in_rollout()
    run.resume()
    assert run.numbers("groups.reuse", 2) == run.free
    opened = run.numbers("rollout.group.open", 2)
    assert opened == list(range(run.held[0], 3 * BATCH)), "of this iteration only the held ones"
    check_end(run, calm)


def check_end(run: HeldRun, calm: RunFile) -> None:
    calls = Counter(map(int, run.calls.read_text().split()))
    assert {calls[ORDER[number]] for number in range(3 * BATCH)} == {N}, "each sample is scored once"
    assert final_state(run) == final_state(calm)
    assert metrics(run) == metrics(calm)
    assert run.kept() == set() and kept_files(run.run_dir / "kept_groups") == [], "all is committed"


def test_what_is_killed_twice_uses_the_groups_of_both(tmp_path: Path, calm: RunFile) -> None:
    run = HeldRun(tmp_path, 2)
    run.kill_in_rollout()
    more, *held = run.held
    run.hold(held)
    process = start("resume", str(run.run_dir))
    try:
        wait_for(lambda: more in run.kept(), timeout_s=120, what="one more group")
    finally:
        kill_all(run, process)
    run.mark.unlink()
    run.resume()
    assert run.numbers("groups.reuse", 3) == [*run.free, more]
    assert run.numbers("rollout.group.open", 3) == list(range(held[0], 3 * BATCH))
    check_end(run, calm)


@pytest.mark.parametrize(("nodes", "is_deterministic"), [(1, True), (3, False)])
def test_another_number_of_nodes_uses_each_group_once(
    tmp_path: Path, nodes: int, is_deterministic: bool
) -> None:
    run = HeldRun(tmp_path, 2, run={"deterministic": is_deterministic, "dir": str(tmp_path / "run")})
    run.kill_in_rollout()
    run.resume("--nodes", str(nodes))
    assert run.numbers("groups.reuse", 2) == run.free
    assert run.numbers("rollout.group.open", 2) == list(range(run.held[0], 3 * BATCH))
    accepted = Counter(each["number"] for each in run.events("rollout.group.accept", 2))
    assert accepted == Counter(range(BATCH, 3 * BATCH)), "every prompt once"
    holders = {n: each["node"] for each in run.events("groups.reuse", 2) for n in each["numbers"]}
    assert holders == {number: number % nodes for number in run.free}


def test_files_that_cannot_be_used_are_passed_over_with_a_reason(tmp_path: Path, calm: RunFile) -> None:
    run = HeldRun(tmp_path, 2)
    run.kill_in_rollout()
    folder = run.run_dir / "kept_groups"
    first, second = (folder / file.name for file in kept_files(folder) if file.iteration == 2)
    first.write_bytes(first.read_bytes()[:-100])  # a torn tail
    data = bytearray(second.read_bytes())
    data[-1] ^= 1
    second.write_bytes(bytes(data))
    garbage = first.with_name(first.name.replace("000001.00000", "000000.00000"))
    garbage.write_bytes(b"\0" * 10_000)
    run.resume()
    reused = run.numbers("groups.reuse", 2)
    assert set(reused) < set(run.free) and len(reused) == len(run.free) - 2
    told = {each["name"]: each["reason"] for each in run.events("groups.pass_over", 2)}
    assert told[garbage.name] == "it has another format" and "is damaged" in told[second.name]
    assert final_state(run) == final_state(calm)
    assert metrics(run) == metrics(calm)


def test_a_changed_reward_function_makes_the_kept_scores_unusable(tmp_path: Path) -> None:
    run = HeldRun(tmp_path, 1)
    run.kill_in_rollout()
    reward = tmp_path / "reward.py"
    reward.write_text(reward.read_text() + "\n# corrected\n")
    run.resume()
    assert run.numbers("groups.reuse", 2) == []
    assert {each["reason"] for each in run.events("groups.pass_over", 2)} == {"it is of other files"}
    assert run.numbers("rollout.group.open", 2) == list(range(3 * BATCH))


def test_a_folder_that_cannot_be_written_costs_one_event_and_nothing_else(
    tmp_path: Path, calm: RunFile
) -> None:
    run = HeldRun(tmp_path, 1)
    process = start("run", str(run.write()))
    wait_for((run.run_dir / "attempts").exists, timeout_s=60, what="the run folder")
    (run.run_dir / "kept_groups").write_text("no folder")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    told = Counter((each["node"], each["iteration"]) for each in run.events("groups.not_kept"))
    assert set(told.values()) == {1} and len(told) == 2 * 3, "once per node and iteration"
    assert final_state(run) == final_state(calm)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a filesystem")
def test_a_full_disk_costs_the_kept_groups_and_is_not_kept_full(tmp_path: Path, calm: RunFile) -> None:
    run = HeldRun(tmp_path, 1)
    run.hold(run.held)
    process = start("run", str(run.write()))
    folder = run.run_dir / "kept_groups"
    wait_for((run.run_dir / "attempts").exists, timeout_s=60, what="the run folder")
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", folder], check=True)
    try:
        wait_for(lambda: run.events("groups.not_kept"), timeout_s=60, what="the disk to be full")
        run.mark.unlink()
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        assert "No space left on device" in run.events("groups.not_kept")[0]["error"]
        assert final_state(run) == final_state(calm)
        assert list(folder.iterdir()) == []
    finally:
        kill_all(run, process)
        subprocess.run(["umount", "-l", folder], check=True)
