"""The environment variables of a node's workers."""

import os

from yatt.adapters import bound
from yatt.adapters.interface import interface_of
from yatt.control.gpus.compiled_code import CompiledCode
from yatt.control.gpus.worker_plan import Worker
from yatt.control.node import Node
from yatt.core.placement import TRAINER
from yatt.core.trainer_environment import trainer_variables


class WorkerEnvironment:
    """Makes them, for workers and for the nurseries that import in their stead."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._compiled_code = CompiledCode(node)

    def of(self, worker: Worker) -> dict[str, str]:
        """Returns all variables of a worker's next process."""
        devices = self._node.devices
        env = self._common(worker) | {bound.MARK: self.mark_of(worker)}
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices[gpu] for gpu in worker.gpus) if devices else ""
        if cpus := self.cpus_of(worker):
            env[bound.CPUS] = ",".join(map(str, sorted(cpus)))
        return env

    def of_nursery(self, name: str, worker: Worker) -> dict[str, str]:
        """Returns the variables of a nursery: those that all workers like this one have in common.

        Args:
            name: of the nursery.
        """
        devices = self._node.devices
        env = self._common(worker) | {bound.MARK: self.mark(name), "CUDA_VISIBLE_DEVICES": ",".join(devices)}
        if devices:
            env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch's other check opens the GPUs
        return env

    def mark_of(self, worker: Worker) -> str:
        """Returns the mark of a worker's process, which all processes that it starts have too."""
        return self.mark(worker.address)

    def mark(self, name: str) -> str:
        """Returns the mark of a process of this node."""
        return f"{self._node.local_name}/{name}"

    def cpus_of(self, worker: Worker) -> frozenset[int]:
        """Returns the CPUs near its GPUs; none if it is not bound."""
        return frozenset().union(*(self._node.cpus[gpu] for gpu in worker.gpus if self._node.cpus))

    def close(self) -> None:
        """Called when no worker runs any more."""
        self._compiled_code.close()

    def _common(self, worker: Worker) -> dict[str, str]:
        threads = str(self._node.config.launch.threads_per_worker)
        env = {**self._network(), **os.environ, "OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
        if self._node.device == "cpu":  # freed memory is returned to the kernel, so that the check sees it
            env["MALLOC_ARENA_MAX"] = "1"
        elif worker.role == TRAINER:
            env = {**trainer_variables(self._node.config), **env}
        env = {**self._compiled_code.variables(), **env}
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order of NVML's indices
        return env

    def _network(self) -> dict[str, str]:
        """Binds collectives to the interface of the run's address; the site's setting has priority."""
        name = interface_of(self._node.host)
        return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name} if name else {}
