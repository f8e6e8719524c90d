"""Meeting of the trainer ranks: a key-value service of rank 0, then torch's and megatron-core's groups.

torch's own TCPStore listens on all interfaces and serves whoever connects. This one listens on the address of
the run's network and serves who has the run's keys (adr/0020).
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
    """torch's store over the run's key-value service; `get` and `wait` wait as torch's stores do."""

    def __init__(self, client: KeyValueClient, timeout: timedelta) -> None:
        super().__init__()
        self._client, self._limit = client, timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Create or replace."""
        self._client.call("set", key, value=_bytes(value))

    def get(self, key: str) -> bytes:
        """Value, once it is there.

        Raises:
            torch.distributed.DistStoreError: it is not there in time.
        """
        self.wait([key])
        return self._client.call("get", key).value

    def add(self, key: str, value: int) -> int:
        """Add to a counter that begins at 0; gives the sum."""
        return self._client.call("add", key, amount=value).count

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Replace if the value is the expected one; gives what is there then."""
        expected, desired = _bytes(expected_value), _bytes(desired_value)
        return self._client.call("compare_set", key, value=desired, expected=expected).value

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return self._client.call("check", *keys).found

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all are there.

        Raises:
            torch.distributed.DistStoreError: they are not, in time.
        """
        limit_s = (timeout or self._limit).total_seconds()
        until_s = monotonic_s() + limit_s
        while not self._client.call("check", *keys, park_s=LONGEST_PARK_S).found:
            if monotonic_s() > until_s:
                missing = [key for key in keys if not self.check([key])]
                raise dist.DistStoreError(f"wait timeout after {limit_s:g} s, keys: {', '.join(missing)}")

    def delete_key(self, key: str) -> bool:
        """Remove; False if it was not there."""
        return self._client.call("delete", key).found

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._client.call("count").count

    def set_timeout(self, timeout: timedelta) -> None:
        """Longest wait from now on."""
        self._limit = timeout


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


@dataclass(slots=True)
class Meeting:
    """This rank's part in it. `server` is hosted by global rank 0 only, from `open_store` on.

    torch keeps only the C++ half of `store`: without a reference to the Python half its methods are lost.
    """

    config: RunConfig
    device: torch.device
    server: KeyValueServer | None = None
    client: KeyValueClient | None = None
    store: RunStore | None = None

    def open_store(self, host: str) -> int:
        """Host the store on a free port; a second call gives the same port."""
        if self.server is None:
            self.server = KeyValueServer(host, self._keys)
        return self.server.port

    def join(self, order: Join) -> None:
        """Join the process group and make megatron-core's; a second call does nothing.

        Raises:
            torch.distributed.DistStoreError: not all ranks came in time.
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
        """Leave the process group, and stop serving."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.client is not None:
            self.client.close()
        if self.server is not None:
            self.server.close()

    @property
    def _keys(self) -> CurveKeys:
        return CurveKeys(RunPaths(Path(self.config.run.dir)).keys)
