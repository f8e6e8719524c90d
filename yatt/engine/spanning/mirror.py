"""The same operations on every rank of an engine that spans nodes, in the same order.

Each rank has a whole engine of its own: a scheduler, and a part of the model. Their schedulers decide alike
because they get the same requests at the same steps. Rank 0 takes the requests; before each of its operations
that computes together (a step, a load, a score) it sends the other ranks what it has done since the last one.
Operations are msgpack in tensors over gloo: typed, bounded, and without paths of files that would be opened.
"""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from yatt.engine.protocol import Comparison, Engine, RanksLost
from yatt.engine.spanning.meeting import RankMeeting
from yatt.errors import WorkerFailed
from yatt.records.message import Completed, SampleRequest

HEAD_BYTES = 4096
"""Bytes of the first tensor of a message; the rest, if there is one, comes in a second one."""

MOST_BYTES = 1 << 30
_LENGTH_BYTES = 8

ADD, ABORT, STEP, SLEEP, LOAD, SCORE = "add", "abort", "step", "sleep", "load", "score"


class Operation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One operation of rank 0; `data` is its argument in msgpack."""

    kind: str
    data: bytes = b""


_OPERATIONS = msgspec.msgpack.Decoder(tuple[Operation, ...])


def encoded_operation(kind: str, value: Any = None) -> Operation:
    """Returns an operation with its argument encoded."""
    return Operation(kind, msgspec.msgpack.encode(value))


class RankGroup:
    """The ranks of one engine, as one of them sees the others.

    Args:
        timeout_s: time limit of one collective.
        meeting: keeps what the process group needs.
    """

    def __init__(self, timeout_s: float, meeting: RankMeeting) -> None:
        self._meeting = meeting
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._head = torch.zeros(HEAD_BYTES, dtype=torch.uint8)
        self._receiving: Any = None

    def send(self, operations: tuple[Operation, ...]) -> None:
        """Sends operations to all other ranks; the part of rank 0.

        Raises:
            RanksLost: a rank has ended.
        """
        data = msgspec.msgpack.encode(operations)
        framed = len(data).to_bytes(_LENGTH_BYTES, "little") + data
        head = bytearray(framed[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0"))
        with _together():
            dist.broadcast(torch.frombuffer(head, dtype=torch.uint8), src=0, group=self._group)
            if rest := bytearray(framed[HEAD_BYTES:]):
                dist.broadcast(torch.frombuffer(rest, dtype=torch.uint8), src=0, group=self._group)

    def receive(self, wait_s: float) -> tuple[Operation, ...]:
        """Returns the next operations; none if nothing has come in `wait_s`. Only the last one of a message
        computes together with the other ranks.

        Raises:
            RanksLost: rank 0 has ended, or sent something else.
        """
        if self._receiving is None:
            with _together():
                self._receiving = dist.broadcast(self._head, src=0, group=self._group, async_op=True)
        try:
            self._receiving.wait(timedelta(seconds=wait_s))
        except RuntimeError:  # also if it only takes longer
            if not self._receiving.is_completed():
                return ()
            with _together():
                self._receiving.wait()
        self._receiving = None
        head = bytes(self._head.numpy())
        size = int.from_bytes(head[:_LENGTH_BYTES], "little")
        if size > MOST_BYTES:
            raise RanksLost(f"rank 0 of this engine announces {size} bytes of operations")
        data = head[_LENGTH_BYTES : _LENGTH_BYTES + size]
        if missing := size - len(data):
            rest = torch.zeros(missing, dtype=torch.uint8)
            with _together():
                dist.broadcast(rest, src=0, group=self._group)
            data += bytes(rest.numpy())
        try:
            return _OPERATIONS.decode(data)
        except msgspec.DecodeError as error:
            raise RanksLost(f"rank 0 of this engine sent an invalid operation: {error}") from error

    def leave(self) -> None:
        """Leaves the process group."""
        self._meeting.leave()

    def barrier(self) -> None:
        """Waits until every rank is here."""
        with _together():
            dist.barrier(group=self._group)

    def together(self, work: Callable[[], None]) -> None:
        """Runs `work` on every rank; fails on all of them if it failed on one.

        Raises:
            WorkerFailed: it failed on another rank.
        """
        failure: Exception | None = None
        try:
            work()
        except Exception as error:  # noqa: BLE001 (raised below, after the others know)
            failure = error
        is_done = torch.tensor([int(failure is None)])
        with _together():
            dist.all_reduce(is_done, op=dist.ReduceOp.MIN, group=self._group)
        if failure is not None:
            raise failure
        if not int(is_done):
            raise WorkerFailed("another rank of this engine could not do it; its log says why")


class RankEngine:
    """One rank's part of an engine that spans nodes; see yatt.engine.protocol.Engine.

    Args:
        engine: this rank's own.
    """

    def __init__(self, engine: Engine, ranks: RankGroup) -> None:
        self._engine, self.ranks = engine, ranks

    @property
    def is_busy(self) -> bool:
        """See Engine.is_busy."""
        return self._engine.is_busy

    def start(self) -> None:
        """Builds this rank's part; returns when all have."""
        self._engine.start()
        self.ranks.barrier()

    def add(self, sample: SampleRequest) -> None:
        """See Engine.add."""
        self._engine.add(sample)

    def abort(self, request_ids: tuple[str, ...] | None = None) -> list[Completed]:
        """See Engine.abort."""
        return self._engine.abort(request_ids)

    def step(self) -> list[Completed]:
        """See Engine.step. After an error the ranks may differ.

        Raises:
            RanksLost: it failed.
        """
        with _together():
            return self._engine.step()

    def idle(self) -> None:
        """See Engine.idle."""

    def sleep(self) -> None:
        """See Engine.sleep."""
        self._engine.sleep()

    def wake(self) -> None:
        """See Engine.wake; returns when all ranks are awake."""
        self._engine.wake()
        self.ranks.barrier()

    def load_weights(self, policy_version: int, folder: str) -> None:
        """See Engine.load_weights; each rank reads what its own node has. Fails on all ranks or on none."""
        self.ranks.together(lambda: self._engine.load_weights(policy_version, folder))

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """See Engine.score; raises as `step`."""
        with _together():
            return self._engine.score(sequences)

    def compare_weights(self, policy_version: int, folder: str) -> Comparison:
        """See Engine.compare_weights; of this rank's part only."""
        return self._engine.compare_weights(policy_version, folder)

    def close(self) -> None:
        """See Engine.close."""
        self._engine.close()
        self.ranks.leave()


