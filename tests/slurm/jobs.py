"""Submitted runs for tests: the command as a user types it, on a real cluster, and what must hold after each.

The run: 2 trainer nodes and 2 engine nodes, a tiny policy, deterministic. Trainer and engine follow a script,
since the subject is Slurm: every sample decides all of the state (adr/0073), and a start costs no imports of
torch. `test_forms.py` has the real trainer.
"""

import contextlib
import hashlib
import json
import re
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.runs import LOADED, ROOT, RunFile, command, living, rows, run_to_end, wait_for
from tests.slurm.cluster import Cluster
from yatt.adapters.files.files import temporary_files, unsealed_any
from yatt.adapters.run_folder.ledger import newest_attempt, run_is_finished, started_attempts
from yatt.adapters.slurm.job_note import noted_job
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.pieces import checksum
from yatt.checkpoint.store.store import FolderStore
from yatt.obs.metrics import STEP, comparable_results
from yatt.paths import RunPaths

ITERATIONS = 12
HET = {
    "launch": {"nodes": 4, "node_silence_s": 6.0},
    "placement": {"mode": "disaggregated", "trainer_nodes": 2},
    "trainer": {"total_iterations": ITERATIONS},
    "model": {"trainer": "scripted"},
}


SLOW_REWARD = """
import time
from pathlib import Path


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    folder = Path(__file__).parent
    if not (folder / "hurry").exists():
        time.sleep(0.2)
    while (folder / "hold").exists():
        time.sleep(0.05)
    return sum(c in "abcdefghijklm" for c in solution_str) / 8
"""
"""The reward of `tests.runs`, with eight completions in about 1.6 s until `SubmittedRun.hurry`; it waits in
`SubmittedRun.held`."""


PACED_REWARD = SLOW_REWARD.replace("sleep(0.2)", "sleep(0.05)")
"""Saves and iterations of a tiny run take no time: a test that disturbs it must come before its end."""


