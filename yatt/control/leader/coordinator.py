"""Drives the iterations from metadata: the leader's loop around `yatt.core.phases.phases`.

Every action may be repeated. A run resumes from its checkpoints and claims; an attempt leaves no other state,
so transitions are not recorded.

`Members` does what the leader has to do when nodes leave a running attempt and join it again.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec import structs

from yatt import clock
from yatt.adapters.files.files import make_within, sealed_record, write_atomically
from yatt.adapters.files.patience import LIMIT_S, with_retries
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.control.leader.background import Background
from yatt.control.leader.evaluation_work import EvaluationWork
from yatt.control.leader.metrics_row import MetricsRow
from yatt.control.leader.node_clients import NodeClients
from yatt.control.leader.phase_work import PhaseWork
from yatt.control.leader.slabs.slabs import Slabs
from yatt.control.node import Node
from yatt.core.figures.goodput import category_of
from yatt.core.phases import phases
from yatt.core.phases.phases import Phase, Program, RunState
from yatt.errors import DeadlineExceeded, WorkerFailed, YattError
from yatt.obs.story.events import EventLog
from yatt.records.cluster import BreakOffSampling, SwitchSlabs
from yatt.records.events.attempts import (
    AttemptEnded,
    NodeExcluded,
    NodeReturned,
    PhaseBegan,
    PhaseEnded,
    PhasePartBegan,
)
from yatt.records.events.saves import CheckpointPostponed

_LOG = logging.getLogger(__name__)
BREAK_OFF_S = 30.0
"""Longest time, in addition to a lost node's silence, for nodes to end the current sampling."""

CAUSE_S = 2.0
"""Longest wait for the cause of a failure, in addition to a dead node's silence."""

RECORD_S = 20.0
"""Longest time to write the record of a lost node; then the attempt ends without it."""


class Members:
    """Carries out what `yatt.core.phases.phases` decides about nodes."""

    def __init__(
        self, node: Node, clients: NodeClients, slabs: Slabs, events: EventLog, background: Background
    ) -> None:
        self._node, self._clients, self._events, self._background = node, clients, events, background
        self._slabs = slabs
        self._inbox = background.inbox
        self._writing: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def perform(self, action: phases.Exclude | phases.Prepare | phases.Admit) -> None:
        """Carries out one action. Only the record of a loss that ends the attempt is waited for."""
        match action:
            case phases.Exclude():
                await self._exclude(action)
            case phases.Prepare():
                self._background.spawn(self._prepare(action))
            case phases.Admit():
                self._admit(action)

    async def _exclude(self, lost: phases.Exclude) -> None:
        """Excludes a process of a node everywhere, and writes a record for the start of the next attempt."""
        await self._clients.exclude(lost.node, lost.life, lost.why)
        self._slabs.gone(lost.node)
        silence_s = round(self._inbox.silences.get(lost.node, 0.0), 3)
        _LOG.warning("node%d %s; the run %s", lost.node, lost.why, "goes on" if lost.goes_on else "ends")
        event = NodeExcluded(
            node=lost.node, life=lost.life, silence_s=silence_s, why=lost.why, goes_on=lost.goes_on
        )
        self._events.emit(event)
        content = structs.asdict(event)
        if lost.goes_on:
            self._background.spawn(self._write(lost.node, content))
        else:  # the start of the next attempt reads it
            with contextlib.suppress(TimeoutError):  # else the next attempt detects it
                async with asyncio.timeout(2 * RECORD_S):
                    await self._write(lost.node, content, limit_s=RECORD_S)

    async def _prepare(self, newcomer: phases.Prepare) -> None:
        """Lets a newcomer start its workers. If it fails, it is lost again, and nothing else is."""
        index, life = newcomer.node, newcomer.life
        _LOG.info("node%d has come back (life %d) and starts its workers", index, life)
        self._background.spawn(self._write(index, _returned(index, life, "preparing")))
        try:
            holders = self._slabs.table.holders_on(index, Phase.PUBLISH)
            await self._clients.prepare(index, life, holders)
        except (WorkerFailed, DeadlineExceeded) as error:
            self._inbox.gave_up(index, life, str(error))
        else:
            self._inbox.put(phases.NodeReady(index, life))

    def _admit(self, newcomer: phases.Admit) -> None:
        index, life = newcomer.node, newcomer.life
        self._clients.admit(index, life)
        self._slabs.back(index)
        self._background.spawn(self._clients.introduce(index, life))
        self._events.emit(NodeReturned(node=index, life=life))
        self._background.spawn(self._write(index, _returned(index, life, "joined")))

    async def _write(self, index: int, content: dict[str, Any], limit_s: float = LIMIT_S) -> None:
        """Writes the record of a node's loss, or of its return. Without it the run goes on: only processes
        that are over, steps and launchers read it. Records of one node are written one after the other."""
        node = self._node
        record = node.paths.lost(node.attempt, index)

        def write() -> None:
            make_within(node.paths.root, record.parent)
            write_atomically(record, sealed_record(content, node.attempt))

        try:
            async with self._writing[index]:
                await call_in_thread(partial(with_retries, write, limit_s=limit_s))
        except OSError as error:
            _LOG.warning("%s is not written: %s", record, error)


def _returned(index: int, life: int, state: str) -> dict[str, Any]:
    """Returns the record of a node whose later life is 'preparing' or has 'joined'."""
    why = "ended, and was started again"
    return {"node": index, "life": life - 1, state: life, "goes_on": True, "why": why}


