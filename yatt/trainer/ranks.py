"""Joins the trainer ranks: a key-value store on rank 0, then torch's and megatron-core's process groups.

The store listens on the address in the run's network (adr/0020).
"""

from pathlib import Path

import torch
import torch.distributed as dist

from yatt.adapters.curve import CurveKeys
from yatt.collectives.group import RunGroup
from yatt.config.schema import RunConfig
from yatt.paths import RunPaths
from yatt.records.message import Join
from yatt.trainer.model import join_model_parallel


class Meeting:
    """This rank's store and process groups. Global rank 0 has the store, from `open_store` on."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self._group: RunGroup | None = None

    def open_store(self, host: str) -> int:
        """Starts the store on a free port and returns the port; a second call returns the same port."""
        return self._run_group().serve(host)

    def join(self, order: Join) -> None:
        """Joins the process group and creates megatron-core's; a second call does nothing.

        Raises:
            torch.distributed.DistStoreError: not all ranks joined in time.
        """
        if dist.is_initialized():
            return
        launch = self._config.launch
        self._run_group().join(
            (order.host, order.port), rank=order.global_rank, world_size=order.world_size,
            device_type=self._device.type, join_s=launch.start_timeout_s, timeout_s=launch.phase_timeout_s,
        )  # fmt: skip
        join_model_parallel(self._config.trainer, self._config.run.seed)

    def leave(self) -> None:
        """Leaves the process group and stops the store."""
        if self._group is not None:
            self._group.leave()

    def _run_group(self) -> RunGroup:
        """Returns the group; its keys are read when they are needed."""
        if self._group is None:
            self._group = RunGroup(CurveKeys(RunPaths(Path(self._config.run.dir)).keys))
        return self._group
