"""One job of one script, whatever answers are lost; a successor with the options of a person's job."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from yatt.adapters.slurm import sbatch
from yatt.adapters.slurm.sbatch import options_of_job, submit_once, successor_script
from yatt.adapters.slurm.slurm import Fields, Reply, Slurm

SCRIPT = Path("/run/submitit/a.sh")
LOST = Reply(1, "", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
SUBMITTED = ("answered", "answered, no id", "lost", "lost, queued late", "lost, not queued", "refused")
LOOKED = ("answered", "lost")


class Controller(Slurm):
    """A controller that does with each request what the next choice says. What it queues late, it has queued
    before the second look."""

    def __init__(self, choices: Iterator[str]) -> None:
        super().__init__({})
        self.choices = choices
        self.jobs: list[str] = []
        self.late = 0

    def call(self, *argv: str, limit_s: float | None = None) -> Reply:
        assert argv == ("sbatch", "--parsable", str(SCRIPT))
        match next(self.choices):
            case "refused":
                return Reply(1, "", "sbatch: error: invalid account")
            case "answered":
                self._queue()
                return Reply(0, f"Welcome to the cluster, 7 news\n{self.jobs[-1]};cluster\n", "")
            case "answered, no id":
                self._queue()
                return Reply(0, "Submitted\n", "")
            case "lost":
                self._queue()
            case "lost, queued late":
                self.late += 1
        return LOST

    def queue(self, *_which: str, limit_s: float | None = None) -> dict[str, list[Fields]] | None:
        if next(self.choices) == "lost":
            return None
        found = {job: [{"Command": f"{SCRIPT} RUN"}] for job in self.jobs}
        for _ in range(self.late):
            self._queue()
        self.late = 0
        return {"7": [{"Command": "/run/submitit/b.sh"}], **found}

    def _queue(self) -> None:
        self.jobs.append(str(11 + len(self.jobs)))


class Tree:
    """Every sequence of choices, each once: of a request that is the next, all that it may be."""

    def __init__(self) -> None:
        self.taken: list[list[int]] = []

    def choices(self, kinds: Any) -> Iterator[str]:
        for depth in itertools.count():
            options = kinds()
            if depth == len(self.taken):
                self.taken.append([0, len(options)])
            yield options[self.taken[depth][0]]

    def has_next(self) -> bool:
        while self.taken and self.taken[-1][0] + 1 == self.taken[-1][1]:
            self.taken.pop()
        if self.taken:
            self.taken[-1][0] += 1
        return bool(self.taken)


class Walked(Controller):
    def __init__(self, tree: Tree) -> None:
        self.options: tuple[str, ...] = SUBMITTED
        super().__init__(tree.choices(lambda: self.options))

    def call(self, *argv: str, limit_s: float | None = None) -> Reply:
        self.options = SUBMITTED
        return super().call(*argv, limit_s=limit_s)

    def queue(self, *which: str, limit_s: float | None = None) -> dict[str, list[Fields]] | None:
        self.options = LOOKED
        return super().queue(*which, limit_s=limit_s)


def walk(monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    """Returns the number of schedules, and what was wrong in them."""
    monkeypatch.setattr(sbatch, "LOOK_PAUSE_S", 0.0)
    monkeypatch.setattr(sbatch, "MOST_LOOKS", 3)
    monkeypatch.setattr(sbatch, "TRIES", 2)
    tree, faults = Tree(), []
    for number in itertools.count(1):
        controller = Walked(tree)
        reply = submit_once(controller, SCRIPT)
        num_jobs = len(controller.jobs) + controller.late
        if num_jobs > 1:
            faults.append("two jobs")
        if reply.code == 0 and [reply.out] != controller.jobs:
            faults.append("not its job")
        if reply.code not in (0, None) and not reply.is_unreachable and num_jobs:
            faults.append("refused, and queued")
        again = submit_once(controller, SCRIPT, may_be_queued=True) if reply.code != 0 else reply
        if len(controller.jobs) + controller.late > 1:
            faults.append("two jobs by a later call")
        if reply.code == 0 and again.out != reply.out:
            faults.append("another id later")
        if faults or not tree.has_next():
            return number, faults
    raise AssertionError("unreachable")


def test_every_order_of_lost_answers_leaves_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    number, faults = walk(monkeypatch)
    assert faults == []
    assert number > 500


@pytest.mark.parametrize("mistake", ["one look is enough", "no answer is none", "not looked for at first"])
def test_the_walk_finds(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    if mistake == "not looked for at first":
        monkeypatch.setitem(
            globals(), "submit_once", lambda slurm, script, **_: sbatch.submit_once(slurm, script)
        )
    else:

        def looked_once(slurm: Slurm, script: Path) -> str | None:
            jobs = slurm.queue("--me")
            if jobs is None:
                return "" if mistake == "no answer is none" else None
            return next((job for job, (each,) in jobs.items() if str(script) in each["Command"]), "")

        monkeypatch.setattr(sbatch, "find_job", looked_once)
    assert "two jobs" in " ".join(walk(monkeypatch)[1])


JOB = {
    "JobName": "yatt-ab12", "Account": "physics", "Partition": "gpu", "QOS": "(null)",
    "TimeLimit": "00:09:00", "MinMemoryNode": "4G", "Comment": "(null)",
}  # fmt: skip


def test_a_persons_options_come_into_the_script() -> None:
    script = "#!/bin/bash\n# mine\n#SBATCH --time=4:00:00\n#SBATCH --nodes=1\nset -e\nexec python $1\n"
    found = successor_script(script, [JOB], {"SLURM_JOB_NUM_NODES": "6"}).splitlines()
    assert found[:4] == script.splitlines()[:4]
    assert found[-2:] == ["set -e", "exec python $1"]
    assert set(found[4:-2]) == {
        "#SBATCH --job-name=yatt-ab12", "#SBATCH --account=physics", "#SBATCH --partition=gpu",
        "#SBATCH --time=00:09:00", "#SBATCH --mem=4G", "#SBATCH --nodes=6",
    }  # fmt: skip


def test_each_component_gets_its_own() -> None:
    script = "#!/bin/bash\n#SBATCH -p a\n#SBATCH hetjob\n#SBATCH -p b\ntrue\n"
    env = {"SLURM_JOB_NUM_NODES_HET_GROUP_0": "2", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "3"}
    lines = successor_script(script, [{"Partition": "c"}, {"Partition": "d"}], env).splitlines()
    assert lines == [
        "#!/bin/bash", "#SBATCH -p a", "#SBATCH --partition=c", "#SBATCH --nodes=2", "#SBATCH hetjob",
        "#SBATCH -p b", "#SBATCH --partition=d", "#SBATCH --nodes=3", "true",
    ]  # fmt: skip


def test_memory_that_is_counted_otherwise_is_left_out_of_that_component() -> None:
    assert "mem" not in options_of_job({**JOB, "MinMemoryNode": "0", "MemPerTres": "gres:gpu:4096"})
    assert options_of_job({**JOB, "MinMemoryNode": "0"})["mem"] == "0", "all of it"
    script = (
        "#!/bin/bash\n#SBATCH --mem-per-gpu=4G\n#SBATCH hetjob\n#SBATCH -p b\n# --mem-per-cpu\n"
        "srun --mem-per-cpu=1G true\n"
    )
    lines = successor_script(script, [JOB, JOB], {}).splitlines()
    at = lines.index("#SBATCH hetjob")
    assert not any(line.startswith("#SBATCH --mem=") for line in lines[:at])
    assert "#SBATCH --mem=4G" in lines[at:]


def test_components_that_only_the_command_line_had_are_refused() -> None:
    with pytest.raises(ValueError, match="hetjob"):
        successor_script("#!/bin/bash\n#SBATCH --nodes=1\ntrue\n", [JOB, JOB], {})


@pytest.mark.parametrize("value", ["(null)", "UNLIMITED", "", "two words", 'a"b', "a#b", "x\\y"])
def test_a_value_that_is_no_option_is_left_out(value: str) -> None:
    assert options_of_job({"Account": value, "TimeLimit": "1:00"}) == {"time": "1:00"}
