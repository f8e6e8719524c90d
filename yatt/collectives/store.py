"""torch's Store over the run's key-value service.

torch's own TCPStore listens on all interfaces and serves every client. This one serves only clients that have
the run's keys (adr/0020).
"""

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from yatt.adapters.key_value import LONGEST_PARK_S, KeyValueClient
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
