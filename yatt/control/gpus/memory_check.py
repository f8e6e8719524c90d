"""Checks that a slab is free: compares measured memory with the memory that its sleeping workers may keep.

The device decides which of two measurements is used: NVML with GPUs, resident memory with CPU slots. A
worker's *sleeping memory* is the memory that it kept after the first sleep that followed work of its role (an
update, a completion): communicators and workspaces come with that. From then on the value is fixed: later
growth is a leak and prevents a grant. Engines on CPU are the exception: their sleep frees nothing, so their
sleeping memory is the memory that they had when they fell asleep. `SlabProcesses` also sends the signals.
"""

import math
import signal
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from yatt import clock
from yatt.adapters.machine.memory import ProcessGroups
from yatt.adapters.machine.nvml import Nvml, Occupancy, process_name, sees_host_pids
from yatt.control.gpus.processes.supervisor import Supervisor
from yatt.control.gpus.processes.worker_plan import Worker
from yatt.control.node import Node
from yatt.core.gpus.lease import MemoryChecked
from yatt.core.gpus.placement import TRAINER, Slab
from yatt.errors import WorkerFailed


class SlabProcesses:
    """Signals and measures the processes on slabs. While a killed process is not reaped, no measurement finds
    its GPUs free."""

    def __init__(self, node: Node, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._memory_check = memory_check_for(node, supervisor)
        self._doomed: set[str] = set()

    def awake(self, slab: Slab, role: str) -> list[Worker]:
        """Returns the running workers of a role on a slab that have not been put to sleep."""
        return [w for w in self._supervisor.of(role, slab) if w.is_running and not w.process.is_asleep]

    def signal(self, workers: list[Worker], number: signal.Signals) -> None:
        """Sends a signal to the process groups of running workers."""
        for worker in workers:
            if worker.process.child is None:  # its start is abandoned; then it has ended
                worker.process.is_unwanted = True
                continue
            worker.process.child.signal_group(number)
            if number is signal.SIGKILL:
                self._doomed.add(worker.address)

    def purge(self, slab: Slab, spare: str) -> None:
        """Kills the workers of every role but `spare` whose memory keeps the slab from being free."""
        for role in {worker.role for worker in self._memory_check.offenders(slab, spare)}:
            self.signal([w for w in self._supervisor.of(role, slab) if w.is_running], signal.SIGKILL)

    def learn(self, slab: Slab, role: str) -> None:
        """Records the sleeping memory of a role's workers that have just gone to sleep."""
        for worker in self._supervisor.of(role, slab):
            if worker.process.is_asleep:
                self._memory_check.learn(worker)

    def movable_bytes(self, slab: Slab, role: str) -> int:
        """Returns the most bytes of one GPU that the role's workers may have to move to the host to sleep."""
        return self._memory_check.movable_bytes(slab, self.awake(slab, role))

    def weigh(self, worker: Worker) -> int:
        """Returns the bytes that a worker uses now, measured as for this node's device."""
        return self._memory_check.weigh(worker)

    def measured(self, slab: Slab, wanted: str, gpus: tuple[int, ...]) -> MemoryChecked:
        """Measures whether `gpus` of the slab are free for the role `wanted`; '': for no role."""
        dying = [
            w
            for w in self._supervisor.workers.values()
            if w.slab == slab and w.address in self._doomed and w.is_running and set(w.gpus) & set(gpus)
        ]
        if dying:
            return MemoryChecked(False, f"{', '.join(w.name for w in dying)} is being killed")
        return self._memory_check.check(slab, wanted, gpus)


class MemoryCheck(Protocol):
    """Measures the memory that workers keep on a slab."""

    def weigh(self, worker: Worker) -> int:
        """Returns the bytes that a worker uses now."""
        ...

    def movable_bytes(self, slab: Slab, workers: list[Worker], /) -> int:
        """Returns the most bytes of one GPU that these workers may have to move to the host to sleep."""
        ...

    def learn(self, worker: Worker) -> None:
        """Records the sleeping memory of a worker that has just gone to sleep; `check` is called next."""
        ...

    def check(self, slab: Slab, wanted: str, gpus: tuple[int, ...]) -> MemoryChecked:
        """Checks that `gpus` of the slab are free for `wanted`; '': for no role."""
        ...

    def offenders(self, slab: Slab, wanted: str) -> list[Worker]:
        """Returns the sleeping workers that keep too much memory; all of them if it cannot be attributed."""
        ...


def memory_check_for(node: Node, supervisor: Supervisor) -> MemoryCheck:
    """Returns the memory check for this node's device.

    Raises:
        ConfigError: GPUs are configured, and NVML cannot measure them.
    """
    if node.device == "cuda":
        return GpuMemoryCheck(node, supervisor, Nvml(node.devices), sees_pids=sees_host_pids())
    return SlotMemoryCheck(node, supervisor)


class SlotMemoryCheck:
    """Memory check without GPUs: the resident memory of each sleeping worker's process group."""

    def __init__(self, node: Node, supervisor: Supervisor) -> None:
        self._node, self._supervisor, self._process_groups = node, supervisor, ProcessGroups()
        self._sleeping_bytes: dict[str, int] = {}
        self._just_asleep: set[str] = set()

    def weigh(self, worker: Worker) -> int:
        """Returns the resident bytes of a worker's processes."""
        if worker.process.child is None:
            return 0
        return self._process_groups.resident_bytes([worker.process.child.pid], clock.monotonic_s())[
            worker.process.child.pid
        ]

    def movable_bytes(self, _: Slab, __: list[Worker], /) -> int:
        """Returns 0: everything is on the host."""
        return 0

    def learn(self, worker: Worker) -> None:
        """Records, at the next measurement, all memory of an engine as its sleeping memory: on CPU an
        engine's sleep frees nothing. This is repeated after each sleep, since its kernels' caches grow with
        every new batch shape. A trainer rank frees its storages and may keep its host copy, and the memory
        that it had before it built anything. One pass over all processes of the machine serves both."""
        if worker.role != TRAINER and worker.process.child is not None:
            self._just_asleep.add(worker.address)

    def check(self, slab: Slab, wanted: str, gpus: tuple[int, ...]) -> MemoryChecked:
        """Checks each sleeping worker separately."""
        for worker, used, allowed in self._over(slab, wanted, gpus):
            return MemoryChecked(False, excess_message(worker, used, allowed))
        return MemoryChecked(True)

    def offenders(self, slab: Slab, wanted: str) -> list[Worker]:
        """Returns the sleeping workers whose process group keeps too much memory."""
        return [worker for worker, _, _ in self._over(slab, wanted, slab.gpus)]

    def _over(self, slab: Slab, wanted: str, gpus: tuple[int, ...]) -> list[tuple[Worker, int, int]]:
        """Returns the sleeping workers above their limit: worker, bytes it keeps, bytes it may keep."""
        slack = self._node.config.lease.slack_bytes
        workers = _workers_on(self._node, self._supervisor, slab, gpus)
        sleepers = _by_group(w for w in workers if w.role != wanted)
        measured = self._process_groups.resident_bytes(sleepers, clock.monotonic_s())
        for pid, worker in sleepers.items():
            if worker.address in self._just_asleep:
                self._just_asleep.discard(worker.address)
                self._sleeping_bytes[worker.address] = measured[pid]
        allowed = {
            pid: self._sleeping_bytes.get(worker.address, worker.process.hello_bytes)
            + worker.process.host_bytes
            + slack
            for pid, worker in sleepers.items()
        }
        return [(sleepers[pid], used, allowed[pid]) for pid, used in measured.items() if used > allowed[pid]]


class GpuMemoryCheck:
    """Check with GPUs: no foreign process, and no more memory than baseline and sleeping memory.

    The baseline of a GPU is the smallest value ever measured, first before any worker was started. So a dying
    process of an earlier attempt raises it only for a short time. What a worker may keep is counted in equal
    parts on its GPUs.

    Args:
        sees_pids: whether NVML's pids are valid here. If not (in most containers), only bytes can be checked:
            memory of foreign processes shows in the sum, but cannot be attributed.
    """

    def __init__(self, node: Node, supervisor: Supervisor, nvml: Nvml, *, sees_pids: bool) -> None:
        self._node, self._supervisor, self._nvml = node, supervisor, nvml
        self._sees_pids, self._process_groups = sees_pids, ProcessGroups()
        self._sleeping_bytes: dict[str, int] = {}
        self._is_final: set[str] = set()  # addresses of workers whose sleeping memory is fixed
        gpus = [gpu for slab in node.slabs for gpu in slab.gpus]
        self._baseline = {gpu: nvml.occupancy((gpu,)).used_bytes for gpu in gpus}

    def weigh(self, worker: Worker) -> int:
        """Returns the device bytes of a worker's processes; 0 if they cannot be attributed."""
        if worker.slab is None or worker.process.child is None:
            return 0
        try:
            return self._held(self._measured(worker.gpus), [worker]).get(worker.address, 0)
        except WorkerFailed:
            return 0

    def movable_bytes(self, slab: Slab, workers: list[Worker], /) -> int:
        """Returns these workers' bytes on the GPU where they have most; all that is in use there if they
        cannot be attributed. Each GPU has processes of its own, which move its memory beside the others."""
        try:
            seen = {gpu: self._measured((gpu,)) for gpu in slab.gpus}
        except WorkerFailed:
            return 0
        held = max(sum(self._held(each, workers).values()) for each in seen.values())
        return held or max(0, *(each.used_bytes - self._base((gpu,)) for gpu, each in seen.items()))

    def learn(self, worker: Worker) -> None:
        """Records the memory that the worker keeps after each sleep up to the first one after work, at most
        ``lease.max_sleeping_bytes`` on each of its GPUs, since a sleep that frees nothing must not be
        accepted. If the driver does not attribute memory to processes, it is the memory that no other worker
        keeps."""
        if worker.address in self._is_final or worker.process.child is None or worker.slab is None:
            return
        gpus = worker.gpus
        try:
            seen = self._measured(gpus)
        except WorkerFailed:
            return  # memory that was not measured is not allowed
        if self._sees_pids and any(seen.processes.values()):
            kept = self._held(seen, [worker]).get(worker.address, 0)
        else:
            workers = self._all(worker.slab, gpus)
            others = sum(self._allowed(w, gpus) for w in workers if w is not worker)
            kept = seen.used_bytes - self._base(gpus) - others
        most = self._node.config.lease.max_sleeping_bytes * len(worker.gpus)
        self._sleeping_bytes[worker.address] = max(0, min(kept, most))
        if worker.process.has_computed:
            self._is_final.add(worker.address)

    def check(self, slab: Slab, wanted: str, gpus: tuple[int, ...]) -> MemoryChecked:
        """Checks for foreign processes, then each sleeping worker, then the sum."""
        try:
            seen = self._measured(gpus)
        except WorkerFailed as error:
            return MemoryChecked(False, str(error))
        workers, slack = self._all(slab, gpus), self._node.config.lease.slack_bytes
        strangers = self._strangers(seen)
        if strangers:
            return MemoryChecked(False, f"on GPU set {slab.name} there is {strangers}; it is not of this run")
        held = self._held(seen, workers)
        for worker in workers:
            used, allowed = held.get(worker.address, 0), self._allowed(worker, gpus) + slack
            if worker.role != wanted and used > allowed:
                return MemoryChecked(False, excess_message(worker, used, allowed))
        expected = self._base(gpus) + slack
        expected += sum(
            max(self._allowed(w, gpus), held.get(w.address, 0) if w.role == wanted else 0) for w in workers
        )
        if seen.used_bytes > expected:
            in_use = f"{seen.used_bytes >> 20} MiB are in use on GPU set {slab.name}"
            return MemoryChecked(False, f"{in_use}, where all that sleeps may keep {expected >> 20} MiB")
        return MemoryChecked(True)

    def offenders(self, slab: Slab, wanted: str) -> list[Worker]:
        """Uses NVML's list of processes; returns every sleeping worker if that list names none."""
        sleepers = [w for w in self._all(slab, slab.gpus) if w.role != wanted]
        try:
            held = self._held(self._measured(slab.gpus), sleepers)
        except WorkerFailed:
            return sleepers
        slack = self._node.config.lease.slack_bytes
        over = [w for w in sleepers if held.get(w.address, 0) > self._allowed(w, slab.gpus) + slack]
        return over or sleepers

    def _measured(self, gpus: tuple[int, ...]) -> Occupancy:
        used_bytes, processes = 0, Counter[int]()
        for gpu in gpus:
            seen = self._nvml.occupancy((gpu,))
            self._baseline[gpu] = min(self._baseline[gpu], seen.used_bytes)
            used_bytes += seen.used_bytes
            processes.update(seen.processes)
        return Occupancy(used_bytes, processes)

    def _base(self, gpus: tuple[int, ...]) -> int:
        return sum(self._baseline[gpu] for gpu in gpus)

    def _all(self, slab: Slab, gpus: tuple[int, ...]) -> list[Worker]:
        return _workers_on(self._node, self._supervisor, slab, gpus)

    def _allowed(self, worker: Worker, gpus: tuple[int, ...]) -> int:
        """Returns the bytes that a worker may keep asleep on those of its GPUs that are among `gpus`."""
        share = len(set(worker.gpus) & set(gpus)) / len(worker.gpus)
        return math.ceil(self._sleeping_bytes.get(worker.address, worker.process.hello_bytes) * share)

    def _held(self, seen: Occupancy, workers: list[Worker]) -> dict[str, int]:
        """Returns bytes by the worker's address. The kernel lists the processes of each worker every time:
        the leader of a process group is not reaped while we hold it, so its pid cannot be reused."""
        held: dict[str, int] = {}
        if not self._sees_pids:
            return held
        groups = _by_group(workers)
        for pid, group in self._process_groups.members(groups, clock.monotonic_s()).items():
            address = groups[group].address
            held[address] = held.get(address, 0) + seen.processes.get(pid, 0)
        return held

    def _strangers(self, seen: Occupancy) -> str:
        """Describes the processes on the devices that belong to none of this controller's workers."""
        if not self._sees_pids:
            return ""
        own = self._process_groups.members(_by_group(self._supervisor.workers.values()), clock.monotonic_s())
        return ", ".join(
            f"process {pid} ({process_name(pid)}) with {held >> 20} MiB"
            for pid, held in sorted(seen.processes.items())
            if pid not in own
        )


def excess_message(worker: Worker, used: int, allowed: int) -> str:
    """Returns the message about a sleeping worker that keeps too much memory."""
    assert worker.process.child is not None, "only running workers are measured"
    return (
        f"{worker.name} (pid {worker.process.child.pid}) keeps {used >> 20} MiB of memory, "
        f"{allowed >> 20} MiB are allowed to it asleep"
    )


def _workers_on(node: Node, supervisor: Supervisor, slab: Slab, gpus: tuple[int, ...]) -> list[Worker]:
    """Returns the running workers of every role that can hold the slab which use any of `gpus`."""
    roles = node.placement.roles_of(slab)
    workers = [w for role in roles for w in supervisor.of(role, slab) if w.process.child is not None]
    return [w for w in workers if set(w.gpus) & set(gpus)]


def _by_group(workers: Iterable[Worker]) -> dict[int, Worker]:
    """Maps the ids of process groups to the running workers."""
    return {w.process.child.pid: w for w in workers if w.process.child is not None}
