"""Joins torch's default process group, whose ranks meet in the run's key-value service (adr/0020)."""

from datetime import timedelta

import torch.distributed as dist

from yatt.adapters.curve import CurveKeys
from yatt.adapters.key_value import KeyValueClient, KeyValueServer
from yatt.collectives.store import RunStore


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
        self, address: tuple[str, int], *, rank: int, world_size: int, device_type: str, join_s: float,
        timeout_s: float,
    ) -> None:  # fmt: skip
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
            collective_backend(device_type), store=self._store, rank=rank, world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )  # fmt: skip

    def leave(self) -> None:
        """Leaves the group and stops the service."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.close()