class Coordinator:
    """Leads one attempt.

    Args:
        work: the work of the phases.
        background: runs orders and acts; its inbox has the events to handle.
    """

    def __init__(
        self,
        node: Node,
        clients: NodeClients,
        work: PhaseWork | EvaluationWork,
        row: MetricsRow,
        events: EventLog,
        background: Background,
    ) -> None:
        self._node, self._clients, self._work, self._row, self._events = node, clients, work, row, events
        self._background = background
        self._members = Members(node, clients, work.slabs, events, background)
        self._acting_seq = 0
        self._began_s = clock.monotonic_s()
        self.state: RunState | None = None

    async def run(self) -> phases.End:
        """Runs from the first phase to the end of the attempt."""
        program, inbox = program_of(self._node), self._background.inbox
        state, actions = phases.start_phases(program)
        while True:
            is_stopping = self.state is not None and bool(self.state.stop)
            self._enter(state)
            if state.stop and not is_stopping:
                await self._end_sampling(is_act=any(isinstance(a, phases.BreakOff) for a in actions))
            for action in actions:
                await self._perform(action)
            if end := next((each for each in actions if isinstance(each, phases.End)), None):
                self._events.emit(AttemptEnded(exit_code=end.exit_code, reason=end.reason))
                await self._work.end(end)
                return end
            state, actions = phases.step(state, await inbox.next(), program)

    def _enter(self, state: RunState) -> None:
        """Emits events when the phase or its part changes, and accounts for the time before."""
        before, self.state = self.state, state
        self._work.slabs.orders.seq = state.seq
        is_same = before is not None and (before.phase, before.scoring) == (state.phase, state.scoring)
        if before is not None and is_same and before.part is state.part:
            return
        now_s = clock.monotonic_s()
        self._row.enter(category_of(state.phase.value, state.part.value), now_s)
        phase, iteration, part = state.phase.value, state.iteration, state.part.value
        if is_same:
            self._events.emit(PhasePartBegan(phase=phase, iteration=iteration, part=part))
            return
        if before is not None:
            seconds = now_s - self._began_s
            self._events.emit(
                PhaseEnded(phase=before.phase.value, iteration=before.iteration, seconds=round(seconds, 6))
            )
        self._began_s = now_s
        if state.phase is not Phase.ENDED:
            _LOG.info("iteration %d: %s", state.iteration, state.phase.value)
            self._events.emit(PhaseBegan(phase=phase, iteration=iteration, part=part))

    async def _perform(self, action: phases.Action) -> None:
        match action:
            case phases.PhaseOrder():
                self._background.spawn(self._order(action))
            case phases.Act():
                self._acting_seq = action.seq
                self._background.spawn(self._run_act(action))
            case phases.BreakOff() | phases.End():
                pass  # `run` does it
            case phases.Exclude() | phases.Prepare() | phases.Admit():
                await self._members.perform(action)
            case phases.PostponeSave():
                self._events.emit(CheckpointPostponed(iteration=action.iteration, in_flight=action.in_flight))
            case phases.AwaitCause():
                self._background.spawn(self._await_cause())

    async def _await_cause(self) -> None:
        """Waits for the silence of a dead node. On a single node the cause is reported at once."""
        is_alone = len(self._node.placement.trainer_nodes) == 1
        await asyncio.sleep(CAUSE_S + (0 if is_alone else self._node.config.launch.node_silence_s))
        self._background.inbox.put(phases.PatienceOver())

    async def _end_sampling(self, *, is_act: bool) -> None:
        """Ends the sampling of both tracks after a request to stop; `is_act`: the current act is cancelled.

        Waits for a limited time, and does not fail: a trainer node without an answer may be dead, and its
        loss is the next event.
        """
        self._work.slabs.stop()
        if is_act:
            self._acting_seq = 0
        if not self._work.stop() and not is_act:
            return
        limit_s = self._node.config.launch.node_silence_s + BREAK_OFF_S
        with contextlib.suppress(YattError, TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._clients.ask_trainer_nodes(BreakOffSampling())

    async def _order(self, order: phases.PhaseOrder) -> None:
        mine = self._work.slabs.table.holders_on(order.node, order.phase, order.scoring)
        body = SwitchSlabs(seq=order.seq, part=order.part.value, holders=mine)
        if await self._clients.ask_if_there(order.node, body) is None:
            return  # lost meanwhile: the phase does not wait for it
        self._background.inbox.put(phases.OrderAnswered(order.node, order.seq))

    async def _run_act(self, act: phases.Act) -> None:
        began_s = clock.monotonic_s()
        try:
            acted = await self._work.run(act)
        except YattError:
            if self._acting_seq == act.seq:  # errors of an aborted act are ignored
                raise
            return
        self._row.took(act.phase, clock.monotonic_s() - began_s)
        self._background.inbox.put(replace(acted, at_s=clock.monotonic_s()))


def program_of(node: Node) -> Program:
    """Returns the run's program, from its config."""
    config = node.config
    return Program(
        nodes=frozenset(range(config.launch.nodes)),
        trainer_nodes=frozenset(node.placement.trainer_nodes),
        pools=node.placement.pools,
        absent=node.absent,
        blocks=node.placement.blocks,
        total_iterations=config.trainer.total_iterations if config.trains else 0,
        save_every=config.checkpoint.save_every,
        save_every_s=60 * config.checkpoint.save_every_minutes,
        validate_every=config.validation.every,
        validates=config.validates or not config.trains,
        num_scorings=len(node.placement.turns),
        exports=config.checkpoint.export_final or not config.trains,
        is_static=bool(config.rollout.ahead) or config.is_given,
        has_engines=not config.is_given,
        trains=config.trains,
    )
