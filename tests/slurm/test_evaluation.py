"""An evaluation as a job: its result is that of this machine, whatever Slurm does to its nodes."""

import re
import shutil
from pathlib import Path

import pytest

from tests.runs import NUM_PROMPTS, yatt
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SLOW_REWARD, SubmittedRun, ends
from tests.slurm.test_lost_machines import hosts
from tests.tiny_models import make_scripted_model
from yatt.adapters.run_folder.ledger import run_is_finished, started_attempts
from yatt.paths import RunPaths

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.faults]

HIGH = "#!/bin/bash\nsleep 6\n"


class SubmittedEvaluation(SubmittedRun):
    """An evaluation of a scripted policy, with a function that can be held and a GenRM with engines."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        judge = make_scripted_model(folder / "judge", mean_tokens=3)
        (folder / "judge/model.safetensors").write_bytes(b"")
        section = {"name": "judge", "model": judge, "template": "{prompt}{completion}", "engine": "scripted",
                   "verdict": {"pattern": "([a-m])", "scores": {}}, "max_tokens": 8, "max_model_tokens": 64,
                   "on_unparsable": "score", "unparsable_score": 0.5}  # fmt: skip
        settings = {"genrms": [section], "placement": {"genrm_gpu_sets": 1}}
        super().__init__(cluster, folder, settings, SLOW_REWARD)
        self.paths = RunPaths(folder / "submitted.run")

    def words(self, out: str, *more: str) -> list[str]:
        folder = self.file.folder
        return [
            "eval", str(folder / "policy"), str(folder / "train.jsonl"), "--like", str(self.config),
            "--out", str(folder / out), *more,
        ]  # fmt: skip

    def submit(self, *more: str) -> str:
        done = self.yatt(*self.words("submitted", "--submit", str(self.site), *more))
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"the result will be in {self.file.folder / 'submitted'}" in done.stdout
        return re.search(r"job (\d+)", done.stdout)[1]

    def result(self, out: str) -> dict[str, bytes]:
        folder = self.file.folder / out
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}

    def check_result(self, *, dead: tuple[int, ...] = ()) -> None:
        """It is that of one machine, to the byte, and nothing is left."""
        assert run_is_finished(self.paths)
        self.check_leases()
        self.check_nothing_left(dead)
        self.hurry()
        here = yatt(*self.words("here"))
        assert here.returncode == 0, here.stderr
        assert self.result("submitted").keys() == {"samples.jsonl", "result.json"}
        assert self.result("submitted") == self.result("here")

    def wait_kept(self, least: int) -> None:
        """Until so many groups are kept in the run folder."""

        def num_kept() -> int:
            return sum(path.read_bytes().count(b"prompt_text") for path in self.paths.kept_groups.glob("*"))

        self._wait(lambda: num_kept() >= least, 90, f"{least} groups")


PLACEMENTS = {
    "in turns": (),
    "beside each other": ("placement.mode=partial", "placement.genrm_gpu_sets=1"),
    "disaggregated": (
        "placement.mode=disaggregated", "placement.trainer_nodes=1", "placement.genrm_gpu_sets=1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_job_writes_what_one_machine_writes(cluster: Cluster, tmp_path: Path, placement: str) -> None:
    """A whole run in each placement: Slurm's steps, nodes without GPUs, and the result of all of them."""
    run = SubmittedEvaluation(cluster, tmp_path)
    run.hurry()
    nodes = "3" if placement == "disaggregated" else "2"
    job_id = run.submit("--nodes", nodes, *PLACEMENTS[placement])
    assert "submitted.run" in run.yatt("list").stdout
    run.wait_finished(job_id)
    told = run.yatt("status", str(run.paths.root)).stdout
    prompts = f"{NUM_PROMPTS} of {NUM_PROMPTS}"
    assert f"prompts     {prompts} sampled" in told, told
    assert (f"{prompts} judged by judge" in told) is (placement == "in turns"), "else beside sampling"
    assert "iteration" not in told and "checkpoint" not in told
    again = run.yatt(*run.words("submitted", "--submit", str(run.site)))
    assert again.returncode == 2 and "exists already and is not an empty folder" in again.stderr
    over = run.yatt("resume", str(run.paths.root))
    assert over.returncode == 0 and "is finished: nothing to do" in over.stdout, over.stderr
    run.check_result()
    shutil.rmtree(tmp_path / "submitted")
    gone = run.yatt(
        *run.words("submitted", "--submit", str(run.site), "--nodes", nodes, *PLACEMENTS[placement])
    )
    assert gone.returncode == 2 and "its result is not in" in gone.stderr, "not a silent success"


