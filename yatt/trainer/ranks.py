"""Joins the trainer ranks: a key-value store on rank 0, then torch's and megatron-core's process groups.

torch's own TCPStore listens on all interfaces and serves every client. This one listens on the address in
the run's network and serves only clients that have the run's keys (adr/0020).
"""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from yatt.adapters.curve import CurveKeys
from yatt.adapters.key_value import LONGEST_PARK_S, KeyValueClient, KeyValueServer
from yatt.clock import monotonic_s
from yatt.config.schema import RunConfig
from yatt.paths import RunPaths
from yatt.records.message import Join
from yatt.trainer.device import collective_backend
from yatt.trainer.model import join_model_parallel


class RunStore(Store):
    """Implements torch's Store with the run's key-value service; `get` and `wait` block as in torch."""

    def __init__(self, client: KeyValueClient, timeout: timedelta) -> None:
        super().__init__()
        self._client, self._limit = client, timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Creates or replaces a value."""
        self._client.call("set", key, value=_bytes(value))

    def get(self, key: str) -> bytes:
        """Returns the value once it exists.

        Raises:
            torch.distributed.DistStoreError: it does not exist in time.
        """
        self.wait([key])
        return self._client.call("get", key).value

    def add(self, key: str, value: int) -> int:
        """Adds to a counter that begins at 0; returns the sum."""
        return self._client.call("add", key, amount=value).count

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Replaces the value if it is the expected one; returns the value afterwards."""
        expected, desired = _bytes(expected_value), _bytes(desired_value)
        return self._client.call("compare_set", key, value=desired, expected=expected).value

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist."""
        return self._client.call("check", *keys).found

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys exist.

        Raises:
            torch.distributed.DistStoreError: a key does not exist in time.
        """
        limit_s = (timeout or self._limit).total_seconds()
        until_s = monotonic_s() + limit_s
        while not self._client.call("check", *keys, park_s=LONGEST_PARK_S).found:
            if monotonic_s() > until_s:
                missing = [key for key in keys if not self.check([key])]
                raise dist.DistStoreError(f"wait timeout after {limit_s:g} s, keys: {', '.join(missing)}")

    def delete_key(self, key: str) -> bool:
        """Removes a key; False if it did not exist."""
        return self._client.call("delete", key).found

    def num_keys(self) -> int:
        """Number of keys."""
        return self._client.call("count").count

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the longest wait of later calls."""
        self._limit = timeout


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


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
