"""Meeting of the trainer ranks: a TCPStore of rank 0, then torch.distributed and megatron-core's groups."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from yatt.config.schema import RunConfig
from yatt.records.message import Join
from yatt.trainer.device import collective_backend
from yatt.trainer.model import join_model_parallel


@dataclass(slots=True)
class Meeting:
    """This rank's part in it. `store` is hosted by global rank 0 only, from `open_store` on."""

    config: RunConfig
    device: torch.device
    store: TCPStore | None = None

    def open_store(self, host: str) -> int:
        """Host the store on a free port; a second call gives the same port."""
        if self.store is None:
            self.store = TCPStore(
                host, 0, is_master=True, wait_for_workers=False, timeout=self._start_timeout
            )
        return int(self.store.port)

    def join(self, order: Join) -> None:
        """Join the process group and make megatron-core's; a second call does nothing.

        Raises:
            torch.distributed.DistStoreError: not all ranks came in time.
        """
        if dist.is_initialized():
            return
        if self.store is None:
            self.store = TCPStore(order.host, order.port, is_master=False, timeout=self._start_timeout)
        dist.init_process_group(
            collective_backend(self.device),
            store=self.store,
            rank=order.global_rank,
            world_size=order.world_size,
            timeout=timedelta(seconds=self.config.launch.phase_timeout_s),
        )
        join_model_parallel(self.config.trainer, self.config.run.seed)

    @property
    def _start_timeout(self) -> timedelta:
        return timedelta(seconds=self.config.launch.start_timeout_s)
