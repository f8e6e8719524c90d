"""Joins the trainer ranks: a key-value store on rank 0, then torch's and megatron-core's process groups.

The store listens on the address in the run's network (adr/0020).
"""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from yatt.adapters.curve import CurveKeys
from yatt.adapters.key_value import KeyValueClient, KeyValueServer
from yatt.collectives.store import RunStore
from yatt.config.schema import RunConfig
from yatt.paths import RunPaths
from yatt.records.message import Join
from yatt.trainer.device import collective_backend
from yatt.trainer.model import join_model_parallel


@dataclass(slots=True)
class Meeting:
    """This rank's store and process groups. `server` runs on global rank 0 only, from `open_store` on.

    torch keeps only the C++ half of `store`: without a reference to the Python half its methods are lost.
    """

    config: RunConfig
    device: torch.device
    server: KeyValueServer | None = None
    client: KeyValueClient | None = None
    store: RunStore | None = None

    def open_store(self, host: str) -> int:
        """Starts the store on a free port and returns the port; a second call returns the same port."""
        if self.server is None:
            self.server = KeyValueServer(host, self._keys)
        return self.server.port

    def join(self, order: Join) -> None:
        """Joins the process group and creates megatron-core's; a second call does nothing.

        Raises:
            torch.distributed.DistStoreError: not all ranks joined in time.
        """
        if dist.is_initialized():
            return
        self.client = KeyValueClient(order.host, order.port, self._keys)
        self.store = RunStore(self.client, timedelta(seconds=self.config.launch.start_timeout_s))
        dist.init_process_group(
            collective_backend(self.device),
            store=self.store,
            rank=order.global_rank,
            world_size=order.world_size,
            timeout=timedelta(seconds=self.config.launch.phase_timeout_s),
        )
        join_model_parallel(self.config.trainer, self.config.run.seed)

    def leave(self) -> None:
        """Leaves the process group and stops the store."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.client is not None:
            self.client.close()
        if self.server is not None:
            self.server.close()

    @property
    def _keys(self) -> CurveKeys:
        return CurveKeys(RunPaths(Path(self.config.run.dir)).keys)
