"""sbatch queues a job, and its answer is lost: a run has one job all the same, and that job runs.

`YATT_LOST_ANSWERS` is how often each is tried.
"""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, wait_for
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SLOW_REWARD, SubmittedRun, ends
from yatt.adapters.run_folder.ledger import started_attempts

ROUNDS = int(os.environ.get("YATT_LOST_ANSWERS", "1"))
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.faults]

SBATCH = """#!/bin/bash
# The real sbatch, whose answer is lost as often as {folder}/lose has lines.
real=$(PATH=${{PATH#*:}} type -P sbatch)
answer=$("$real" "$@") || exit $?
how=$(head -n 1 {folder}/lose)
sed -i 1d {folder}/lose
echo "$how $answer" >> {folder}/lost
case $how in
  kill) kill -KILL $PPID ;;
  timeout) echo 'sbatch: error: Batch job submission failed: Socket timed out' >&2; exit 1 ;;
esac
echo "$answer"
"""


class LostAnswers:
    """An sbatch, first on the PATH, that loses its next answers in the ways of `lose`: timeout, or kill for
    the process that has called it."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder = folder / "bin"
        self.folder.mkdir()
        (self.folder / "sbatch").write_text(SBATCH.format(folder=self.folder))
        (self.folder / "sbatch").chmod(0o755)
        self.lose()
        self.path = f"{self.folder}{os.pathsep}{cluster.env['PATH']}"

    def lose(self, *how: str) -> None:
        (self.folder / "lose").write_text("".join(f"{each}\n" for each in how))

    @property
    def queued(self) -> list[tuple[str, str]]:
        """How each answer was lost, and the job that was queued."""
        lines = (self.folder / "lost").read_text().splitlines()
        return [(how, rest.split()[-1]) for how, _, rest in (line.partition(" ") for line in lines)]


@pytest.fixture
def lost(cluster: Cluster, tmp_path: Path) -> LostAnswers:
    return LostAnswers(tmp_path, cluster)


@pytest.mark.parametrize("first", ["timeout", "kill"] * ROUNDS)
def test_a_lost_answer_of_sbatch_makes_no_second_job(
    cluster: Cluster, reference, tmp_path: Path, lost: LostAnswers, first: str
) -> None:
    """A whole run: that the jobs can do their work, whose files nobody has named for them, is the subject."""
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD, requeue="chain")
    lost.lose(first)
    submitted = run.yatt("submit", str(run.config), "--site", str(run.site), PATH=lost.path)
    ((_, job),) = lost.queued
    if first == "kill":
        assert submitted.returncode == -signal.SIGKILL
        again = run.yatt("submit", str(run.config), "--site", str(run.site), PATH=lost.path)
        assert f"job {job} of this run is" in again.stderr, again.stderr
    else:
        assert submitted.returncode == 0, submitted.stderr
        assert f"submitted job {job}" in submitted.stdout
    run.wait_step(1)
    lost.lose("timeout")
    joined = run.yatt("join", "--nodes", "1", str(run.paths.root), PATH=lost.path)
    assert f"submitted job {lost.queued[-1][1]}" in joined.stdout, joined.stderr
    run.wait_step(2)
    lost.lose("timeout")
    os.kill(run.launcher, signal.SIGUSR2)
    run.wait_attempts(2)
    run.hurry()
    successor = started_attempts(run.paths)[1].started["job"]
    run.wait_finished(successor)
    wait_for(lambda: cluster.squeue() == [], timeout_s=60, what="no job to be left")
    assert [how for how, _ in lost.queued] == [first, "timeout", "timeout"], "and no job beside these"
    assert lost.queued[-1] == ("timeout", successor)
    assert [code for code, _ in ends(run.paths)] == [75, 0]
    run.check(reference)


@pytest.mark.parametrize("_round", range(ROUNDS))
def test_a_lost_answer_of_sbatch_makes_no_second_job_of_a_sweep(
    cluster: Cluster, tmp_path: Path, lost: LostAnswers, _round: int
) -> None:
    """Three whole runs, for the same reason."""
    run = SubmittedRun(cluster, tmp_path, {"trainer": {"total_iterations": 1}})
    lost.lose("timeout", "timeout", "timeout")
    sweep = "trainer.total_iterations=1,2,3"
    done = run.yatt("submit", str(run.config), "--site", str(run.site), "--sweep", sweep, PATH=lost.path)
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = [job for _, job in lost.queued]
    assert [f"submitted job {job}" in done.stdout for job in jobs] == [True] * 3
    wait_for(lambda: cluster.squeue() == [], timeout_s=240, what="the sweep to be over")
    assert {cluster.show_job(int(job))["JobState"] for job in jobs} == {"COMPLETED"}


def test_the_successor_of_a_persons_own_script_has_its_options(
    cluster: Cluster, reference, tmp_path: Path
) -> None:
    """A whole run: the successor has to train on. Then one that cannot begin is told by `yatt status`."""
    run = SubmittedRun(cluster, tmp_path, reward=SLOW_REWARD, requeue="chain")
    prepared = run.yatt("submit", "--prepare", str(run.config), "--site", str(run.site))
    assert prepared.returncode == 0, prepared.stderr
    script = str(ROOT / "slurm" / "train-het.sbatch")
    (name,) = [word for word in prepared.stdout.split() if word.startswith("--job-name=yatt-")]
    path = f"PATH={Path(sys.executable).parent}{os.pathsep}{cluster.env['PATH']}"
    options = ("--time=9", "--no-requeue")
    first = cluster.call("env", path, "sbatch", "--parsable", name, *options, script, str(run.paths.root))
    run.wait_step(2)
    os.kill(run.launcher, signal.SIGUSR2)
    run.wait_attempts(2)
    run.hurry()
    successor = started_attempts(run.paths)[1].started["job"]
    assert successor != first
    shown = cluster.show_job(int(successor))
    assert (shown["JobName"], shown["TimeLimit"]) == (name.partition("=")[2], "00:09:00")
    run.wait_finished(successor)
    run.check(reference)
