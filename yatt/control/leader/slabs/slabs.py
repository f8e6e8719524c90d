"""Slabs that change between rollout and GenRMs: when, and which ones.

Carries out the decisions of `yatt.core.gpus.moves` (which slab may move) and `yatt.core.gpus.split` (which
should). Between batches the split is chosen beside training, or that roles take turns in the next batch; near
the end of a batch free slabs go to GenRMs.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from yatt import clock
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.config.check import may_take_turns
from yatt.config.schema import RunConfig
from yatt.control.leader.background import Background
from yatt.control.leader.node_clients import NodeClients
from yatt.control.leader.slabs.measured import HeldTime, Measurements, slab_move_rules, tail_of
from yatt.control.leader.slabs.node_loads import NodeLoads
from yatt.control.leader.slabs.slab_table import SlabTable
from yatt.control.node import Node
from yatt.core.gpus import moves as core
from yatt.core.gpus.moves import OrderMove
from yatt.core.gpus.placement import ROLLOUT, TRAINER, Slab
from yatt.core.gpus.prediction import predicted_seconds
from yatt.core.gpus.split import UNDO_BATCHES, choose_split
from yatt.core.gpus.tail import tail_moves, takes_turns
from yatt.core.phases.phases import Phase
from yatt.errors import EXIT_FAILED
from yatt.obs.story.events import EventLog
from yatt.records.events.slabs import SlabArrived, SlabOrdered, SplitChosen, SplitFailed
from yatt.records.moves import MoveSlab

_LOG = logging.getLogger(__name__)
DECIDE_S = 1.0
"""Interval at which moves are decided near the end of a batch."""


CHOICE_S = 5.0
"""Longest wait of a publication for the choice of a split."""


async def next_split(
    splits: Sequence[dict[str, int]], measured: Measurements, *, may_turn: bool
) -> SplitChosen:
    """Chooses in a thread.

    Args:
        splits: of the batches before, oldest first.
        may_turn: whether roles may take turns.
    """
    roles, demand, (switch_s, _) = measured.roles(), measured.demand(), measured.switch_s()

    def chosen() -> tuple[dict[str, int], float, float]:
        best = choose_split(splits, demand, roles, ROLLOUT, switch_s, may_turn=may_turn)
        now_s, best_s = (
            predicted_seconds(each, demand, roles, ROLLOUT, switch_s) for each in (splits[-1], best)
        )
        return best, now_s, best_s

    tokens, began_s = dict(measured.tokens), clock.monotonic_s()
    split, now_s, best_s = await call_in_thread(chosen)
    return SplitChosen(
        before=splits[-1],
        after=split,
        predicted_s=round(now_s, 6),
        chosen_s=round(best_s, 6),
        num_samples=demand.num_samples,
        tokens=tokens,
        switch_s=round(switch_s, 6),
        took_s=round(clock.monotonic_s() - began_s, 6),
    )


class MoveOrders:
    """Orders slabs to their roles in the table, and hears the nodes' answers.

    Attributes:
        seq: of the leader's state, which fences orders.
        measured: speeds, lengths, and what nodes report.
        held: for how long roles have held slabs.
    """

    def __init__(
        self,
        table: SlabTable,
        clients: NodeClients,
        measured: Measurements,
        events: EventLog,
        background: Background,
    ) -> None:
        self.table, self._clients, self.measured = table, clients, measured
        self.events, self._background = events, background
        self.held = HeldTime()
        self.seq = self._num_moves = 0

    def step(self, event: core.MoveEvent) -> None:
        """Changes the table, and carries out what it orders."""
        orders = self.table.step(event)
        self.held.count(self.table.num_held())
        for order in orders:
            self._background.spawn(self._order(order))

    def want(self, slab: Slab, order: SlabOrdered) -> None:
        """Orders a slab to another role, if it may move."""
        if core.may_move(self.table.moves, slab, order.after, self.table.rules):
            self.events.emit(order)
        self.step(core.MoveWanted(slab, order.after))

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
        self.events.emit(
            SlabArrived(
                slab=slab.name,
                after=order.role,
                has_moved=moved.has_moved,
                seconds=round(seconds, 6),
                workers_s=round(moved.workers_s, 6),
            )
        )
        if moved.is_unfit:
            self.step(core.MoveFailed(slab, order.role, self.table.placement.sampling[slab]))
        else:
            self.step(core.MoveAnswered(slab, moved.has_moved))

    def hear_unfit(self) -> None:
        """Handles engines that could not be built at a barrier."""
        placement = self.table.placement
        for index, load in self.measured.loads.now().items():
            for number, role in load.unfit:
                slab = placement.slabs_by_node[index][number]
                if (slab, role) not in self.table.moves.unfit:
                    self.step(core.MoveFailed(slab, role, placement.sampling[slab], is_answer=False))

    def take_num_moves(self) -> int:
        """Returns the number of moves since the last call."""
        found, self._num_moves = self._num_moves, 0
        return found


class Splits:
    """The splits of batches: of those before, of the present one, and the choice of the next.

    Attributes:
        begun: the split with which the present batch began; empty before.
        takes_turns: whether GenRMs score the present batch in phases of their own.
    """

    def __init__(self, config: RunConfig, orders: MoveOrders) -> None:
        self._config, self._orders, self._table = config, orders, orders.table
        self._before = deque[dict[str, int]](maxlen=UNDO_BATCHES + 2)
        self.begun: dict[str, int] = {}
        self.takes_turns = False
        self._choosing: asyncio.Task[None] | None = None
        self._chosen: dict[str, int] = {}

    def forget(self) -> None:
        """Forgets the splits of this batch and of those before: nodes have changed."""
        self._before.clear()
        self.begun = {}

    def resumed(self, split: Mapping[str, Any]) -> None:
        """Begins with the split of an earlier attempt, if its slabs are all here."""
        rules = self._table.rules
        counts = {role: num for role, num in split.items() if type(num) is int and num >= 0}
        if counts.keys() != split.keys() or sum(counts.values()) != sum(self._table.split().values()):
            return
        is_within = all(rules.least[role] <= num <= rules.most[role] for role, num in counts.items())
        if is_within or (takes_turns(counts, ROLLOUT) and self._may_turn()):
            self._plan(counts)

    def _may_turn(self) -> bool:
        return may_take_turns(self._config) and not self._table.moves.unfit

    def batch_over(self) -> None:
        """Begins to choose the next split, beside training."""
        is_known = self._orders.measured.is_known
        can_choose = (
            self._table.moves.table and is_known and (all(self._table.split().values()) or self.takes_turns)
        )
        if can_choose and self._choosing is None:
            self._before.append(self.begun or self._table.split())
            self._choosing = asyncio.get_running_loop().create_task(self._choose())
        self.begun = {}

    async def ready(self) -> None:
        """Waits a short time for the split of the next batch; the next barriers carry it out. A choice that
        takes longer is for a later batch."""
        if self._choosing is not None:
            done, _ = await asyncio.wait({self._choosing}, timeout=CHOICE_S)
            self._choosing = None if done else self._choosing
        self._orders.hear_unfit()
        if self._chosen and not self._table.moves.is_open:
            self._plan(self._chosen)
        self._chosen, self.takes_turns = {}, self._table.moves.takes_turns

    async def _choose(self) -> None:
        try:
            await self._choose_next()
        except Exception as error:  # noqa: BLE001 (a split is for speed only: the run keeps the one it has)
            _failed(self._orders.events, error)

    async def _choose_next(self) -> None:
        chosen = await next_split([*self._before], self._orders.measured, may_turn=self._may_turn())
        self._orders.events.emit(chosen)
        split = dict(chosen.after)
        if sum(split.values()) != sum(self._table.split().values()):
            return  # a node was lost or has come back meanwhile
        self._chosen = split
        if self._table.moves.is_open and not _is_trainers(self._config):
            self.begun = split
            await self._want_all(self._assigned(split))

    async def _want_all(self, table: Mapping[Slab, str]) -> None:
        """Orders the slabs that change; other work of the leader goes on meanwhile."""
        for slab, role in table.items():
            before = self._table.moves.table[slab]
            if before != role:
                order = SlabOrdered(slab=slab.name, before=before, after=role, reason="split")
                self._orders.want(slab, order)
                await asyncio.sleep(0)

    def _assigned(self, split: Mapping[str, int]) -> dict[Slab, str]:
        moves, by_node = self._table.moves, self._table.placement.slabs_by_node
        live = {slab: role for slab, role in moves.table.items() if slab.node not in moves.lost}
        loads = self._orders.measured.loads.now().items()
        built = ((by_node[index][slab], role) for index, load in loads for slab, role in load.built)
        return core.assigned_table(live, split, frozenset(built), moves.unfit)

    def _plan(self, split: Mapping[str, int]) -> None:
        if takes_turns(split, ROLLOUT):
            self._table.moves = core.with_turns(self._table.moves)
        else:
            self._table.moves = core.with_table(self._table.moves, self._assigned(split))


def _failed(events: EventLog, error: Exception) -> None:
    _LOG.exception("a defect in the policy of the split")
    events.emit(SplitFailed(error=repr(error)))


def _is_trainers(config: RunConfig) -> bool:
    """Whether the trainer uses the same slabs."""
    return config.placement.mode == "partial"


class Slabs:
    """The leader's slabs: when they may move, and which ones do near the end of a batch.

    Attributes:
        orders: of moves.
        measured: speeds, lengths, and what nodes report.
    """

    def __init__(
        self, node: Node, clients: NodeClients, loads: NodeLoads, events: EventLog, background: Background
    ) -> None:
        self._node, self._background = node, background
        self.measured = Measurements(node.config, loads)
        self.table = SlabTable(node.placement, slab_move_rules(node.config), node.absent)
        self.orders = MoveOrders(self.table, clients, self.measured, events, background)
        self._splits = Splits(node.config, self.orders)
        self._is_deciding = self._is_stopped = False

    @property
    def takes_turns(self) -> bool:
        """Whether GenRMs score the present batch in phases of their own. The same for all of a batch."""
        return bool(self._node.placement.scoring) or self._splits.takes_turns

    def counts(self) -> dict[str, int]:
        """Returns the number of slabs of each engine role while it samples or scores."""
        placement, found = self._node.placement, Counter[str]()
        turns = placement.turns if self.takes_turns else ()
        for phase in (self.table.holders(Phase.ROLLOUT, 0), *turns):
            found.update(role for role in phase.values() if role != TRAINER)
        return dict(found)

    def resumed(self, row: Mapping[str, Any]) -> None:
        """Begins with the split of the iteration that the run resumes from, if its slabs are all here."""
        self._splits.resumed({role: row.get(f"placement/gpu_sets/{role}") for role in self.table.rules.least})

    def gone(self, index: int) -> None:
        """Handles a lost node."""
        self.measured.loads.gone(index)
        self._splits.forget()
        self.orders.step(core.NodeGone(index))
        moves, least = self.table.moves, self.table.rules.least
        num_left = sum(slab.node not in moves.lost for slab in moves.table)
        if moves.table and num_left < len(least) and not self._is_stopped:
            roles = ", ".join(least)
            error = f"each of {roles} needs a GPU set; the nodes that are left have {num_left}"
            self._background.inbox.fail(error, EXIT_FAILED)

    def back(self, index: int) -> None:
        """Handles a node that takes part again."""
        self._splits.forget()
        self.orders.step(core.NodeBack(index))

    # ---- batches --------------------------------------------------------------------------------

    def begin_sampling(self, phase: Phase = Phase.ROLLOUT, scoring: int = 0) -> None:
        """Lets slabs move, while a batch is sampled and scored."""
        splits, ahead = self._splits, self._node.config.rollout.ahead
        self.table.sampling = phase, scoring
        if not splits.begun and not ahead:
            self.measured.begin()
        splits.begun = splits.begun or self.table.split()
        self.orders.held.count(self.table.num_held())
        if not self.table.moves.table or self._is_stopped or splits.takes_turns:
            return
        self.orders.step(core.TableOpened(is_settled=not ahead))
        if not self._is_deciding:
            self._is_deciding = True
            self._background.spawn(self._decide_again())

    def end_sampling(self) -> None:
        """No slab that the trainer uses too may move any more."""
        self.table.sampling = None
        self.orders.held.count({})
        if _is_trainers(self._node.config):
            self.orders.step(core.TableClosed())

    def stop(self) -> None:
        """Orders no more moves, because the run ends early."""
        self._is_stopped = True
        self.orders.step(core.TableClosed())

    def batch_over(self) -> None:
        """Begins to choose the next split, beside training. `measured` knows the batch."""
        self._splits.batch_over()

    async def ready(self) -> None:
        """Waits a short time for the split of the next batch, which the next barriers carry out."""
        await self._splits.ready()

    # ---- near the end of a batch ----------------------------------------------------------------

    async def _decide_again(self) -> None:
        while self.table.moves.is_open:
            await asyncio.sleep(DECIDE_S)
            try:
                self.orders.hear_unfit()
                if self.table.sampling and self.table.moves.is_open and self.measured.is_known:
                    self._decide()
            except Exception as error:  # noqa: BLE001 (as above)
                _failed(self.orders.events, error)
        self._is_deciding = False

    def _decide(self) -> None:
        """Moves slabs to GenRMs, if the batch is near its end."""
        tail = tail_of(self.table, self.measured)
        moves = tail_moves(tail, self.measured.roles(), ROLLOUT)
        slabs = {slab.name: slab for slab in self.table.moves.table} if moves else {}
        for move in moves:
            is_built = not tail.is_unbuilt(move.slab, move.role)
            slab = slabs[move.slab]
            order = SlabOrdered(
                slab=slab.name,
                before=self.table.moves.table[slab],
                after=move.role,
                reason="tail",
                running=tail.running[move.slab],
                backlog_s=round(move.backlog_s, 6),
                after_s=round(move.after_s, 6),
                is_built=is_built,
                switch_s=round(tail.switch_s if is_built else tail.build_s, 6),
            )
            self.orders.want(slab, order)

    def metrics(self) -> dict[str, float]:
        """Returns the split, and the number of moves since the last call; nothing if the split is fixed."""
        if not self.table.moves.table:
            return {}
        split = self.table.split().items()
        found: dict[str, float] = {f"placement/gpu_sets/{role}": num for role, num in split}
        found["placement/moves"] = self.orders.take_num_moves()
        return found
