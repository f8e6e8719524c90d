"""Host memory of this node's workers, for metrics; grants depend on `memory_check` instead."""

from collections.abc import Callable, Mapping
from functools import partial

from yatt import clock
from yatt.adapters.machine.host_memory import used_bytes
from yatt.adapters.machine.memory import ProcessGroups
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.control.gpus.processes.supervisor import Supervisor
from yatt.records.usage import NodeMemory


async def node_memory(supervisor: Supervisor) -> NodeMemory:
    """Measures the machine and the processes of each role, in a thread; empty if that is not possible."""
    workers = supervisor.workers.values()
    roles = {worker.process.child.pid: worker.role for worker in workers if worker.process.child is not None}
    try:
        measured: NodeMemory = await call_in_thread(partial(_measured, roles))
    except OSError:  # no thread, or no /proc: only metrics are missing
        return NodeMemory()
    return measured


def _measured(roles: Mapping[int, str]) -> NodeMemory:
    groups, now_s = ProcessGroups(), clock.monotonic_s()
    resident = _by_role(groups.resident_bytes(roles, now_s), roles, sum)
    peak = _by_role(groups.peak_bytes(roles, now_s), roles, max)
    return NodeMemory(used_bytes=used_bytes(), resident_bytes=resident, peak_bytes=peak)


def _by_role(
    sizes: Mapping[int, int], roles: Mapping[int, str], joined: Callable[[list[int]], int]
) -> dict[str, int]:
    """Joins the sizes of the process groups of each role."""
    of_role: dict[str, list[int]] = {}
    for group, size_bytes in sizes.items():
        of_role.setdefault(roles[group], []).append(size_bytes)
    return {role: joined(found) for role, found in of_role.items()}
