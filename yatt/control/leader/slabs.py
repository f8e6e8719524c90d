"""Which role has which slab: the placement's table, and slabs that change between rollout and GenRMs.

Carries out the decisions of `yatt.core.moves` (which slab may move) and `yatt.core.split` (which should).
Between batches the split is chosen beside training; near the end of a batch free slabs go to GenRMs.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from yatt import clock
from yatt.adapters.thread_call import call_in_thread
from yatt.config.check import engine_roles, slab_limits
from yatt.control.leader.background import Background
from yatt.control.leader.held_time import HeldTime
from yatt.control.leader.measured import Measurements
from yatt.control.leader.node_clients import NodeClients
from yatt.control.leader.node_loads import NodeLoads
from yatt.control.node import Node
from yatt.core import moves as core
from yatt.core.moves import MoveRules, Moves, OrderMove
from yatt.core.phases import Phase
from yatt.core.placement import ROLLOUT, TRAINER, Holders, Slab
from yatt.core.prediction import predict
from yatt.core.split import UNDO_BATCHES, choose
from yatt.core.tail import BatchTail, tail_moves
from yatt.obs.events import EventLog
from yatt.records.moves import MoveSlab

DECIDE_S = 1.0
"""Interval at which moves are decided near the end of a batch."""


class Slabs:
    """The leader's table of slabs.

    Attributes:
        seq: of the leader's state, which fences orders.
        loads: what nodes report.
        measured: speeds and lengths.
    """

    def __init__(
        self, node: Node, clients: NodeClients, loads: NodeLoads, events: EventLog, background: Background
    ) -> None:
        self._node, self._clients, self.loads = node, clients, loads
        self._events, self._background = events, background
        placement, config = node.placement, node.config
        limits = {role: slab_limits(config, role) for role in engine_roles(config)}
        self._rules = MoveRules(
            least={role: least for role, (least, _) in limits.items()},
            most={role: most for role, (_, most) in limits.items()},
        )  # fmt: skip
        table = {slab: placement.sampling[slab] for slab in placement.slabs if slab in placement.shared}
        self._moves = Moves(table=table, lost=frozenset(node.absent))
        self._splits = deque[dict[str, int]](maxlen=UNDO_BATCHES + 2)
        self._choosing: asyncio.Task[None] | None = None
        self._chosen: dict[str, int] = {}
        self._num_moves = 0
        self._is_deciding = self._is_stopped = False
        self._sampling: tuple[Phase, int] | None = None
        self._begun: dict[str, int] = {}  # the split with which the present batch began
        self.seq = 0
        self.measured = Measurements(config, loads)
        self.held = HeldTime()

    # ---- the table ------------------------------------------------------------------------------

    def holders(self, phase: Phase, scoring: int) -> Holders:
        """Returns the roles that hold the slabs in a phase."""
        placement, table = self._node.placement, self._moves.table
        if phase is Phase.SCORE:
            return placement.scoring[scoring]
        is_sampling = phase in (Phase.SYNC, Phase.VALIDATE, Phase.ROLLOUT)
        fixed = placement.sampling if is_sampling else placement.training
        return {slab: role if role == TRAINER else table.get(slab, role) for slab, role in fixed.items()}

    def holders_on(self, index: int, phase: Phase, scoring: int = 0) -> tuple[tuple[int, str], ...]:
        """Returns (slab, role) of one node's slabs in a phase."""
        holders = self.holders(phase, scoring)
        slabs = self._node.placement.slabs_by_node[index]
        return tuple((slab.index, holders[slab]) for slab in slabs if slab in holders)

    def split(self) -> dict[str, int]:
        """Returns the number of shared slabs of each role, on nodes that take part."""
        return {role: len(self._moves.of(role)) for role in self._rules.least}

    def counts(self) -> dict[str, int]:
        """Returns the number of slabs of each engine role while it samples or scores."""
        placement, found = self._node.placement, Counter[str]()
        for phase in (self.holders(Phase.ROLLOUT, 0), *placement.scoring):
            found.update(role for role in phase.values() if role != TRAINER)
        return dict(found)

    def resumed(self, row: Mapping[str, Any]) -> None:
        """Begins with the split of the iteration that the run resumes from, if its slabs are all here."""
        split = {role: row.get(f"placement/slabs/{role}") for role in self._rules.least}
        counts = {role: num for role, num in split.items() if type(num) is int and num >= 1}
        if counts.keys() == split.keys() and sum(counts.values()) == sum(self.split().values()):
            self._plan(counts)

    def gone(self, index: int) -> None:
        """Handles a lost node."""
        self.loads.gone(index)
        self._splits.clear()
        self._step(core.NodeGone(index))

    def back(self, index: int) -> None:
        """Handles a node that takes part again."""
        self._splits.clear()
        self._step(core.NodeBack(index))

    # ---- batches --------------------------------------------------------------------------------

    def begin_sampling(self, phase: Phase = Phase.ROLLOUT, scoring: int = 0) -> None:
        """Lets slabs move, while a batch is sampled and scored."""
        self._sampling = phase, scoring
        self._begun = self._begun or self.split()
        self.held.count(self._there())
        if self._moves.table and not self._is_stopped:
            self._step(core.TableOpened())
            if not self._is_deciding:
                self._is_deciding = True
                self._background.spawn(self._decide_again())

    def end_sampling(self) -> None:
        """No slab that the trainer uses too may move any more."""
        self._sampling = None
        self.held.count({})
        if self._node.config.placement.mode == "partial":
            self._step(core.TableClosed())

    def stop(self) -> None:
        """Orders no more moves, because the run ends early."""
        self._is_stopped = True
        self._step(core.TableClosed())

    def batch_over(self) -> None:
        """Begins to choose the next split, beside training. `measured` knows the batch."""
        if self._moves.table and self.measured.is_known and not self._is_stopped:
            self._splits.append(self._begun or self.split())
            self._choosing = asyncio.get_running_loop().create_task(self._choose())
        self._begun = {}

    async def ready(self) -> None:
        """Waits for the split of the next batch; the next barriers carry it out."""
        if self._choosing is not None:
            await self._choosing
            self._choosing = None
        self._hear_unfit()
        if self._chosen and not self._moves.is_open:
            self._plan(self._chosen)
        self._chosen = {}

    async def _choose(self) -> None:
        measured, splits = self.measured, [*self._splits]
        roles, demand, (switch_s, _) = measured.roles(), measured.demand(), measured.switch_s()

        def chosen() -> tuple[dict[str, int], float, float]:
            best = choose(splits, demand, roles, ROLLOUT, switch_s)
            now_s, best_s = (predict(each, demand, roles, ROLLOUT, switch_s) for each in (splits[-1], best))
            return best, now_s, best_s

        began_s = clock.monotonic_s()
        split, now_s, best_s = await call_in_thread(chosen)
        self._events.emit(
            "split.choose", before=splits[-1], after=split, predicted_s=round(now_s, 6),
            chosen_s=round(best_s, 6), num_samples=demand.num_samples, tokens=measured.tokens,
            switch_s=round(switch_s, 6), took_s=round(clock.monotonic_s() - began_s, 6),
        )  # fmt: skip
        if sum(split.values()) != sum(self.split().values()):
            return  # a node was lost or has come back meanwhile
        self._chosen = split
        if self._moves.is_open:
            self._begun = split
            for slab, role in self._assigned(split).items():
                self._want(slab, role, {"reason": "split"})

    def _assigned(self, split: Mapping[str, int]) -> dict[Slab, str]:
        live = {slab: role for slab, role in self._moves.table.items() if slab.node not in self._moves.lost}
        return core.assigned(live, split, self._built(), self._moves.unfit)

    def _plan(self, split: Mapping[str, int]) -> None:
        self._moves = core.planned(self._moves, self._assigned(split))

    def _built(self) -> frozenset[tuple[Slab, str]]:
        loads, by_node = self.loads.now(), self._node.placement.slabs_by_node
        return frozenset(
            (by_node[index][slab], role) for index, load in loads.items() for slab, role in load.built
        )

    # ---- moves ----------------------------------------------------------------------------------

    async def _decide_again(self) -> None:
        while self._moves.is_open:
            await asyncio.sleep(DECIDE_S)
            self._hear_unfit()
            if self._sampling and self._moves.is_open and self.measured.is_known:
                self._decide()
        self._is_deciding = False

    def _decide(self) -> None:
        """Moves slabs to GenRMs, if the batch is near its end."""
        tail, roles = self._tail(), self.measured.roles()
        slabs = {slab.name: slab for slab in self._moves.table}
        for move in tail_moves(tail, roles, ROLLOUT):
            about = {
                "reason": "tail", "running": tail.running[move.slab], "backlog_s": round(move.backlog_s, 6),
                "after_s": round(move.after_s, 6), "switch_s": round(tail.switch_s, 6),
                "is_built": not tail.is_unbuilt(move.slab, move.role),
            }  # fmt: skip
            self._want(slabs[move.slab], move.role, about)

    def _tail(self) -> BatchTail:
        loads, built = self.loads.now(), self._built()
        there = {slab for slab in self._moves.there(ROLLOUT)}
        by_node = self._node.placement.slabs_by_node
        running = {
            slab.name: each.num_requests
            for index, load in loads.items() for each in load.slabs
            if each.role == ROLLOUT and (slab := by_node[index][each.slab]) in there
        }  # fmt: skip
        judges = [role for role in self._rules.least if role != ROLLOUT]
        unbuilt = {
            role: frozenset(slab.name for slab in there if (slab, role) not in built) for role in judges
        }
        switch_s, build_s = self.measured.switch_s()
        return BatchTail(
            running=running, num_waiting=sum(load.num_waiting for load in loads.values()),
            backlog=self.measured.backlog(), num_asked=self.measured.num_asked(),
            split={role: len(self._moves.of(role)) for role in judges},
            switch_s=switch_s, num_late=self.measured.demand().num_late, build_s=build_s, unbuilt=unbuilt,
        )  # fmt: skip

    def _want(self, slab: Slab, role: str, about: Mapping[str, Any]) -> None:
        if core.may_move(self._moves, slab, role, self._rules):
            self._events.emit(
                "slab.move", slab=slab.name, before=self._moves.table[slab], after=role, **about
            )  # fmt: skip
        self._step(core.MoveWanted(slab, role))

    def _step(self, event: core.MoveEvent) -> None:
        self._moves, orders = core.step(self._moves, event, self._rules)
        self.held.count(self._there())
        for order in orders:
            self._background.spawn(self._order(order))

    def _there(self) -> dict[str, int]:
        """Returns the number of slabs that engines of each role hold; none if nothing is sampled."""
        if self._sampling is None:
            return {}
        moves, holders = self._moves, self.holders(*self._sampling)
        away = {slab for slab in holders if slab in moves.moving or slab.node in moves.lost}
        return Counter(role for slab, role in holders.items() if role != TRAINER and slab not in away)

    async def _order(self, order: OrderMove) -> None:
        slab, began_s = order.slab, clock.monotonic_s()
        body = MoveSlab(seq=self.seq, slab=slab.index, role=order.role)
        moved = await self._clients.ask_if_there(slab.node, body)
        if moved is None:
            return  # the node is lost
        seconds = clock.monotonic_s() - began_s
        if moved.has_moved:
            self._num_moves += 1
            self.measured.overhead_s = seconds - moved.workers_s
        self._events.emit(
            "slab.moved", slab=slab.name, after=order.role, has_moved=moved.has_moved,
            seconds=round(seconds, 6), workers_s=round(moved.workers_s, 6),
        )  # fmt: skip
        if moved.is_unfit:
            self._step(core.MoveFailed(slab, order.role, self._node.placement.sampling[slab]))
        else:
            self._step(core.MoveAnswered(slab, moved.has_moved))

    def _hear_unfit(self) -> None:
        """Handles engines that could not be built at a barrier."""
        by_node, first = self._node.placement.slabs_by_node, self._node.placement.sampling
        for index, load in self.loads.now().items():
            for number, role in load.unfit:
                slab = by_node[index][number]
                if (slab, role) not in self._moves.unfit:
                    self._step(core.MoveFailed(slab, role, first[slab]))

    def metrics(self) -> dict[str, float]:
        """Returns the split, and the number of moves since the last call; nothing if the split is fixed."""
        if not self._moves.table:
            return {}
        found: dict[str, float] = {f"placement/slabs/{role}": num for role, num in self.split().items()}
        found["placement/moves"], self._num_moves = self._num_moves, 0
        return found
