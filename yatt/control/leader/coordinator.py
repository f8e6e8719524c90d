"""Drives the iterations from metadata: the leader's loop around `yatt.core.phases`.

Every action may be repeated. A run resumes from its checkpoints and claims; an attempt leaves no other state,
so transitions are not recorded.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from dataclasses import replace
from functools import partial

from yatt import clock
from yatt.adapters.files import make_within, publish, sealed
from yatt.adapters.patience import exit_code_of, patiently
from yatt.adapters.thread_call import call_in_thread
from yatt.control.leader.inbox import Inbox
from yatt.control.leader.metrics_row import MetricsRow
from yatt.control.leader.node_clients import NodeClients
from yatt.control.leader.phase_work import PhaseWork
from yatt.control.node import Node
from yatt.core import phases
from yatt.core.goodput import category_of
from yatt.core.phases import Phase, Program, RunState
from yatt.core.placement import Holders
from yatt.errors import EXIT_FAILED, WorkerFailed, YattError
from yatt.obs.events import EventLog
from yatt.records.cluster import BreakOffSampling, SwitchSlabs

_LOG = logging.getLogger(__name__)
RECORD_S = 20.0
"""Longest time to write the record of a lost node; then the attempt ends without it."""

BREAK_OFF_S = 30.0
"""Longest time, in addition to a lost node's silence, for nodes to end the current sampling."""

CAUSE_S = 2.0
"""Longest wait for the cause of a failure, in addition to a dead node's silence."""


