"""The environment variables of a node's workers.

Compiled code is kept with the user's other runs, or for this attempt only; if `launch.scratch_dir` is mounted
noexec, where the libraries put it.
"""

import logging
import os
from pathlib import Path

from yatt.adapters.net.interface import interface_of
from yatt.adapters.node_local.compiler_cache import CompilerCache, cache_variables, can_load_code
from yatt.adapters.processes import bound
from yatt.control.gpus.processes.worker_plan import Worker
from yatt.control.node import Node
from yatt.core.attempts.trainer_environment import trainer_variables
from yatt.core.gpus.placement import TRAINER

_LOG = logging.getLogger(__name__)


class CompiledCode:
    """Caches of the engines and trainer ranks on GPUs. Without GPUs nothing is compiled."""

    def __init__(self, node: Node) -> None:
        self._node = node
        folder = Path(node.config.launch.scratch_dir)
        self._is_kept = node.device == "cuda" and _is_loadable(folder)
        self._cache = _user_cache(folder) if self._is_kept else None

    def variables(self) -> dict[str, str]:
        """Returns environment variables of workers, which may be none; the user's settings have priority."""
        if not self._is_kept:
            return {}
        return self._cache.variables() if self._cache else cache_variables(self._node.scratch)

    def close(self) -> None:
        """Allows the removal of the user's cache, when no worker runs any more."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None


def _is_loadable(folder: Path) -> bool:
    if can_load_code(folder):
        return True
    _LOG.warning(
        "launch.scratch_dir (%s) is mounted noexec, so compiled code could not be loaded from there: it is "
        "where the libraries put it, often under the home folder. Name another node-local folder.",
        folder,
    )
    return False


def _user_cache(folder: Path) -> CompilerCache | None:
    try:
        return CompilerCache(folder)
    except OSError as error:
        _LOG.warning(
            "compiled code is not kept for the next start: no private folder in launch.scratch_dir (%s): %s. "
            "Remove what is at its place, or name another node-local folder.",
            folder,
            error,
        )
        return None


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