class FirstRank(RankEngine):
    """Rank 0: what is done to it is sent to the others, who do the same."""

    def __init__(self, engine: Engine, ranks: RankGroup) -> None:
        super().__init__(engine, ranks)
        self._unsent: list[Operation] = []

    def add(self, sample: SampleRequest) -> None:
        """See Engine.add; the others do not hear of a request that is refused here, for whatever cause."""
        super().add(sample)
        self._unsent.append(encoded_operation(ADD, sample))

    def abort(self, request_ids: tuple[str, ...] | None = None) -> list[Completed]:
        """See Engine.abort."""
        self._unsent.append(encoded_operation(ABORT, request_ids))
        return super().abort(request_ids)

    def step(self) -> list[Completed]:
        """See RankEngine.step."""
        self._send(encoded_operation(STEP))
        return super().step()

    def idle(self) -> None:
        """Shows the others that this rank is alive; raises RanksLost if one of them is not."""
        self._send()

    def sleep(self) -> None:
        """See Engine.sleep."""
        self._send(encoded_operation(SLEEP))
        super().sleep()

    def load_weights(self, policy_version: int, folder: str) -> None:
        """See RankEngine.load_weights."""
        self._send(encoded_operation(LOAD, policy_version))
        super().load_weights(policy_version, folder)

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """See RankEngine.score."""
        self._send(encoded_operation(SCORE, sequences))
        return super().score(sequences)

    def _send(self, *last: Operation) -> None:
        operations, self._unsent = (*self._unsent, *last), []
        self.ranks.send(operations)


@contextlib.contextmanager
def _together() -> Any:
    """Turns an error of work that all ranks do together into RanksLost."""
    try:
        yield
    except Exception as error:
        raise RanksLost(f"the ranks of this engine cannot go on together: {error}") from error
