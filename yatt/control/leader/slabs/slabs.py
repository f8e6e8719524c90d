"""Which role has which slab: the placement's table, and slabs that change between rollout and GenRMs.

Carries out the decisions of `yatt.core.gpus.moves` (which slab may move) and `yatt.core.gpus.split` (which
should). Between batches the split is chosen beside training; near the end of a batch free slabs go to GenRMs.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from yatt import clock
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.control.leader.background import Background
from yatt.control.leader.node_clients import NodeClients
from yatt.control.leader.slabs.measured import HeldTime, Measurements, num_held, slab_move_rules, tail_of
from yatt.control.leader.slabs.node_loads import NodeLoads
from yatt.control.node import Node
from yatt.core.gpus import moves as core
from yatt.core.gpus.moves import Moves, OrderMove
from yatt.core.gpus.placement import ROLLOUT, TRAINER, Holders, Placement, Slab
from yatt.core.gpus.prediction import predicted_seconds
from yatt.core.gpus.split import UNDO_BATCHES, choose_split
from yatt.core.gpus.tail import tail_moves
from yatt.core.phases.phases import Phase
from yatt.errors import EXIT_FAILED
from yatt.obs.story.events import EventLog
from yatt.records.moves import MoveSlab

_LOG = logging.getLogger(__name__)
DECIDE_S = 1.0
"""Interval at which moves are decided near the end of a batch."""


CHOICE_S = 5.0
"""Longest wait of a publication for the choice of a split."""

NodeHolders = tuple[tuple[int, str], ...]
"""(slab, role) of one node's slabs."""


class SlabRoles:
    """Looks up roles for the barriers: each node is asked for twice per phase, and hashing thousands of slabs
    for each answer took a tenth of a leader's time. So answers are kept until a slab moves."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._table: Mapping[Slab, str] = {}
        self._known: dict[tuple[int, int], NodeHolders] = {}

    def holders(self, phase: Phase, scoring: int, table: Mapping[Slab, str]) -> Holders:
        """Returns the roles that hold the slabs in a phase."""
        fixed = self._fixed(phase, scoring)
        return {slab: _role(slab, role, table) for slab, role in fixed.items()}

    def holders_on(self, index: int, phase: Phase, scoring: int, table: Mapping[Slab, str]) -> NodeHolders:
        """Returns (slab, role) of one node's slabs in a phase. A changed table must be another object."""
        if table is not self._table:
            self._table, self._known = table, {}
        fixed = self._fixed(phase, scoring)
        key = index, id(fixed)  # the placement keeps it; phases that share one share their answers
        if (found := self._known.get(key)) is None:
            slabs = self._placement.slabs_by_node[index]
            found = tuple((slab.index, _role(slab, fixed[slab], table)) for slab in slabs if slab in fixed)
            self._known[key] = found
        return found

    def _fixed(self, phase: Phase, scoring: int) -> Holders:
        if phase is Phase.SCORE:
            return self._placement.scoring[scoring]
        is_sampling = phase in (Phase.SYNC, Phase.VALIDATE, Phase.ROLLOUT)
        return self._placement.sampling if is_sampling else self._placement.training


def _role(slab: Slab, role: str, table: Mapping[Slab, str]) -> str:
    return role if role == TRAINER else table.get(slab, role)


