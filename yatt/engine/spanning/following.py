"""The process of a rank above 0 of an engine that spans nodes.

It follows rank 0's operations (`yatt.engine.spanning.mirror`). Its own controller orders it to wake, to load
weights and to sleep, as it does with rank 0 on another node; these orders come in any sequence, so each waits
for rank 0's operation, or the operation for the order. Requests reach rank 0 only.
"""

import contextlib
import os

import msgspec

from yatt.adapters.net.worker_link import WorkerLink
from yatt.engine.protocol import RanksLost
from yatt.engine.spanning import mirror
from yatt.engine.spanning.mirror import Operation, RankEngine
from yatt.engine.worker import IDLE_WAIT_S, EnginePlan, EngineWorker, loaded_answer
from yatt.errors import WorkerFailed
from yatt.records import message as m

FOLLOW_S = 0.05
"""Longest wait for an operation before the controller's orders are looked at."""

_SAMPLE, _VERSION = msgspec.msgpack.Decoder(m.SampleRequest), msgspec.msgpack.Decoder(int)
_IDS = msgspec.msgpack.Decoder(tuple[str, ...] | None)
_SEQUENCES = msgspec.msgpack.Decoder(list[list[int]])


class FollowingWorker(EngineWorker):
    """Executes rank 0's operations and its controller's orders on one rank's part of an engine."""

    def __init__(self, link: WorkerLink, plan: EnginePlan) -> None:
        super().__init__(link, plan)
        self._due: int | None = None
        """The policy version that rank 0 loads; it waits for this rank."""

        self._scores: list[list[float]] | None = None

    def serve(self, controller: int) -> None:
        """Follows until Stop, or until the parent process with this pid has ended.

        Raises:
            RanksLost: the ranks cannot go on together.
        """
        while self._may_stay and os.getppid() == controller:
            follows = self._is_awake and self._due is None
            order = self._link.receive(0 if follows else IDLE_WAIT_S)
            if order is not None:
                self._carry_out(order)
            elif follows:
                self._follow()
        self._end_engine()

    def _answer(self, body: m.Message) -> m.Message | None:
        if isinstance(body, m.SampleRequest | m.Abort):
            raise WorkerFailed("only rank 0 of an engine takes requests")
        return super()._answer(body)

    def _follow(self) -> None:
        for each in self._ranks().receive(FOLLOW_S):
            self._link.work += 1
            self._apply(each)

    def _apply(self, each: Operation) -> None:
        engine = self._woken()
        match each.kind:
            case mirror.ADD:
                engine.add(_SAMPLE.decode(each.data))
            case mirror.ABORT:
                engine.abort(_IDS.decode(each.data))
            case mirror.STEP:
                engine.step()
            case mirror.SLEEP:
                engine.sleep()
                self._is_awake = False
            case mirror.LOAD:
                self._due = _VERSION.decode(each.data)
            case mirror.SCORE:
                self._scores = engine.score(_SEQUENCES.decode(each.data))
            case _:
                raise RanksLost(f"rank 0 of this engine sent an unknown operation '{each.kind}'")

    def _ranks(self) -> mirror.RankGroup:
        engine = self._woken()
        assert isinstance(engine, RankEngine), "this process is one of several ranks"
        return engine.ranks

    def _sleep(self) -> m.Message:
        """Sleeps when rank 0 does. Idempotent."""
        while self._engine is not None and self._is_awake:
            if self._due is not None:  # rank 0 waits for a load that will not come
                self._due = None
                with contextlib.suppress(WorkerFailed):
                    self._ranks().together(_falls_asleep)
            self._follow()
        self._is_awake = False
        return m.Done()

    def _load_weights(self, order: m.LoadWeights) -> m.WeightsLoaded:
        """Loads the version together with rank 0.

        Raises:
            WorkerFailed: one of the ranks cannot load it, or rank 0 loads a later one.
        """
        engine = self._woken()
        while not self._is_loaded(order):
            pass
        comparison = engine.compare_weights(order.policy_version, order.folder)
        self._scores = None
        while self._scores is None:
            if self._due is not None or not self._is_awake:
                raise WorkerFailed(f"rank 0 has not loaded policy version {order.policy_version}")
            self._follow()
        return loaded_answer(order, comparison, self._scores)

    def _is_loaded(self, order: m.LoadWeights) -> bool:
        """Waits for rank 0 to load, and loads with it; returns False if rank 0 was asked for an earlier
        version, and has to be asked again."""
        while self._due is None:
            if not self._is_awake:
                raise WorkerFailed("rank 0 of this engine was put to sleep")
            self._follow()
        if order.policy_version < self._due:
            raise WorkerFailed(f"rank 0 loads policy version {self._due} already")
        due, self._due = self._due, None
        if order.policy_version > due:
            with contextlib.suppress(WorkerFailed):
                self._ranks().together(_has_later)
            return False
        self._woken().load_weights(order.policy_version, order.folder)
        return True


def _falls_asleep() -> None:
    raise WorkerFailed("this rank is being put to sleep")


def _has_later() -> None:
    raise WorkerFailed("this node's publication is of a later policy version")
