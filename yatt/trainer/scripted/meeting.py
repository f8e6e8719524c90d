"""The meeting of scripted ranks in the run's key-value service."""

import hashlib
from pathlib import Path

import msgspec

from yatt.adapters.net.curve import CurveKeys
from yatt.adapters.net.key_value import LONGEST_PARK_S, KeyValueClient, KeyValueServer
from yatt.clock import monotonic_s
from yatt.config.schema import RunConfig
from yatt.errors import DeadlineExceeded
from yatt.paths import RunPaths
from yatt.records import message as m
from yatt.trainer.scripted.state import STATE_BYTES


class ScriptedMeeting:
    """The ranks' key-value service, by which they exchange what each knows of an iteration."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._server: KeyValueServer | None = None
        self._client: KeyValueClient | None = None
        self.rank, self.world_size = 0, 1
        self._read = ""

    def open_store(self, host: str) -> int:
        """Starts the service, once; returns its port."""
        if self._server is None:
            self._server = KeyValueServer(host, self._keys())
        return self._server.port

    def join(self, order: m.Join) -> None:
        """Meets all other ranks; a second call does nothing."""
        if self._client is not None:
            return
        self.rank, self.world_size = order.global_rank, order.world_size
        self._client = KeyValueClient(order.host, order.port, self._keys())
        self.gathered("join", b"", self._config.launch.start_timeout_s)

    def gathered(self, name: str, own: bytes, limit_s: float) -> bytes:
        """Returns a digest of what all ranks give under this name. The first rank makes it.

        Raises:
            DeadlineExceeded: a rank gives nothing.
        """
        assert self._client is not None, "Join comes first"
        self._client.call("set", f"{name}/{self.rank}", value=own)
        if self.rank == 0:
            keys = [f"{name}/{rank}" for rank in range(self.world_size)]
            self._client.call("set", name, value=_joined([self._got(key, limit_s) for key in keys]))
            for key in (*keys, self._read):  # each rank has read the one before, or it would not have given
                self._client.call("delete", key)
            self._read = name
        return self._got(name, limit_s)

    def leave(self) -> None:
        """Closes the client and the service."""
        for part in (self._client, self._server):
            if part is not None:
                part.close()

    def _got(self, key: str, limit_s: float) -> bytes:
        assert self._client is not None
        until_s = monotonic_s() + limit_s
        while not self._client.call("check", key, park_s=LONGEST_PARK_S).found:
            if monotonic_s() > until_s:
                raise DeadlineExceeded(f"no rank gave {key} within {limit_s:g} s")
        return self._client.call("get", key).value

    def _keys(self) -> CurveKeys:
        return CurveKeys(RunPaths(Path(self._config.run.dir)).keys)


def _joined(given: list[bytes]) -> bytes:
    """A digest of all samples, in the order of their numbers: which rank has which does not matter."""
    samples = sorted(pair for raw in given if raw for pair in msgspec.msgpack.decode(raw))
    return hashlib.blake2b(msgspec.msgpack.encode(samples), digest_size=STATE_BYTES).digest()
