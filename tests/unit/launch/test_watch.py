"""The watch over an attempt in a job: a warning is passed on at once, however many nodes there are."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.obs_runs import make_run
from yatt import clock
from yatt.adapters.files import files
from yatt.adapters.run_folder.ledger import STOP, record_of_attempt, write_record
from yatt.adapters.slurm.slurm import Slurm
from yatt.config.load import load_resolved
from yatt.config.site import SiteConfig
from yatt.launch.attempt import watch
from yatt.launch.attempt.follower import Followers
from yatt.launch.attempt.watch import (
    LOOK_NODES,
    LOOK_S,
    POLL_S,
    AttemptWatch,
    LostNodes,
    NodeRecords,
    StopRequest,
)
from yatt.launch.node.allocation import Allocation
from yatt.launch.resolve.plan import Component

NODES = 512


class Watched:
    """A watch over a step that lasts, on virtual time: a turn of its loop is one `POLL_S`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths = make_run(folder, launch={"nodes": NODES})
        self.signals: list[int] = []
        self.turn, self.num_read = 0, 0
        self.happens: dict[int, Callable[[], object]] = {}
        srun = folder / "bin" / "srun"
        srun.parent.mkdir()
        srun.write_text("#!/bin/sh\nexec /bin/sleep 600\n")
        srun.chmod(0o755)
        monkeypatch.setenv("PATH", str(srun.parent))  # there is no other command of Slurm
        monkeypatch.setattr(clock, "monotonic_s", lambda: 1000.0 + self.turn * POLL_S)
        monkeypatch.setattr(time, "sleep", self._sleep)
        monkeypatch.setattr(watch, "read_or_none", self._read)
        part = Component(name="all", first=0, nodes=NODES, gpus_per_node=0)
        names = tuple(f"n{index}" for index in range(NODES))
        held = Allocation(job_id="7", restarts=0, hosts={"all": names}, groups={})
        parts, slurm, site = (part,), Slurm(), SiteConfig()
        self.watch = AttemptWatch(
            load_resolved(self.paths.config), site, held,
            NodeRecords(self.paths, 1, parts, frozenset()), LostNodes(self.paths, 1, parts, held, slurm),
            StopRequest(self.paths, 1, site, "7", slurm, self.signals), Followers(self.paths, print),
        )  # fmt: skip

    def _sleep(self, seconds: float) -> None:
        self.turn += max(1, round(seconds / POLL_S))
        self.happens.pop(self.turn, lambda: None)()

    def _read(self, path: Path) -> bytes | None:
        self.num_read += path.parent.name == "controllers"
        return files.read_or_none(path)

    def run(self, turns: int) -> None:
        """Runs so many turns of the loop; then the step ends."""
        self.happens[turns] = lambda: self.watch.steps.running[0].kill() or self.watch.steps.running[0].wait()
        self.watch.run()

    def stop_noted(self) -> bool:
        return bool(record_of_attempt(self.paths, 1, STOP))


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    found = Watched(tmp_path, monkeypatch)
    yield found
    for step in found.watch.steps.running:
        step.kill()
        step.wait()


def test_a_warning_is_noted_in_the_next_turn_on_512_nodes(watched: Watched) -> None:
    noted: list[bool] = []
    watched.happens = {
        50: lambda: watched.signals.append(signal.SIGUSR2),
        51: lambda: noted.append(watched.stop_noted()), 52: lambda: noted.append(watched.stop_noted()),
    }  # fmt: skip
    watched.run(60)
    assert noted == [True, True]


def test_a_request_of_others_is_read_within_half_a_second_on_512_nodes(watched: Watched) -> None:
    known: list[str] = []
    watched.happens = {
        50: lambda: write_record(watched.paths, 1, STOP, {"reason": "cancelled"}),
        50 + round(LOOK_S / POLL_S) + 1: lambda: known.append(watched.watch.stop.reason),
    }
    watched.run(60)
    assert known == ["cancelled"]


def test_records_of_many_nodes_are_read_at_their_slow_pace(watched: Watched) -> None:
    interval = round(LOOK_S * NODES / LOOK_NODES / POLL_S)
    watched.run(3 * interval + 2)
    assert watched.num_read in (4 * NODES, 5 * NODES), "at the begin, three times, and at the end"
