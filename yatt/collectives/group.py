"""Joins torch's default process group, whose ranks meet in the run's key-value service (adr/0020).

torch's own TCPStore listens on all interfaces and serves every client; `RunStore` serves only clients that
have the run's keys.
"""

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from yatt.adapters.net.curve import CurveKeys
from yatt.adapters.net.key_value import LONGEST_PARK_S, KeyValueClient, KeyValueServer
from yatt.clock import monotonic_s


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


def collective_backend(device_type: str) -> str:
    """torch.distributed's backend for tensors on this type of device, `cpu` or `cuda`."""
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"


class RunGroup:
    """This process's part of the default process group. One process, the first rank, serves the others.

    Args:
        keys: the run's.
    """

    def __init__(self, keys: CurveKeys) -> None:
        self._keys = keys
        self._server: KeyValueServer | None = None
        self._client: KeyValueClient | None = None
        self._store: RunStore | None = None  # torch keeps only its C++ half, and needs the other one

    def serve(self, host: str) -> int:
        """Starts the service on a free port of `host` and returns the port; later calls return the same."""
        if self._server is None:
            self._server = KeyValueServer(host, self._keys)
        return self._server.port

    def join(
        self,
        address: tuple[str, int],
        *,
        rank: int,
        world_size: int,
        device_type: str,
        join_s: float,
        timeout_s: float,
    ) -> None:
        """Joins the group.

        Args:
            address: host and port of the service.
            join_s: time limit for all ranks to join.
            timeout_s: time limit of one collective.

        Raises:
            torch.distributed.DistStoreError: not all ranks joined in time.
        """
        self._client = KeyValueClient(*address, self._keys)
        self._store = RunStore(self._client, timedelta(seconds=join_s))
        dist.init_process_group(
            collective_backend(device_type),
            store=self._store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )

    def leave(self) -> None:
        """Leaves the group and stops the service."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.close()
