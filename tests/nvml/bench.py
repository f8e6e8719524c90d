"""One node's arbiter over small real processes that hold as much device memory as they are told to."""

import asyncio
import atexit
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile

from tests.obs_runs import make_run
from tests.runs import HANG_S
from yatt.adapters.machine.nvml import visible_devices
from yatt.config.load import load_resolved
from yatt.control.gpus.arbiter import Arbiter, Holding
from yatt.control.gpus.processes.supervisor import Supervisor
from yatt.control.node import Node
from yatt.core.gpus.placement import ROLLOUT, TRAINER, genrm_role, placement_of
from yatt.obs.story.events import EventLog

MIB = 1 << 20
JUDGE = genrm_role("judge")


async def hold(orders, pid, size):
    """Let a process hold so many bytes; returns once it does."""
    (orders / f".{pid}").write_text(str(size))
    os.replace(orders / f".{pid}", orders / str(pid))
    done = orders / f"{pid}.done"
    while not done.exists() or done.read_text() != str(size):
        await asyncio.sleep(0.01)


def short_folder() -> str:
    """Sockets lie in it, and their paths have few bytes."""
    folder = tempfile.mkdtemp(prefix="y-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class Bench:
    """Args: `orders` is where processes are told; `user` the module they run; `lease` its section. With
    `wide` there are two GPUs, and a GenRM that needs both; `computes`: awake processes have done work."""

    def __init__(
        self,
        tmp_path,
        orders,
        *,
        user="tests.nvml.gpu_user",
        device="0",
        awake=4096 * MIB,
        asleep=0,
        cpus=(),
        wide=False,
        computes=True,
        **lease,
    ):
        timing = {
            "release_s": 20.0,
            "term_s": 0.5,
            "kill_s": 60.0,
            "memory_check_s": 0.6,
            "slack_bytes": 64 * MIB,
        }
        num_gpus = 2 if wide else 1
        judge = {"name": "judge", "model": "/models/judge", "template": "{prompt}", "tp_size": 2,
                 "verdict": {"pattern": "([0-9])"}}  # fmt: skip
        paths = make_run(
            tmp_path, lease={**timing, **lease}, genrms=[judge] if wide else [],
            launch={"scratch_dir": short_folder(), "gpus_per_node": num_gpus, "nurseries": False},
        )  # fmt: skip
        config = load_resolved(paths.config)
        self.orders, self.lines, self.quarantined, self.taken_back = orders, [], [], []
        self.awake, self.computes = awake, computes
        self.node = Node(
            config=config, paths=paths, placement=placement_of(config), attempt=1, index=0,
            host="127.0.0.1", device="cuda", devices=visible_devices(device, num_gpus),
            cpus=cpus,
        )  # fmt: skip
        self.node.scratch.mkdir()
        self.slab = self.node.slabs[0]
        self.asleep = {TRAINER: asleep, ROLLOUT: asleep, JUDGE: asleep}
        events = EventLog(attempt=1, node=0, role="controller", sink=self.lines.append)
        self.supervisor = Supervisor(self.node, events)
        for worker in self.supervisor.workers.values():
            worker.argv = (user,)
        self.arbiter = Arbiter(
            self.node, self.supervisor, events,
            Holding(self._wake, self._sleep, self._restart, self.taken_back.append),
            lambda error, _: self.quarantined.append(error.partition(" is quarantined: ")[2]),
        )  # fmt: skip

    def pid(self, role):
        return next(w for w in self.supervisor.of(role, self.slab)).process.child.pid

    def told(self, kind):
        return [event for line in self.lines if (event := json.loads(line))["kind"] == kind]

    async def give(self, role, limit_s=HANG_S):
        self.arbiter.want(self.slab, role)
        await self.arbiter.settled(self.slab, role, limit_s)

    async def _wake(self, slab, role, token):
        for worker in self.supervisor.of(role, slab):
            await self._restart(worker, token)

    async def _restart(self, worker, token):
        await self.supervisor.start(worker)
        worker.process.is_asleep, worker.process.has_computed = False, self.computes
        await hold(self.orders, worker.process.child.pid, self.awake)

    async def _sleep(self, slab, role, token, _release_s):
        for worker in self.supervisor.of(role, slab):
            await hold(self.orders, worker.process.child.pid, self.asleep[role])
            worker.process.is_asleep = True

    async def _watch_exits(self):
        while True:
            worker, _ = await self.supervisor.exits.get()
            self.arbiter.died(worker)

    @contextlib.asynccontextmanager
    async def running(self):
        beat = asyncio.gather(self.arbiter.run(), self._watch_exits())
        try:
            yield self
        finally:
            beat.cancel()
            await asyncio.gather(beat, return_exceptions=True)
            await self.supervisor.close(1.0)


@contextlib.contextmanager
def stranger(user="tests.nvml.gpu_user"):
    """A process of somebody else on GPU 0."""
    process = subprocess.Popen([sys.executable, "-m", user], env={"CUDA_VISIBLE_DEVICES": "0", **os.environ})
    try:
        yield process
    finally:
        process.kill()
        process.wait(HANG_S)
