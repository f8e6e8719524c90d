"""Proof that a slab is free: measured memory against what its sleeping workers may keep.

Two measures behind one small interface, chosen by the device alone: NVML where there are GPUs,
resident memory where slots stand for them. A sleeping worker's *sleeping memory* is what it was seen to keep
after its first sleep. It is pinned: later growth is a leak, and no grant is given over it. Engines on CPU are
the exception: their sleep frees nothing, so their sleeping memory is what they had when they fell asleep.
"""

from collections.abc import Iterable
from typing import Protocol

from yatt import clock
from yatt.adapters.memory import ProcessGroups
from yatt.adapters.nvml import Nvml, Occupancy, process_name, sees_host_pids
from yatt.control.gpus.supervisor import Supervisor
from yatt.control.gpus.worker_plan import Worker
from yatt.control.node import Node
from yatt.core.lease import Proof
from yatt.core.placement import TRAINER, Slab
from yatt.errors import WorkerFailed


class MemoryCheck(Protocol):
    """Measures what workers keep on a slab."""

    def weigh(self, worker: Worker) -> int:
        """Bytes a worker has now."""
        ...

    def learn(self, worker: Worker) -> None:
        """A worker has just gone to sleep, and `check` comes next: what it keeps is its sleeping memory."""
        ...

    def check(self, slab: Slab, wanted: str) -> Proof:
        """Whether the slab is free for `wanted`; '' for nobody."""
        ...

    def offenders(self, slab: Slab, wanted: str) -> list[Worker]:
        """The sleepers that keep more than they may; all of them where that cannot be told apart."""
        ...


def memory_check_for(node: Node, supervisor: Supervisor) -> MemoryCheck:
    """The measure of this node's device.

    Raises:
        ConfigError: there are to be GPUs, and NVML cannot measure them.
    """
    if node.device == "cuda":
        return GpuMemoryCheck(node, supervisor, Nvml(node.devices), sees_pids=sees_host_pids())
    return SlotMemoryCheck(node, supervisor)


class SlotMemoryCheck:
    """Without GPUs: the resident memory of each sleeping worker's process group."""

    def __init__(self, node: Node, supervisor: Supervisor) -> None:
        self._node, self._supervisor, self._process_groups = node, supervisor, ProcessGroups()
        self._sleeping_bytes: dict[str, int] = {}
        self._just_asleep: set[str] = set()

    def weigh(self, worker: Worker) -> int:
        """Resident bytes of a worker's processes now."""
        if worker.child is None:
            return 0
        return self._process_groups.resident_bytes([worker.child.pid], clock.monotonic_s())[worker.child.pid]

    def learn(self, worker: Worker) -> None:
        """On CPU an engine's sleep frees nothing, so all it has is its sleeping memory, measured anew each
        time, since its kernels' caches grow with every new batch shape. A trainer rank does free its
        storages and may keep what it had before it built anything.

        Taken from the next measurement: one pass over all processes of the machine tells both."""
        if worker.role != TRAINER and worker.child is not None:
            self._just_asleep.add(worker.address)

    def check(self, slab: Slab, wanted: str) -> Proof:
        """Each sleeper by itself."""
        for worker, used, allowed in self._over(slab, wanted):
            return Proof(False, keeps(worker, used, allowed))
        return Proof(True)

    def offenders(self, slab: Slab, wanted: str) -> list[Worker]:
        """Told apart by process group."""
        return [worker for worker, _, _ in self._over(slab, wanted)]

    def _over(self, slab: Slab, wanted: str) -> list[tuple[Worker, int, int]]:
        """Sleepers above their allowance: worker, bytes it keeps, bytes it may keep."""
        slack = self._node.config.lease.slack_bytes
        sleepers = _by_group(w for w in _workers_on(self._node, self._supervisor, slab) if w.role != wanted)
        measured = self._process_groups.resident_bytes(sleepers, clock.monotonic_s())
        for pid, worker in sleepers.items():
            if worker.address in self._just_asleep:
                self._just_asleep.discard(worker.address)
                self._sleeping_bytes[worker.address] = measured[pid]
        allowed = {
            pid: self._sleeping_bytes.get(worker.address, worker.hello_bytes) + slack
            for pid, worker in sleepers.items()
        }
        return [(sleepers[pid], used, allowed[pid]) for pid, used in measured.items() if used > allowed[pid]]


