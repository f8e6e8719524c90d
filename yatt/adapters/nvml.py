"""What is on the GPUs, by NVML through nvidia-ml-py: bytes in use and the processes that compute there.

Devices are named as CUDA names them to this job (`visible_devices`), so that a slab's GPU i is the
i-th device of the job wherever Slurm or a person put it. The only module that imports pynvml.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yatt.adapters.affinity import SYS, cpus_near, own_cpus
from yatt.errors import ConfigError, WorkerFailed

HOST_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the first pid namespace (PROC_PID_INIT_INO of the kernel)."""

TAKEN = 0.1
"""Of a device's memory: more than a driver keeps for itself. Who has it will not give it back to us."""

TOO_HOT = 0x40
"""nvmlClocksThrottleReasonHwThermalSlowdown, of a GPU that has nothing to do."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What some devices hold. `processes`: bytes by pid, 0 where the driver does not tell."""

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
                f"the GPUs' memory cannot be measured: NVML says '{error}'. Check that nvidia-smi works on "
                "this node, or write launch.device: cpu."
            ) from error
        self._names = tuple(devices)
        self._handles = [self._handle(name) for name in devices]

    def occupancy(self, gpus: Sequence[int]) -> Occupancy:
        """Bytes in use on the devices at these places, and who computes there.

        Raises:
            WorkerFailed: NVML cannot say, for instance because a GPU was lost.
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
        """Where each device hangs on the PCI bus, as the kernel writes it: 0000:65:00.0.

        Raises:
            WorkerFailed: NVML cannot say.
        """
        try:
            infos = [self._nvml.nvmlDeviceGetPciInfo(handle) for handle in self._handles]
        except self._nvml.NVMLError as error:
            raise WorkerFailed(f"NVML does not say where the GPUs are: {error}") from error
        return tuple(f"{i.domain:04x}:{i.bus:02x}:{i.device:02x}.0" for i in infos)

    def faults(self) -> tuple[str, ...]:
        """Why the devices are not fit for work, in words: lost, memory that waits for a reset or cannot be
        repaired, held back for heat by the board itself, or memory in use already.

        What this driver or device cannot say is not looked at.
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
            yield "is held back by its board: too hot"
        if memory.used > TAKEN * memory.total:
            users = [p.pid for p in self._said("nvmlDeviceGetComputeRunningProcesses", handle) or ()]
            whose = ", ".join(f"{pid} ({process_name(pid)})" for pid in users) or "nobody who is seen"
            yield f"has {memory.used >> 20} of {memory.total >> 20} MiB in use already, by {whose}"

    def _said(self, function: str, handle: Any) -> Any:
        """An answer, or None where this driver or device has none to give."""
        try:
            return getattr(self._nvml, function)(handle)
        except (self._nvml.NVMLError, AttributeError):
            return None

    def close(self) -> None:
        """Give NVML back."""
        self._nvml.nvmlShutdown()

    def _handle(self, name: str) -> Any:
        try:
            if name.isdigit():
                return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
            return self._nvml.nvmlDeviceGetHandleByUUID(name)
        except self._nvml.NVMLError as error:
            raise ConfigError(
                f"NVML finds no GPU '{name}' ({error}); it is named by CUDA_VISIBLE_DEVICES or counted by "
                "launch.gpus_per_node."
            ) from error


def cpus_by_device(devices: Sequence[str], sys: Path = SYS) -> tuple[frozenset[int], ...]:
    """For each device the CPUs near it, out of this process's own; all of those where nothing is known.

    Raises:
        ConfigError: as `Nvml`.
    """
    nvml, own = Nvml(devices), own_cpus()
    try:
        return tuple(cpus_near(bus_id, sys) & own or own for bus_id in nvml.bus_ids())
    except WorkerFailed:  # where a worker runs is worth no attempt
        return (own,) * len(devices)
    finally:
        nvml.close()


def visible_devices(inherited: str | None, count: int) -> tuple[str, ...]:
    """The job's first `count` devices, by the CUDA_VISIBLE_DEVICES it was given; None if it was given none.

    Raises:
        ConfigError: it names fewer.
    """
    if inherited is None:
        return tuple(map(str, range(count)))
    names = tuple(name.strip() for name in inherited.split(",") if name.strip())
    if len(names) < count:
        raise ConfigError(
            f"{count} GPUs are needed on this node (launch.gpus_per_node), but CUDA_VISIBLE_DEVICES is "
            f"'{inherited}'. Ask Slurm for more, or write launch.gpus_per_node: {max(1, len(names))}."
        )
    return names[:count]


def sees_host_pids() -> bool:
    """Whether this process counts pids as the driver does: not so inside most containers."""
    return os.stat("/proc/self/ns/pid").st_ino == HOST_PID_NAMESPACE


def process_name(pid: int) -> str:
    """What a process is called, for a message."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "not visible from here"