class SubmittedRun:
    """One run on a cluster. `site` is laid over configs/sites/testcluster.yaml.

    Args:
        reward: the text of the user's reward function.
    """

    def __init__(
        self, cluster: Cluster, folder: Path, settings: dict[str, Any] | None = None,
        reward: str = PACED_REWARD, **site: Any,
    ) -> None:  # fmt: skip
        self.cluster = cluster
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "reward.py").write_text(reward)
        merged = {**HET, **(settings or {})}
        for section, values in HET.items():
            merged[section] = {**values, **(settings or {}).get(section, {})}
        self.file = RunFile(folder, merged)
        self.paths = RunPaths(Path(merged.get("run", {}).get("dir", self.file.run_dir)))
        self.site = folder / "site.yaml"
        self.config = self.file.write()
        content = yaml.safe_load((ROOT / "configs" / "sites" / "testcluster.yaml").read_text())
        self.site.write_text(yaml.safe_dump({**content, **site}))

    def yatt(
        self, *arguments: str, timeout_s: float = 120, **more: str
    ) -> "subprocess.CompletedProcess[str]":
        """The command as a user of the cluster types it; `more` is for its environment."""
        env = {**self.cluster.env, "XDG_STATE_HOME": str(self.file.folder / "state"), **more}
        return run_to_end(command(*arguments), env=env, timeout_s=timeout_s * LOADED)

    def submit(self) -> str:
        """`yatt submit`; gives the job's id."""
        done = self.yatt("submit", str(self.config), "--site", str(self.site))
        assert done.returncode == 0, done.stdout + done.stderr
        return re.search(r"job (\d+)", done.stdout)[1]

    def refused(self, **environment: str) -> str:
        """`yatt submit` that must be refused and leave nothing behind; gives the message."""
        before = sorted(self.file.folder.rglob("*"))
        done = self.yatt("submit", str(self.config), "--site", str(self.site), **environment)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        assert self.cluster.squeue() == []
        assert sorted(self.file.folder.rglob("*")) == before
        return done.stderr

    @property
    def job_id(self) -> str:
        """Of the noted job; empty if there is none."""
        noted = noted_job(self.paths)
        return noted.job if noted else ""

    def controller_is_there(self) -> None:
        """Until the steps of the first two nodes run, which see to a launcher's death."""

        def both() -> bool:
            attempt = newest_attempt(self.paths)
            return all(self.paths.controller_record(attempt, node).exists() for node in (0, 1))

        self._wait(both, 90, "the first two nodes' steps")

    def hurry(self) -> None:
        """Iterations of a run with `SLOW_REWARD` are as fast as they can be from now on."""
        (self.file.folder / "hurry").touch()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The run stands still in an iteration, however long the commands of a test take."""
        hold = self.file.folder / "hold"
        hold.touch()
        yield
        hold.unlink()

    @property
    def launcher(self) -> int:
        """Pid of the newest attempt's launcher."""
        return int(started_attempts(self.paths)[-1].started["pid"])

    def wait_attempts(self, number: int, timeout_s: float = 90) -> None:
        """Until so many attempts have begun."""
        self._wait(lambda: len(started_attempts(self.paths)) >= number, timeout_s, f"attempt {number}")

    def wait_said(self, text: str, timeout_s: float = 90) -> None:
        """Until the launcher has said so in its log."""
        self._wait(lambda: text in self.launcher_log(), timeout_s, f"the launcher to say {text!r}")

    # ---- looking ----------------------------------------------------------------------------

    def step(self) -> int:
        """The newest iteration with a line in metrics."""
        return max((row[STEP] for row in rows(self.paths.metrics)), default=0)

    def wait_step(self, step: int, timeout_s: float = 90) -> None:
        self._wait(lambda: self.step() >= step, timeout_s, f"iteration {step}")

    def wait_finished(self, job_id: str, timeout_s: float = 150) -> None:
        """Until the run is finished and its job completed."""

        def over() -> bool:
            is_finished = run_is_finished(self.paths)
            return is_finished and self.cluster.show_job(int(job_id))["JobState"] == "COMPLETED"

        self._wait(over, timeout_s, "the run to finish")

    def wait_event(self, kind: str, timeout_s: float = 60, **fields: Any) -> dict[str, Any]:
        """Until an event of this kind with these fields is there."""
        found: dict[str, Any] = self._wait(
            lambda: next(iter(self.events(kind, **fields)), None), timeout_s, f"the event {kind} {fields}"
        )
        return found

    def events(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        return [
            event
            for event in rows(self.paths.events)
            if event["kind"] == kind and all(event.get(k) == v for k, v in fields.items())
        ]

    def pid(self, worker: str) -> int:
        """Of a worker's newest process."""
        return int([e for e in self.events("worker.start") if e["worker"].startswith(worker)][-1]["pid"])

    def controller(self, node: int) -> int:
        """Pid of a node's controller in the newest attempt."""
        entry = self.paths.controller_record(newest_attempt(self.paths), node)
        return int(json.loads(entry.read_text().partition(" ")[2])["pid"])

    def launcher_log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.paths.submitit.glob("*.out")))

    def restarts(self, job_id: str) -> int:
        return int(self.cluster.show_job(int(job_id))["Restarts"])

    def _wait(self, holds: Any, timeout_s: float, what: str) -> Any:
        try:
            return wait_for(holds, timeout_s=timeout_s, what=what)
        except AssertionError as late:
            logs = [p.read_text()[-1500:] for p in sorted((self.paths.latest / "logs").glob("node*.log"))]
            raise AssertionError(f"{late}\n{self.launcher_log()}\n" + "\n".join(logs)) from None

    # ---- what must hold after every case -------------------------------------------------------

    def check(self, reference: dict[str, Any], *, dead: Collection[int] = ()) -> None:
        """The invariants: a lineage of whole checkpoints, one line an iteration, nothing left behind, and the
        same results as the run that nothing happened to."""
        assert run_is_finished(self.paths)
        self.check_checkpoints()
        self.check_leases()
        self.check_nothing_left(dead)
        assert metrics_of(self.paths) == reference["metrics"]
        assert weights_of(self.paths) == reference["weights"]

    def check_checkpoints(self) -> None:
        store = FolderStore(self.paths.root / "checkpoints")
        names = sorted(store.names("manifests"))
        steps = [int(name.partition(".")[0]) for name in names]
        found = Checkpoints(store, 0).newest()
        assert found.manifest is not None
        assert found.skipped == ()
        assert len(steps) - len(found.stale) == len(set(steps)), "one committed manifest a step"
        for name in set(f"manifests/{name}" for name in names) - set(found.stale):
            for file in Checkpoints(store, 0).read(name).files:
                data = store.read(file.path, most_bytes=file.size_bytes)
                assert checksum(data) == file.checksum, f"{name}: {file.path}"

    def check_leases(self) -> None:
        """Tokens of a slab rise, and a grant follows only what was given up or lost. A later life of a node's
        controller counts anew."""
        tokens: dict[tuple[int, str], int] = {}
        for event in rows(self.paths.events):
            if event["kind"] == "node.lost":
                slabs = re.compile(rf"n{event['node']}s\d+")
                tokens = {key: token for key, token in tokens.items() if not slabs.fullmatch(key[1])}
            if event["kind"] == "lease.grant":
                key = (event["attempt"], event["slab"])
                assert event["token"] > tokens.get(key, 0), f"{event} after token {tokens.get(key)}"
                tokens[key] = event["token"]

    def check_nothing_left(self, dead: Collection[int]) -> None:
        """But on the nodes `dead`, whose machines were lost with all that was on them."""
        wait_for(lambda: not living(self.paths.root), what=f"no process of {self.paths.root}")
        lost = set()
        for node in dead:
            for record in (self.paths.root / "attempts").glob(f"*/local/{node}*"):
                noted = unsealed_any(record.read_bytes()) or {}
                lost |= {Path(folder).name for folder in noted["folders"]}
        kept = [name for name in self.file.leftovers() if name not in lost]
        assert kept == [], "sockets or shared memory were left"
        assert temporary_files(self.paths.root) == [], "files half written"


def metrics_of(paths: RunPaths) -> list[dict[str, Any]]:
    """What must be equal between two runs with the same results; each iteration once, in order."""
    found = rows(paths.metrics)
    assert [row[STEP] for row in found] == list(range(1, len(found) + 1))
    return [comparable_results(row) for row in found]


def weights_of(paths: RunPaths) -> dict[str, str]:
    """SHA-256 of every tensor file of the trained model."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths.model.glob("*.safetensors")
    }


def ends(paths: RunPaths) -> list[tuple[int | None, str]]:
    """How each attempt ended, as the ledger has it."""
    return [(a.ended.get("exit_code"), str(a.ended.get("reason", ""))) for a in started_attempts(paths)]
