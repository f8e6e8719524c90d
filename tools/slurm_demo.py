"""`make slurm-demo`: runs the quickstart twice as a Slurm job, on a real Slurm with five virtual nodes. The
first run is not disturbed. A job of higher priority preempts the second run, which must be requeued
automatically with the same job id, and end with exactly the same parameters.

    .venv/bin/python tools/slurm_demo.py
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quickstart import CONFIG, ROOT, RUNS, YATT, call, lines, make_models, verdict

OVERLAY, SITE = "configs/quickstart-slurm.yaml", "configs/sites/testcluster.yaml"
TESTCLUSTER = ROOT / "slurm" / "testcluster"
SETTINGS = {"NODES": "5", "GRACE": "30", "KILLWAIT": "5", "SLURMD_TIMEOUT": "60", "CREDEXP": "5"}
PREEMPT_AT_ITERATION = 6
SHOWN_EVERY = 4
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
POLL_S, LIMIT_S = 1.0, 900.0
URGENT = "#!/bin/bash\nsleep 5\n"


@dataclass
class Run:
    """One submitted run, and the job that preempts it if `is_preempted`."""

    folder: Path
    env: dict[str, str]
    is_preempted: bool
    job: str = ""
    urgent: str = ""
    shown: list[object] = field(default_factory=list)
    said: int = 0
    began_s: float = field(default_factory=time.monotonic)

    def to_the_end(self) -> dict[str, Any]:
        """Submits the run and follows it; returns the last output of `yatt status`."""
        shutil.rmtree(self.folder, ignore_errors=True)
        settings = [CONFIG, OVERLAY, "--site", SITE, f"run.dir={self.folder}"]
        submitted = self.ask(YATT, "submit", *settings)
        self.say(submitted.splitlines()[0])
        self.job = re.findall(r"job (\d+)", submitted)[0]
        while time.monotonic() < self.began_s + LIMIT_S:
            status = json.loads(self.ask(YATT, "status", "--json", str(self.folder)))
            self.show(status)
            urgent = self.state_of_urgent()
            if status["job"]["state"] in OVER and urgent in ("", *OVER):
                return status
            if self.is_preempted and not urgent and status["iteration"] >= PREEMPT_AT_ITERATION:
                self.preempt()
            time.sleep(POLL_S)
        sys.exit(f"{self.folder} did not end in {LIMIT_S:g} s; see {self.folder}/latest/logs")

    def preempt(self) -> None:
        """Submits a job of higher priority that needs three of the five nodes."""
        script = Path(self.env["XDG_STATE_HOME"]) / "urgent.sh"
        script.write_text(URGENT)
        asked = ["--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null", "--parsable"]
        self.urgent = self.ask("sbatch", *asked, str(script)).strip()
        self.say(f"--- job {self.urgent} of partition high wants 3 of the 5 nodes; the run holds 4 ---")

    def state_of_urgent(self) -> str:
        """State of the preempting job; empty if there is none."""
        if not self.urgent:
            return ""
        state = re.findall(r"JobState=(\w+)", self.ask("scontrol", "show", "job", self.urgent))[0]
        self.note("urgent", state, f"job {self.urgent} of partition high is {state}")
        return state

    def show(self, status: dict[str, Any]) -> None:
        """Prints changes of the status, and new lines of the launcher from the job's log."""
        for line in self.launcher_said():
            self.say(f"    launcher: {line}")
        job, at = status["job"], status["iteration"]
        text = f"job {job['job_id']} {job['state']}, attempt {status['attempt']}, "
        text += f"iteration {at}/{status['total_iterations']} ({status['phase']})"
        why = f": {job['why']}" if job["why"] else ""
        self.note("run", (job["state"], status["attempt"], at // SHOWN_EVERY), text + why)

    def launcher_said(self) -> list[str]:
        """New log lines of the launcher, without their timestamps."""
        logs = sorted((self.folder / "submitit").glob("*_log.out"))
        said = [x for log in logs for x in re.findall(r"^\S+ yatt: (.*)$", log.read_text(), re.MULTILINE)]
        new, self.said = said[self.said :], len(said)
        return new

    def note(self, about: str, key: object, text: str) -> None:
        """Prints the text if the key for this subject changed."""
        if (about, key) not in self.shown:
            self.shown = [*(known for known in self.shown if known[0] != about), (about, key)]
            self.say(text)

    def say(self, text: str) -> None:
        """Prints one line with the seconds since this run began."""
        print(f"{time.monotonic() - self.began_s:5.0f} s  {text}", flush=True)

    def ask(self, *argv: str) -> str:
        """Returns a command's output; if the command fails, ends the demonstration and prints the output."""
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode:
            sys.exit(f"{' '.join(argv)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout


def main() -> int:
    """Runs the whole demonstration; returns 0 if all checks pass."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: sys.exit("told to end"))
    make_models()
    began_s = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="yd", dir="/tmp"))  # short, because paths of sockets are limited
    try:
        print(f"starting a Slurm of five virtual nodes in {root}", flush=True)
        env = _environment(root)
        subprocess.run([TESTCLUSTER / "up", root], env={**env, **SETTINGS}, check=True)
        print("\nthe reference: nothing happens to it", flush=True)
        reference = Run(RUNS / "slurm-reference", env, is_preempted=False)
        undisturbed = reference.to_the_end()
        print("\nthe same, but a job of higher priority comes", flush=True)
        run = Run(RUNS / "slurm", env, is_preempted=True)
        status = run.to_the_end()
        call([YATT, "report", str(run.folder)])
        return _judge(run, status, reference, undisturbed, time.monotonic() - began_s)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by `down`, which must not be interrupted
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.run([TESTCLUSTER / "down", root, "--wipe"], check=False)
        shutil.rmtree(root, ignore_errors=True)


def _environment(root: Path) -> dict[str, str]:
    """Environment in which Slurm's commands use this cluster; the user's own list of runs is not changed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SRUN"))}
    state = root / "state"
    state.mkdir()
    return {**kept, "SLURM_CONF": str(root / "etc" / "slurm.conf"), "XDG_STATE_HOME": str(state)}


def _judge(
    run: Run, status: dict[str, Any], reference: Run, undisturbed: dict[str, Any], seconds: float
) -> int:
    events = lines(run.folder / "events.jsonl")
    trained = [e["iteration"] for e in events if e["kind"] == "phase.end" and e["phase"] == "train"]
    saved = max(
        (e["iteration"] for e in events if (e["kind"], e["attempt"]) == ("ckpt.commit", 1)), default=0
    )
    resumed = sum(e["iteration"] for e in events if (e["kind"], e["attempt"]) == ("attempt.resume", 2))
    every = list(range(1, status["total_iterations"] + 1))
    rows = [row["training/global_step"] for row in lines(run.folder / "metrics.jsonl")]
    job, urgent = status["job"], run.state_of_urgent()
    states = f"{undisturbed['job']['state']}, {job['state']}, {urgent or 'never submitted'}"
    once, weights = f"each of {len(every)} iterations", _weights(run.folder)
    checks = {
        f"job {job['job_id']} is still the one that was submitted": job["job_id"] == run.job,
        f"requeued exactly once: Restarts={job['restarts']}": job["restarts"] == 1 and status["attempt"] == 2,
        f"resumed from iteration {resumed}, where attempt 1 had saved last": resumed == saved,
        f"nothing lost: {once} trained once": trained == every,
        f"{once} has its line in metrics.jsonl, once": [r for r in rows if r] == every,
        f"same parameters as undisturbed: {weights}": bool(weights) and weights == _weights(reference.folder),
        f"reference, run and preempting job: {states}": states == ", ".join(["COMPLETED"] * 3),
        f"{seconds:.0f} s": True,
    }
    return verdict(checks)


def _weights(folder: Path) -> str:
    """SHA-256 of all tensor files of the trained model; empty if there are none."""
    files = sorted((folder / "model").glob("*.safetensors"))
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return hashlib.sha256("".join(digests).encode()).hexdigest() if digests else ""


if __name__ == "__main__":
    sys.exit(main())
