"""A real Slurm cluster on this machine, for tests: `slurm/testcluster` with a Python face."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.forked.lots import as_remembered
from tests.runs import LOADED, ROOT, wait_for

SCRIPTS = ROOT / "slurm" / "testcluster"
Row = dict[str, str]


class Cluster:
    """One cluster; its nodes are n1, n2, ... Settings are those of `slurm/testcluster/up`."""

    def __init__(self, **settings: object) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="yc", dir="/tmp"))  # short: sockets lie below it
        self.settings = {name: str(value) for name, value in settings.items()}

    @property
    def env(self) -> dict[str, str]:
        """The environment in which Slurm's commands and `yatt` talk to this cluster."""
        inherited = {
            k: v
            for k, v in as_remembered(os.environ).items()
            if not k.startswith(("SLURM", "SBATCH", "SRUN"))
        }
        path = [inherited.get("PATH", ""), "/usr/sbin"]
        if other := self.settings.get("OTHER"):
            path.insert(0, f"{other}/bin")
        inherited["PATH"] = os.pathsep.join(path)
        ours = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        return {**inherited, **ours, "SLURM_CONF": str(self.root / "etc" / "slurm.conf")}

    @property
    def nodes(self) -> list[str]:
        return [f"n{i + 1}" for i in range(int(self.settings.get("NODES", "5")))]

    def up(self) -> "Cluster":
        self._script("up", settings=self.settings)
        return self

    def down(self) -> None:
        """End it and remove what it wrote."""
        self._script("down", "--wipe")
        shutil.rmtree(self.root, ignore_errors=True)

    def reset(self) -> None:
        """No jobs, no tasks, every node up and idle."""
        self._script("reset")

    def crash(self, node: str) -> None:
        """The machine dies: slurmd and all that jobs run there."""
        self._script("node", "crash", node)

    def lost(self, node: str) -> None:
        """slurmd dies; its tasks run on."""
        self._script("node", "lost", node)

    def pause(self, node: str) -> None:
        self._script("node", "pause", node)

    def unpause(self, node: str) -> None:
        self._script("node", "unpause", node)

    def start(self, node: str) -> None:
        self._script("node", "start", node)

    def ctld(self, action: str) -> None:
        """stop, kill, pause, unpause or start of slurmctld."""
        self._script("ctld", action)

    def call(self, *argv: str, cwd: Path | None = None, timeout_s: float = 60) -> str:
        """A command in this cluster; gives its standard output, without the last newline."""
        done = subprocess.run(
            argv, env=self.env, cwd=cwd or self.root, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=timeout_s * LOADED, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{argv} gave {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout.rstrip("\n")

    def sbatch(self, text: str, *arguments: str) -> int:
        """Submit a script given as text; its output goes to `job-<id>.log` in the root."""
        script = self.root / "job.sh"
        script.write_text(text)
        log = f"--output={self.root}/job-%j.log"
        return int(self.call("sbatch", "--parsable", log, *arguments, str(script)).split(";")[0])

    def log(self, job_id: int) -> str:
        path = self.root / f"job-{job_id}.log"
        return path.read_text() if path.exists() else ""

    def squeue(self) -> list[Row]:
        """Jobs that are not over, a row a component."""
        keys = ("id", "name", "partition", "state", "nodes", "reason")
        lines = self.call("squeue", "-h", "-o", "%i|%j|%P|%T|%N|%r").splitlines()
        return [dict(zip(keys, line.split("|"), strict=True)) for line in lines]

    def show_job(self, job_id: int) -> Row:
        """`scontrol show job` of a job, or of the first component of one that has several."""
        return self.components(job_id)[0]

    def components(self, job_id: int) -> list[Row]:
        lines = self.call("scontrol", "show", "job", "-o", str(job_id)).splitlines()
        return [dict(word.partition("=")[::2] for word in line.split() if "=" in word) for line in lines]

    def node_state(self, node: str) -> str:
        """As scontrol writes it: IDLE, DOWN*, MIXED+DRAIN ..."""
        text = self.call("scontrol", "show", "node", "-o", node)
        return dict(word.partition("=")[::2] for word in text.split() if "=" in word)["State"]

    def wait_state(self, job_id: int, *states: str, timeout_s: float = 60) -> Row:
        """Until the job is in one of these states; gives what `show_job` says then."""

        def reached() -> Row | None:
            row = self.show_job(job_id)
            return row if row["JobState"] in states else None

        row: Row = self._wait(reached, timeout_s=timeout_s, what=f"job {job_id} to be {'/'.join(states)}")
        return row

    def wait_node(self, node: str, state: str, *, timeout_s: float = 60) -> None:
        """Until the node's state begins so."""
        self._wait(
            lambda: self.node_state(node).startswith(state), timeout_s=timeout_s, what=f"{node} to be {state}"
        )

    def _wait(self, holds: Any, *, timeout_s: float, what: str) -> Any:
        try:
            return wait_for(holds, timeout_s=timeout_s, what=what)
        except AssertionError as late:
            raise AssertionError(f"{late}; the queue:\n{self.call('squeue')}") from None

    def _script(self, name: str, *arguments: str, settings: dict[str, str] | None = None) -> None:
        argv = [str(SCRIPTS / name), str(self.root), *arguments]
        done = subprocess.run(
            argv, env={**self.env, **(settings or {})}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(argv)} gave {done.returncode}:\n{done.stdout}{done.stderr}"