class Coordinator:
    """Leads one attempt.

    Args:
        work: the work of the phases.
        inbox: the events to handle; other components put events into it too.
    """

    def __init__(
        self, node: Node, clients: NodeClients, work: PhaseWork, row: MetricsRow, events: EventLog,
        inbox: Inbox,
    ) -> None:  # fmt: skip
        self._node, self._clients, self._work, self._row, self._events = node, clients, work, row, events
        self._inbox, self._program = inbox, program_of(node)
        self._tasks: set[asyncio.Task[None]] = set()
        self._acting_seq = 0
        self._began_s = clock.monotonic_s()
        self._end: phases.End | None = None
        self.state: RunState | None = None

    async def run(self) -> phases.End:
        """Runs from the first phase to the end of the attempt."""
        state, actions = phases.start(self._program)
        while True:
            self._enter(state)
            for action in actions:
                await self._perform(action)
            if self._end is not None:
                self._events.emit("attempt.end", exit_code=self._end.exit_code, reason=self._end.reason)
                await self._work.end(self._end)
                return self._end
            state, actions = phases.step(state, await self._inbox.next(), self._program)

    def _enter(self, state: RunState) -> None:
        """Emits events when the phase or its part changes, and accounts for the time before."""
        before, self.state = self.state, state
        is_same = before is not None and (before.phase, before.scoring) == (state.phase, state.scoring)
        if before is not None and is_same and before.part is state.part:
            return
        now_s = clock.monotonic_s()
        self._row.enter(category_of(state.phase.value, state.part.value), now_s)
        fields = {"phase": state.phase.value, "iteration": state.iteration, "part": state.part.value}
        if is_same:
            self._events.emit("phase.part", **fields)
            return
        if before is not None:
            seconds = now_s - self._began_s
            self._events.emit(
                "phase.end", phase=before.phase.value, iteration=before.iteration, seconds=round(seconds, 6)
            )
        self._began_s = now_s
        if state.phase is not Phase.ENDED:
            _LOG.info("iteration %d: %s", state.iteration, state.phase.value)
            self._events.emit("phase.begin", **fields)

    async def _perform(self, action: phases.Action) -> None:
        match action:
            case phases.PhaseOrder():
                self._spawn(self._order(action))
            case phases.Act():
                self._acting_seq = action.seq
                self._spawn(self._run_act(action))
            case phases.BreakOff():
                self._acting_seq = 0
                await self._break_off()
            case phases.Exclude():
                await self._exclude(action)
            case phases.PostponeSave():
                self._events.emit("ckpt.postpone", iteration=action.iteration, in_flight=action.in_flight)
            case phases.AwaitCause():
                self._spawn(self._await_cause())
            case phases.End():
                self._end = action

    async def _await_cause(self) -> None:
        """Waits for the silence of a dead node. On a single node the cause is reported at once."""
        is_alone = len(self._program.trainer_nodes) == 1
        await asyncio.sleep(CAUSE_S + (0 if is_alone else self._node.config.launch.node_silence_s))
        self._inbox.put(phases.PatienceOver())

    async def _break_off(self) -> None:
        """Waits for a limited time, and does not fail: a trainer node without an answer may be dead, and its
        loss is the next event."""
        limit_s = self._node.config.launch.node_silence_s + BREAK_OFF_S
        with contextlib.suppress(YattError, TimeoutError):
            await asyncio.wait_for(self._clients.ask_trainer_nodes(BreakOffSampling()), limit_s)

    async def _exclude(self, lost: phases.Exclude) -> None:
        """Excludes a node everywhere, and writes a record for the start of the next attempt."""
        await self._clients.exclude(lost.node, lost.why)
        silence_s = round(self._inbox.silences.get(lost.node, 0.0), 3)
        _LOG.warning("node%d %s; the run %s", lost.node, lost.why, "goes on" if lost.goes_on else "ends")
        content = {"node": lost.node, "silence_s": silence_s, "why": lost.why, "goes_on": lost.goes_on}
        self._events.emit("node.lost", **content)
        node = self._node
        record = node.paths.lost(node.attempt, lost.node)

        def write() -> None:
            make_within(node.paths.root, record.parent)
            publish(record, sealed(content, node.attempt))

        if lost.goes_on:  # only the lost node itself reads it
            self._spawn(call_in_thread(partial(patiently, write)))
        else:  # the start of the next attempt reads it
            with contextlib.suppress(OSError, TimeoutError):  # else the next attempt detects it
                await asyncio.wait_for(
                    call_in_thread(partial(patiently, write, limit_s=RECORD_S)), 2 * RECORD_S
                )

    async def _order(self, order: phases.PhaseOrder) -> None:
        holders = holders_of(self._node, order.phase, order.scoring)
        slabs = self._node.placement.slabs_by_node[order.node]
        mine = tuple((slab.index, holders[slab]) for slab in slabs if slab in holders)
        body = SwitchSlabs(seq=order.seq, part=order.part.value, holders=mine)
        if await self._clients.ask_if_there(order.node, body) is None:
            return  # lost meanwhile: the phase does not wait for it
        self._inbox.put(phases.OrderAnswered(order.node, order.seq))

    async def _run_act(self, act: phases.Act) -> None:
        began_s = clock.monotonic_s()
        try:
            acted = await self._work.run(act)
        except YattError:
            if self._acting_seq == act.seq:  # errors of an aborted act are ignored
                raise
            return
        self._row.took(act.phase, clock.monotonic_s() - began_s)
        self._inbox.put(replace(acted, at_s=clock.monotonic_s()))

    def _spawn(self, work: Awaitable[None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except YattError as error:
                self._inbox.fail(str(error), exit_code_of(error), is_symptom=isinstance(error, WorkerFailed))
            except OSError as error:  # a filesystem failed: another attempt may succeed
                self._inbox.fail(f"{error.filename or 'writing'}: {error.strerror or error}", EXIT_FAILED)

        task = asyncio.get_running_loop().create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._inbox.fail(f"a defect in the coordinator: {error!r}", EXIT_FAILED)


def program_of(node: Node) -> Program:
    """Returns the run's program, from its config."""
    config = node.config
    return Program(
        nodes=frozenset(range(config.launch.nodes)),
        trainer_nodes=frozenset(node.placement.trainer_nodes),
        pools=node.placement.pools,
        absent=node.absent,
        total_iterations=config.trainer.total_iterations,
        save_every=config.checkpoint.save_every,
        save_every_s=60 * config.checkpoint.save_every_minutes,
        validate_every=config.validation.every,
        validates=bool(config.validation.reward),
        num_scorings=len(node.placement.scoring),
        exports=config.checkpoint.export_final,
    )


def holders_of(node: Node, phase: Phase, scoring: int) -> Holders:
    """Returns the roles that hold the slabs in a phase."""
    if phase is Phase.SCORE:
        return node.placement.scoring[scoring]
    if phase in (Phase.SYNC, Phase.VALIDATE, Phase.ROLLOUT):
        return node.placement.sampling
    return node.placement.training