async def next_split(
    splits: Sequence[dict[str, int]], measured: Measurements
) -> tuple[dict[str, int], dict[str, Any]]:
    """Chooses in a thread; returns the split, and the fields of the event about it.

    Args:
        splits: of the batches before, oldest first.
    """
    roles, demand, (switch_s, _) = measured.roles(), measured.demand(), measured.switch_s()

    def chosen() -> tuple[dict[str, int], float, float]:
        best = choose_split(splits, demand, roles, ROLLOUT, switch_s)
        now_s, best_s = (
            predicted_seconds(each, demand, roles, ROLLOUT, switch_s) for each in (splits[-1], best)
        )
        return best, now_s, best_s

    tokens, began_s = dict(measured.tokens), clock.monotonic_s()
    split, now_s, best_s = await call_in_thread(chosen)
    return split, {
        "before": splits[-1], "after": split, "predicted_s": round(now_s, 6), "chosen_s": round(best_s, 6),
        "num_samples": demand.num_samples, "tokens": tokens, "switch_s": round(switch_s, 6),
        "took_s": round(clock.monotonic_s() - began_s, 6),
    }  # fmt: skip


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
        placement, config, self._rules = node.placement, node.config, slab_move_rules(node.config)
        table = {slab: placement.sampling[slab] for slab in placement.slabs if slab in placement.shared}
        self._unshared = {slab: role for slab, role in placement.sampling.items() if slab not in table}
        self._moves, self._roles = Moves(table=table), SlabRoles(placement)
        for index in sorted(node.absent):
            self._moves, _ = core.step(self._moves, core.NodeGone(index), self._rules)
        self._splits = deque[dict[str, int]](maxlen=UNDO_BATCHES + 2)
        self._choosing: asyncio.Task[None] | None = None
        self._chosen: dict[str, int] = {}
        self._is_deciding = self._is_stopped = False
        self._is_trainers = config.placement.mode == "partial"  # the trainer uses the same slabs
        self._sampling: tuple[Phase, int] | None = None
        self._begun: dict[str, int] = {}  # the split with which the present batch began
        self.seq = self._num_moves = 0
        self.measured = Measurements(config, loads)
        self.held = HeldTime()

    # ---- the table ------------------------------------------------------------------------------

    def holders(self, phase: Phase, scoring: int) -> Holders:
        """Returns the roles that hold the slabs in a phase."""
        return self._roles.holders(phase, scoring, self._moves.table)

    def holders_on(self, index: int, phase: Phase, scoring: int = 0) -> NodeHolders:
        """Returns (slab, role) of one node's slabs in a phase."""
        return self._roles.holders_on(index, phase, scoring, self._moves.table)

    def split(self) -> dict[str, int]:
        """Returns the number of shared slabs of each role, on nodes that take part."""
        num_of = self._moves.num_of()
        return {role: num_of[role] for role in self._rules.least}

    def counts(self) -> dict[str, int]:
        """Returns the number of slabs of each engine role while it samples or scores."""
        placement, found = self._node.placement, Counter[str]()
        for phase in (self.holders(Phase.ROLLOUT, 0), *placement.scoring):
            found.update(role for role in phase.values() if role != TRAINER)
        return dict(found)

    def resumed(self, row: Mapping[str, Any]) -> None:
        """Begins with the split of the iteration that the run resumes from, if its slabs are all here."""
        split = {role: row.get(f"placement/gpu_sets/{role}") for role in self._rules.least}
        counts = {
            role: num for role, num in split.items()
            if type(num) is int and self._rules.least[role] <= num <= self._rules.most[role]
        }  # fmt: skip
        if counts.keys() == split.keys() and sum(counts.values()) == sum(self.split().values()):
            self._plan(counts)

    def gone(self, index: int) -> None:
        """Handles a lost node."""
        self.loads.gone(index)
        self._splits.clear()
        self._begun = {}
        self._step(core.NodeGone(index))
        num_left = sum(slab.node not in self._moves.lost for slab in self._moves.table)
        if self._moves.table and num_left < len(self._rules.least) and not self._is_stopped:
            roles = ", ".join(self._rules.least)
            error = f"each of {roles} needs a GPU set; the nodes that are left have {num_left}"
            self._background.inbox.fail(error, EXIT_FAILED)

    def back(self, index: int) -> None:
        """Handles a node that takes part again."""
        self._splits.clear()
        self._begun = {}
        self._step(core.NodeBack(index))

    # ---- batches --------------------------------------------------------------------------------

    def begin_sampling(self, phase: Phase = Phase.ROLLOUT, scoring: int = 0) -> None:
        """Lets slabs move, while a batch is sampled and scored."""
        self._sampling = phase, scoring
        if not self._begun and not self._node.config.rollout.ahead:
            self.measured.begin()
        self._begun = self._begun or self.split()
        self.held.count(self._there())
        if not self._moves.table or self._is_stopped:
            return
        self._step(core.TableOpened(is_settled=not self._node.config.rollout.ahead))
        if not self._is_deciding:
            self._is_deciding = True
            self._background.spawn(self._decide_again())

    def end_sampling(self) -> None:
        """No slab that the trainer uses too may move any more."""
        self._sampling = None
        self.held.count({})
        if self._is_trainers:
            self._step(core.TableClosed())

    def stop(self) -> None:
        """Orders no more moves, because the run ends early."""
        self._is_stopped = True
        self._step(core.TableClosed())

    def batch_over(self) -> None:
        """Begins to choose the next split, beside training. `measured` knows the batch."""
        can_choose = self._moves.table and self.measured.is_known and all(self.split().values())
        if can_choose and self._choosing is None:
            self._splits.append(self._begun or self.split())
            self._choosing = asyncio.get_running_loop().create_task(self._choose())
        self._begun = {}

    async def ready(self) -> None:
        """Waits a short time for the split of the next batch; the next barriers carry it out. A choice that
        takes longer is for a later batch."""
        if self._choosing is not None:
            done, _ = await asyncio.wait({self._choosing}, timeout=CHOICE_S)
            self._choosing = None if done else self._choosing
        self._hear_unfit()
        if self._chosen and not self._moves.is_open:
            self._plan(self._chosen)
        self._chosen = {}

    async def _choose(self) -> None:
        try:
            await self._choose_next()
        except Exception as error:  # noqa: BLE001 (a split is for speed only: the run keeps the one it has)
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        _LOG.exception("a defect in the policy of the split")
        self._events.emit("split.failed", error=repr(error))

    async def _choose_next(self) -> None:
        split, about = await next_split([*self._splits], self.measured)
        self._events.emit("split.choose", **about)
        if sum(split.values()) != sum(self.split().values()):
            return  # a node was lost or has come back meanwhile
        self._chosen = split
        if self._moves.is_open and not self._is_trainers:
            self._begun = split
            await self._want_all(self._assigned(split))

    async def _want_all(self, table: Mapping[Slab, str]) -> None:
        """Orders the slabs that change; other work of the leader goes on meanwhile."""
        for slab, role in table.items():
            if self._moves.table[slab] != role:
                self._want(slab, role, {"reason": "split"})
                await asyncio.sleep(0)

    def _assigned(self, split: Mapping[str, int]) -> dict[Slab, str]:
        moves, by_node = self._moves, self._node.placement.slabs_by_node
        live = {slab: role for slab, role in moves.table.items() if slab.node not in moves.lost}
        loads = self.loads.now().items()
        built = ((by_node[index][slab], role) for index, load in loads for slab, role in load.built)
        return core.assigned_table(live, split, frozenset(built), moves.unfit)

    def _plan(self, split: Mapping[str, int]) -> None:
        self._moves = core.with_table(self._moves, self._assigned(split))

    # ---- moves ----------------------------------------------------------------------------------

    async def _decide_again(self) -> None:
        while self._moves.is_open:
            await asyncio.sleep(DECIDE_S)
            try:
                self._hear_unfit()
                if self._sampling and self._moves.is_open and self.measured.is_known:
                    self._decide()
            except Exception as error:  # noqa: BLE001 (as above)
                self._failed(error)
        self._is_deciding = False

    def _decide(self) -> None:
        """Moves slabs to GenRMs, if the batch is near its end."""
        tail = tail_of(self._moves, self._node.placement, self.measured)
        moves = tail_moves(tail, self.measured.roles(), ROLLOUT)
        slabs = {slab.name: slab for slab in self._moves.table} if moves else {}
        for move in moves:
            is_built = not tail.is_unbuilt(move.slab, move.role)
            about = {
                "reason": "tail", "running": tail.running[move.slab], "backlog_s": round(move.backlog_s, 6),
                "after_s": round(move.after_s, 6), "is_built": is_built,
                "switch_s": round(tail.switch_s if is_built else tail.build_s, 6),
            }  # fmt: skip
            self._want(slabs[move.slab], move.role, about)

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
        phase, scoring = self._sampling
        fixed = self._node.placement.scoring[scoring] if phase is Phase.SCORE else self._unshared
        return num_held(self._moves, fixed)

    async def _order(self, order: OrderMove) -> None:
        slab, began_s = order.slab, clock.monotonic_s()
        body = MoveSlab(seq=self.seq, slab=slab.index, role=order.role)
        moved = await self._clients.ask_if_there(slab.node, body)
        if moved is None:
            return  # the node is lost
        seconds = clock.monotonic_s() - began_s
        if moved.has_moved:
            self._num_moves += 1
            self.measured.overhead_s = max(0.0, seconds - moved.workers_s)
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
                    self._step(core.MoveFailed(slab, role, first[slab], is_answer=False))

    def metrics(self) -> dict[str, float]:
        """Returns the split, and the number of moves since the last call; nothing if the split is fixed."""
        if not self._moves.table:
            return {}
        found: dict[str, float] = {f"placement/gpu_sets/{role}": num for role, num in self.split().items()}
        found["placement/moves"], self._num_moves = self._num_moves, 0
        return found
