"""How the ranks of an engine that spans nodes meet, before each of them builds its part.

Rank 0 opens a key-value service and publishes its address in a file of the run folder. The other ranks look
for this file, write their names into the service, and begin when rank 0 has seen all of them. Whoever finds
a service that is over, or that has begun without it, looks for a later one: each start of rank 0 has its own.
A meeting ends with an error if nobody comes for `launch.start_timeout_s`: then a network may keep the ranks
apart, and nothing else would end the wait.
"""

import json
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from yatt.adapters.files.files import make_within, read_or_none, record_in, sealed_record, write_atomically
from yatt.adapters.files.patience import with_retries
from yatt.adapters.net.curve import CurveKeys
from yatt.adapters.net.key_value import LONGEST_PARK_S, KeyValueClient
from yatt.clock import monotonic_s
from yatt.collectives.group import RunGroup
from yatt.errors import DeadlineExceeded, WorkerFailed
from yatt.paths import RunPaths

_LOG = logging.getLogger(__name__)
LOOK_S = 0.2
ANSWER_S = 3.0
"""Time limit of an answer of a service that may be over."""

JOIN_S = 120.0
"""Time limit for all ranks to connect once they have met: one that ended meanwhile is noticed by this."""

SAY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """A process's place in an engine of `num_ranks` processes.

    Attributes:
        worker: the process's name; in a later life of its node, the names of a former one come again.
        engine: name of the engine, the same for all of its ranks.
        host: address in the run's network; rank 0 serves there.
        meeting_s: time limit of a meeting without another rank that comes.
        timeout_s: time limit of one collective.
        device: `cpu` or `cuda`.
    """

    paths: RunPaths
    attempt: int
    worker: str
    engine: str
    rank: int
    num_ranks: int
    host: str
    meeting_s: float
    timeout_s: float
    device: str


class RankMeeting:
    """The meeting of one process with the other ranks of its engine.

    Args:
        tick: called several times a minute while others are awaited.
    """

    def __init__(self, place: EnginePlace, tick: Callable[[], None]) -> None:
        self._place, self._tick = place, tick
        self._name = f"{place.worker} {secrets.token_hex(8)}"  # of no other process
        self._keys = CurveKeys(place.paths.keys)
        self._file = place.paths.engine_meeting(place.attempt, place.engine)
        self._group = RunGroup(self._keys)
        self._said_s = self._came_s = monotonic_s()
        self._missing = place.num_ranks

    def meet(self) -> None:
        """Waits for the other ranks, then joins torch's default process group with them.

        Raises:
            WorkerFailed: the others did not come in time.
            torch.distributed.DistError | RuntimeError: a rank has ended meanwhile.
        """
        place = self._place
        address = self._gather() if place.rank == 0 else self._find()
        self._group.join(
            address,
            rank=place.rank,
            world_size=place.num_ranks,
            device_type=place.device,
            join_s=JOIN_S,
            timeout_s=place.timeout_s,
        )

    def leave(self) -> None:
        """Leaves the process group and stops the service."""
        self._group.leave()

    def _gather(self) -> tuple[str, int]:
        """Serves, and waits for all other ranks; the part of rank 0."""
        place = self._place
        port = self._group.serve(place.host)
        client = KeyValueClient(place.host, port, self._keys)
        record = {"host": place.host, "port": port, "worker": self._name}
        with_retries(partial(self._publish, record))
        others = [_key(rank) for rank in range(1, place.num_ranks)]
        while not client.call("check", *others, park_s=LONGEST_PARK_S).found:
            self._waits([key for key in others if not client.call("check", key).found])
        names = {key: client.call("get", key).value.decode() for key in others}
        client.call("set", "begun", value=json.dumps(names).encode())
        client.close()
        return place.host, port

    def _publish(self, record: dict[str, Any]) -> None:
        make_within(self._place.paths.root, self._file.parent)
        write_atomically(self._file, sealed_record(record, self._place.attempt))

    def _find(self) -> tuple[str, int]:
        """Looks for rank 0's service, and waits until all ranks are there; the part of the other ranks."""
        over: dict[str, Any] | None = None
        while True:
            record = self._published()
            if record is not None and record != over:
                client = KeyValueClient(record["host"], record["port"], self._keys, ANSWER_S)
                try:
                    if self._has_begun(client, record):
                        return record["host"], record["port"]
                    over = record
                except DeadlineExceeded:
                    _LOG.info("rank 0 of %s does not answer; looking again", self._place.engine)
                finally:
                    client.close()
            self._waits([_key(0)])
            time.sleep(LOOK_S)

    def _has_begun(self, client: KeyValueClient, record: dict[str, Any]) -> bool:
        """Waits until rank 0 has begun; returns False if it has begun without this process, or another start
        of rank 0 has taken its place."""
        mine = _key(self._place.rank)
        client.call("set", mine, value=self._name.encode())
        self._came_s = monotonic_s()  # rank 0 is there
        while not client.call("check", "begun", park_s=LONGEST_PARK_S).found:
            self._waits(["the others"])
            if self._published() != record:
                return False
        names = json.loads(client.call("get", "begun").value)
        return bool(names.get(mine) == self._name)

    def _published(self) -> dict[str, Any] | None:
        return record_in(with_retries(partial(read_or_none, self._file)), self._place.attempt)

    def _waits(self, missing: list[str]) -> None:
        """Shows progress, as long as one more rank has come in time.

        Raises:
            WorkerFailed: none has.
        """
        self._tick()
        now_s, place = monotonic_s(), self._place
        if len(missing) < self._missing:
            self._missing, self._came_s = len(missing), now_s
        if now_s - self._came_s > place.meeting_s:
            raise WorkerFailed(
                f"{place.worker} waits for {', '.join(missing)} of {place.engine}, and nobody has come for "
                f"{place.meeting_s:g} s (launch.start_timeout_s). Look at the other ranks' logs. If they "
                "wait too, the network keeps the nodes apart (see `interface` in docs/slurm.md)."
            )
        if now_s - self._said_s > SAY_S:
            self._said_s = now_s
            _LOG.info("%s, pid %d, waits for %s", place.engine, os.getpid(), ", ".join(missing))


def _key(rank: int) -> str:
    return f"rank {rank}"
