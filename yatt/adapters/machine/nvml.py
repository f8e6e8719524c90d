"""Reads the state of GPUs with NVML (nvidia-ml-py): bytes in use and compute processes.

Devices are named as in CUDA_VISIBLE_DEVICES of this job (`visible_devices`), so that a slab's GPU i is the
i-th device of the job, wherever it is on the node. This is the only module that imports pynvml.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yatt.adapters.machine.affinity import SYS, cpus_near, own_cpus
from yatt.errors import ConfigError, WorkerFailed

HOST_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the initial pid namespace (PROC_PID_INIT_INO of the kernel)."""

TAKEN = 0.1
"""Fraction of a device's memory; more than this is used by a process, not by the driver itself."""

TOO_HOT = 0x40
"""nvmlClocksThrottleReasonHwThermalSlowdown, on an idle GPU."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Memory use of some devices. `processes`: bytes by pid, 0 if the driver does not report them."""

    used_bytes: int
    processes: dict[int, int]


class Nvml:
    """NVML, initialised once for these devices.

    Args:
        devices: indices or UUIDs, as in CUDA_VISIBLE_DEVICES.

    Raises:
        ConfigError: NVML cannot be used, or has no such device.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise ConfigError(
                "the GPUs' memory cannot be measured: nvidia-ml-py is not installed. "
                "pip install 'yatt[gpu]', or write launch.device: cpu."
            ) from error
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise ConfigError(
                f"the GPUs' memory cannot be measured: NVML reports '{error}'. Check that nvidia-smi works "
                "on this node, or write launch.device: cpu."
            ) from error
        self._names = tuple(devices)
        self._handles = [self._handle(name) for name in devices]

    def count(self) -> int:
        """Returns the number of devices of the machine."""
        return int(self._nvml.nvmlDeviceGetCount())

    def occupancy(self, gpus: Sequence[int]) -> Occupancy:
        """Returns the bytes in use on the devices at these positions, and their compute processes.

        Raises:
            WorkerFailed: NVML reports an error, for example because a GPU was lost.
        """
        used_bytes, processes = 0, dict[int, int]()
        try:
            for gpu in gpus:
                used_bytes += self._nvml.nvmlDeviceGetMemoryInfo(self._handles[gpu]).used
                for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handles[gpu]):
                    held = processes.get(process.pid, 0)
                    processes[process.pid] = held + (process.usedGpuMemory or 0)
        except self._nvml.NVMLError as error:
            raise WorkerFailed(f"NVML cannot measure GPUs {list(gpus)}: {error}") from error
        return Occupancy(used_bytes, processes)

    def bus_ids(self) -> tuple[str, ...]:
        """Returns each device's PCI bus id, in the kernel's form: 0000:65:00.0.

        Raises:
            WorkerFailed: NVML reports an error.
        """
        try:
            infos = [self._nvml.nvmlDeviceGetPciInfo(handle) for handle in self._handles]
        except self._nvml.NVMLError as error:
            raise WorkerFailed(f"NVML cannot report the GPUs' bus ids: {error}") from error
        return tuple(f"{i.domain:04x}:{i.bus:02x}:{i.device:02x}.0" for i in infos)

    def faults(self) -> tuple[str, ...]:
        """Returns the faults of the devices: lost, memory that needs a reset or cannot be repaired, thermal
        slowdown by the board, or memory in use already.

        Properties that this driver or device does not support are skipped.
        """
        return tuple(
            f"GPU {name} {said}"
            for name, handle in zip(self._names, self._handles, strict=True)
            for said in self._faults_of(handle)
        )

    def _faults_of(self, handle: Any) -> Iterator[str]:
        nvml = self._nvml
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError as error:
            yield f"does not answer: {error}"
            return
        _, _, is_pending, has_failed = self._said("nvmlDeviceGetRemappedRows", handle) or (0, 0, 0, 0)
        if has_failed:
            yield "has memory that could not be repaired (row remapping failed)"
        if is_pending or self._said("nvmlDeviceGetRetiredPagesPendingStatus", handle):
            yield "has memory errors and waits for a reset"
        if int(self._said("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0) & TOO_HOT:
            yield "is slowed down by its board: too hot"
        if memory.used > TAKEN * memory.total:
            users = [p.pid for p in self._said("nvmlDeviceGetComputeRunningProcesses", handle) or ()]
            whose = ", ".join(f"{pid} ({process_name(pid)})" for pid in users) or "no visible process"
            yield f"has {memory.used >> 20} of {memory.total >> 20} MiB in use already, by {whose}"

    def _said(self, function: str, handle: Any) -> Any:
        """Returns the answer, or None if this driver or device does not support the function."""
        try:
            return getattr(self._nvml, function)(handle)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def close(self) -> None:
        """Shuts NVML down."""
        self._nvml.nvmlShutdown()

    def _handle(self, name: str) -> Any:
        try:
            if name.isdigit():
                return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
            return self._nvml.nvmlDeviceGetHandleByUUID(name)
        except self._nvml.NVMLError as error:
            raise ConfigError(
                f"NVML finds no GPU '{name}' ({error}); correct CUDA_VISIBLE_DEVICES or launch.gpus_per_node."
            ) from error


def cpus_by_device(devices: Sequence[str], sys: Path = SYS) -> tuple[frozenset[int], ...]:
    """Returns for each device the CPUs near it that this process may use; all of them if nothing is known.

    Raises:
        ConfigError: see `Nvml`.
    """
    nvml, own = Nvml(devices), own_cpus()
    try:
        return tuple(cpus_near(bus_id, sys) & own or own for bus_id in nvml.bus_ids())
    except WorkerFailed:  # binding is optional
        return (own,) * len(devices)
    finally:
        nvml.close()


def visible_devices(inherited: str | None, count: int) -> tuple[str, ...]:
    """Returns the first `count` devices of the inherited CUDA_VISIBLE_DEVICES (None: not set).

    Raises:
        ConfigError: it has fewer devices.
    """
    if inherited is None:
        return tuple(map(str, range(count)))
    names = tuple(name.strip() for name in inherited.split(",") if name.strip())
    if len(names) < count:
        raise ConfigError(
            f"{count} GPUs are needed on this node (launch.gpus_per_node), but CUDA_VISIBLE_DEVICES is "
            f"'{inherited}'. Request more from Slurm, or write launch.gpus_per_node: {max(1, len(names))}."
        )
    return names[:count]


def visible_count(inherited: str | None) -> int:
    """Returns the number of devices of the inherited CUDA_VISIBLE_DEVICES; None: of this machine.

    Raises:
        ConfigError: NVML cannot be used.
    """
    if inherited is None:
        return Nvml(()).count()
    return sum(bool(name.strip()) for name in inherited.split(","))


def sees_host_pids() -> bool:
    """Whether this process has the driver's pid namespace, unlike in most containers."""
    return os.stat("/proc/self/ns/pid").st_ino == HOST_PID_NAMESPACE


def process_name(pid: int) -> str:
    """Returns the name of a process, for a message."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "not visible in this pid namespace"