def test_a_preempted_evaluation_goes_on_with_the_groups_that_it_has(cluster: Cluster, tmp_path: Path) -> None:
    """A whole run: what is kept must come through a requeue."""
    run = SubmittedEvaluation(cluster, tmp_path)
    job_id = run.submit("--nodes", "2")
    run.wait_kept(10)
    cluster.sbatch(HIGH, "--partition=high", "--nodes=5", "--exclusive")
    run.wait_attempts(2)
    run.hurry()
    run.wait_finished(job_id)
    assert [code for code, _ in ends(run.paths)] == [75, 0] and run.restarts(job_id) == 1
    reused = [number for event in run.events("groups.reuse", attempt=2) for number in event["numbers"]]
    assert len(set(reused)) == len(reused) >= 8, "what was scored before is not sampled again"
    run.check_result()


def test_a_lost_engine_node_costs_an_evaluation_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """A whole run: a machine that dies takes its controller and its engines along."""
    run = SubmittedEvaluation(cluster, tmp_path)
    job_id = run.submit("--nodes", "4", *PLACEMENTS["disaggregated"])
    run.wait_kept(5)
    node = hosts(run)[2]
    cluster.crash(node)
    assert run.wait_event("node.lost", node=2)["goes_on"] is True
    cluster.wait_node(node, "DOWN")  # later, Slurm knows too, and keeps the job
    assert cluster.show_job(int(job_id))["JobState"] == "RUNNING"
    run.hurry()
    run.wait_finished(job_id)
    assert len(started_attempts(run.paths)) == 1 and run.restarts(job_id) == 0
    run.check_result(dead=(2,))


def test_a_cancelled_evaluation_is_continued_by_the_same_command(cluster: Cluster, tmp_path: Path) -> None:
    """A whole run: the second job is another submission in the same folder."""
    run = SubmittedEvaluation(cluster, tmp_path)
    run.submit()
    run.wait_kept(5)
    twice = run.yatt(*run.words("submitted", "--submit", str(run.site)))
    assert twice.returncode == 2 and "already; see `yatt status" in twice.stderr
    assert "--take-over" not in twice.stderr, "an option that `yatt eval` does not have"
    cancelled = run.yatt("cancel", str(run.paths.root))
    assert cancelled.returncode == 0, cancelled.stderr
    run._wait(lambda: cluster.squeue() == [], 60, "the job to end")
    assert not (tmp_path / "submitted").exists()
    resumed = run.yatt("resume", str(run.paths.root))
    assert resumed.returncode == 2 and "is for `yatt eval`: repeat that command" in resumed.stderr
    run.hurry()
    run.wait_finished(run.submit())
    assert run.events("groups.reuse", attempt=2) != []
    run.check_result()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--submit", "{site}"), "--submit: write --out FOLDER"),
        (("--submit", "{site}", "--out", "{out}", "--nodes", "99"), "nodes"),
        (("--submit", "{site}.none", "--out", "{out}"), "site.yaml.none"),
    ],
)
def test_what_cannot_be_submitted_is_refused_by_a_sentence(
    cluster: Cluster, tmp_path: Path, more: tuple[str, ...], says: str
) -> None:
    """Not a whole run, but the whole check before one, with what this cluster says of itself."""
    run = SubmittedEvaluation(cluster, tmp_path)
    words = [word for word in run.words("x") if word not in ("--out", str(tmp_path / "x"))]
    named = [each.format(site=run.site, out=tmp_path / "submitted") for each in more]
    done = run.yatt(*words, *named)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert cluster.squeue() == [] and not run.paths.root.exists()