class GpuMemoryCheck:
    """With GPUs: no process of others, and no more in use than the baseline and the sleeping memory.

    The baseline is the least that was ever in use, first measured before any worker was started; a
    former attempt's dying process can thus not raise it for long.

    Args:
        sees_pids: whether NVML's pids are ours. If not (in most containers) only bytes can be judged:
            what others take shows in the sum, but not whose it is.
    """

    def __init__(self, node: Node, supervisor: Supervisor, nvml: Nvml, *, sees_pids: bool) -> None:
        self._node, self._supervisor, self._nvml = node, supervisor, nvml
        self._sees_pids, self._process_groups = sees_pids, ProcessGroups()
        self._sleeping_bytes: dict[str, int] = {}
        self._baseline = {slab: nvml.occupancy(slab.gpus).used_bytes for slab in node.slabs}

    def weigh(self, worker: Worker) -> int:
        """Device bytes of a worker's processes now; 0 where that cannot be told."""
        if worker.slab is None or worker.child is None:
            return 0
        try:
            return self._held(self._measured(worker.slab), [worker]).get(worker.address, 0)
        except WorkerFailed:
            return 0

    def learn(self, worker: Worker) -> None:
        """What it keeps the first time, up to ``lease.max_sleeping_bytes`` on each of its GPUs: a sleep that
        frees nothing is not believed. Where the driver does not tell whose memory it is, it is what nobody
        else keeps.
        """
        if worker.address in self._sleeping_bytes or worker.child is None or worker.slab is None:
            return
        try:
            seen = self._measured(worker.slab)
        except WorkerFailed:
            return  # nothing is allowed to it that was not seen
        if self._sees_pids and any(seen.processes.values()):
            kept = self._held(seen, [worker]).get(worker.address, 0)
        else:
            others = sum(self._allowed(w) for w in self._all(worker.slab) if w is not worker)
            kept = seen.used_bytes - self._baseline[worker.slab] - others
        most = self._node.config.lease.max_sleeping_bytes * len(worker.gpus)
        self._sleeping_bytes[worker.address] = max(0, min(kept, most))

    def check(self, slab: Slab, wanted: str) -> Proof:
        """Strangers first, then each sleeper by itself, then the sum."""
        try:
            seen = self._measured(slab)
        except WorkerFailed as error:
            return Proof(False, str(error))
        workers, slack = self._all(slab), self._node.config.lease.slack_bytes
        strangers = self._strangers(seen)
        if strangers:
            return Proof(False, f"on slab {slab.name} there is {strangers}; it is not of this run")
        held = self._held(seen, workers)
        for worker in workers:
            used, allowed = held.get(worker.address, 0), self._allowed(worker) + slack
            if worker.role != wanted and used > allowed:
                return Proof(False, keeps(worker, used, allowed))
        expected = self._baseline[slab] + slack
        expected += sum(
            max(self._allowed(w), held.get(w.address, 0)) if w.role == wanted else self._allowed(w)
            for w in workers
        )
        if seen.used_bytes > expected:
            return Proof(False, f"{seen.used_bytes >> 20} MiB are in use on slab {slab.name}, where all that "
                                f"sleeps may keep {expected >> 20} MiB")  # fmt: skip
        return Proof(True)

    def offenders(self, slab: Slab, wanted: str) -> list[Worker]:
        """By NVML's list of processes; every sleeper where it names nobody."""
        sleepers = [w for w in self._all(slab) if w.role != wanted]
        try:
            held = self._held(self._measured(slab), sleepers)
        except WorkerFailed:
            return sleepers
        slack = self._node.config.lease.slack_bytes
        over = [w for w in sleepers if held.get(w.address, 0) > self._allowed(w) + slack]
        return over or sleepers

    def _measured(self, slab: Slab) -> Occupancy:
        seen = self._nvml.occupancy(slab.gpus)
        self._baseline[slab] = min(self._baseline[slab], seen.used_bytes)
        return seen

    def _all(self, slab: Slab) -> list[Worker]:
        return _workers_on(self._node, self._supervisor, slab)

    def _allowed(self, worker: Worker) -> int:
        return self._sleeping_bytes.get(worker.address, worker.hello_bytes)

    def _held(self, seen: Occupancy, workers: list[Worker]) -> dict[str, int]:
        """Bytes by worker's address. Which processes are a worker's is asked of the kernel each time: the
        leader of a group is not reaped while we hold it, so its pid cannot have become another's."""
        held: dict[str, int] = {}
        if not self._sees_pids:
            return held
        groups = _by_group(workers)
        for pid, group in self._process_groups.members(groups, clock.monotonic_s()).items():
            address = groups[group].address
            held[address] = held.get(address, 0) + seen.processes.get(pid, 0)
        return held

    def _strangers(self, seen: Occupancy) -> str:
        """Processes on the devices that belong to none of this controller's workers, in words."""
        if not self._sees_pids:
            return ""
        own = self._process_groups.members(_by_group(self._supervisor.workers.values()), clock.monotonic_s())
        return ", ".join(
            f"process {pid} ({process_name(pid)}) with {held >> 20} MiB"
            for pid, held in sorted(seen.processes.items())
            if pid not in own
        )


def keeps(worker: Worker, used: int, allowed: int) -> str:
    """The sentence for a sleeper that keeps too much."""
    assert worker.child is not None, "only running workers are measured"
    return (
        f"{worker.name} (pid {worker.child.pid}) keeps {used >> 20} MiB of memory, "
        f"{allowed >> 20} MiB are allowed to it asleep"
    )


def _workers_on(node: Node, supervisor: Supervisor, slab: Slab) -> list[Worker]:
    """Every running worker that ever holds the slab."""
    roles = node.placement.roles_of(slab)
    return [w for role in roles for w in supervisor.of(role, slab) if w.child is not None]


def _by_group(workers: Iterable[Worker]) -> dict[int, Worker]:
    """Running workers by the id of their process group."""
    return {w.child.pid: w for w in workers if w.child is not None}
