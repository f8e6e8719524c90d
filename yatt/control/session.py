"""One controller's attempt, put together and taken down in order."""

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from yatt import clock
from yatt.adapters.attempt_claim import watch_epoch
from yatt.adapters.collector import collect_rarely
from yatt.adapters.curve import CurveKeys, Gate, listening_socket, roomy_context
from yatt.adapters.dataset import RowFiles
from yatt.adapters.ledger import STOP, note, record
from yatt.adapters.patience import patiently
from yatt.adapters.segments import Rotation
from yatt.adapters.succession import Succession
from yatt.adapters.thread_call import call_in_thread
from yatt.adapters.tokenizer import Tokenizer
from yatt.adapters.wire import Answer, Channel
from yatt.adapters.writer import BackgroundWriter
from yatt.checkpoint.manifest import Checkpoints
from yatt.checkpoint.run_store import Stores, claimed_run_store, own_folder_id
from yatt.control.controller import Controller, Parts
from yatt.control.gpus.supervisor import Worker
from yatt.control.leader.alarms import Alarms
from yatt.control.leader.coordinator import Coordinator
from yatt.control.leader.metrics_row import MetricsRow
from yatt.control.leader.node_clients import NodeClients
from yatt.control.leader.phase_work import PhaseWork
from yatt.control.membership.deadman import DeadMan, raise_pulse
from yatt.control.membership.event_sender import EventSender
from yatt.control.membership.liveness import Liveness
from yatt.control.membership.peers import Peers
from yatt.control.membership.rendezvous import meet
from yatt.control.node import Node
from yatt.control.rollouts.data_shard import DataShard
from yatt.control.rollouts.sampling import Sampler
from yatt.control.rollouts.scoring import Scorer
from yatt.control.rollouts.validation import Validator
from yatt.control.store_watch import store_sayer
from yatt.control.trainer_node import Owner
from yatt.control.training import NodeTraining
from yatt.control.writer_watch import watch_writer
from yatt.core.outcome import BY_HAND
from yatt.errors import EXIT_FAILED, DeadlineExceeded, WorkerFailed, YattError
from yatt.obs.events import EventLog
from yatt.paths import rows_folder
from yatt.records import cluster as c, message as m

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
STOP_CHECK_S = 0.25
LAST_LINES_S = 30.0
"""How long the last events and metrics may take to be written at the end."""

WORKER_GRACE_S = 3.0


class Session:
    """Everything one controller process runs."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._peers = Peers(node.absent)
        self._sender = EventSender(self._peers)
        section = node.config.logging
        rotation = Rotation(node.paths.events, section.events_file_bytes, section.events_files)
        self._writer = BackgroundWriter(place=rotation.place)
        self._liveness: Liveness | None = None
        self._has_heard_leader = False
        self._stop_wish = ""
        self._wish: asyncio.Future[None] | None = None
        self._events = EventLog(epoch=node.epoch, node=node.index, role="controller", sink=self._emit)
        self._controller: Controller | None = None
        self._coordinator: Coordinator | None = None
        self._trouble: asyncio.Queue[c.Trouble] = asyncio.Queue()
        self._losses: asyncio.Queue[tuple[int, float]] = asyncio.Queue()
        self._parts: Parts | None = None
        self._given_up = asyncio.Event()

    def give_up(self) -> None:
        """The launcher's signal: the attempt is lost, so end now, and leave nothing behind."""
        self._given_up.set()

    def stop(self, reason: str) -> None:
        """A signal: wish for an early end. Only the leader's wish counts; it is told by the launcher too."""
        self._stop_wish = reason
        if self._coordinator is not None:
            self._events.emit("signal", name=reason)
            self._coordinator.stop(reason)

    def stop_by_hand(self) -> None:
        """The signal that Slurm sends to the batch script alone: somebody has sent it to the steps. The
        launcher, which has not heard of it, is to ask for the next start."""
        self.stop(BY_HAND)
        if self._node.is_leader:
            self._wish = asyncio.ensure_future(self._note_wish(BY_HAND))

    async def _note_wish(self, reason: str) -> None:
        node = self._node
        try:
            if not await call_in_thread(partial(record, node.paths, node.epoch, STOP)):  # a cancel stays one
                await call_in_thread(partial(note, node.paths, node.epoch, STOP, {"reason": reason}))
        except (OSError, YattError) as error:  # the run stops all the same, and counts as failed
            _LOG.warning("the launcher is not told of the signal: %s", error)

    async def run(self) -> int:
        """Until the leader says Quit; gives the exit code."""
        node, context = self._node, roomy_context(len(self._node.present))
        gate = Gate(context, CurveKeys(node.paths.keys))
        hub = Channel(
            listening_socket(context, self._node.endpoint), epoch=self._node.epoch,
            handler=self._from_worker, progress=self._progress,
            resend_s=0,  # inside a node nothing is lost but by a process's end
        )  # fmt: skip
        self._events.emit("attempt.start", nodes=self._node.config.launch.nodes)
        lasting = []  # from before the meeting: a leader may be lost while it is waited for
        if node.is_leader:
            lasting.append(asyncio.ensure_future(raise_pulse(node.paths, node.epoch)))
        elif node.succession is not None:
            lasting.append(asyncio.ensure_future(self._stand_by(node.succession)))
        peer_hub, dial = await self._unless_given_up(meet(node, context, self._from_peer, self._progress))
        self._peers.dial_with(dial)
        self._liveness = Liveness(self._node, self._peers, self._lost)
        lasting.append(asyncio.ensure_future(self._liveness.run()))
        try:
            await self._build(hub)
            collect_rarely()
            await self._serve(hub, peer_hub, lasting)
        finally:
            for task in lasting:
                task.cancel()
            await self._close([hub, peer_hub])
            gate.close()
            context.term()
        assert self._controller is not None, "built above"
        return self._controller.exit_code

    async def _build(self, hub: Channel) -> None:
        node = self._node
        parts = Parts(node, hub, self._peers, self._events, self.trouble, self._worker_exit)
        self._parts = parts
        # Data and tokenizers can take long to read; peers must hear of this node meanwhile.
        say = store_sayer(self._events, node.name)
        owner = await call_in_thread(partial(self._owner, parts, say)) if node.is_owner else None
        self._controller = Controller(node, parts, owner)
        if node.is_leader:
            clients = NodeClients(
                node, self._controller.handle, self._peers, self._gave_up, parts.progress.whole, parts.lose
            )
            store = await call_in_thread(partial(claimed_run_store, node.config, node.paths.root, say))
            folder_id = await call_in_thread(partial(patiently, partial(own_folder_id, node.paths, store)))
            checkpoints = Checkpoints(store, node.epoch, node.config.run.id, folder_id)
            row = MetricsRow(node, self._writer, Alarms(node.config, self._events))
            work = PhaseWork(
                node, clients, checkpoints, self._events,
                await call_in_thread(partial(patiently, partial(vocab_size, node.config.model.path))), row,
            )  # fmt: skip
            self._coordinator = Coordinator(node, clients, work, row, self._events)
            if self._stop_wish:  # said while the store was waited for
                self.stop(self._stop_wish)

    def _progress(self, sender: str) -> int:
        """Changes while this node gets on."""
        return self._parts.progress.told_to(sender) if self._parts is not None else 0

    def _owner(self, parts: Parts, say: Callable[[str], None]) -> Owner:
        """What only a node with trainer ranks has."""
        node, config = self._node, self._node.config
        limit_s = config.launch.phase_timeout_s
        opened = partial(RowFiles, data=config.data, limit_s=limit_s)
        rows = opened(config.data.train_files, scratch=rows_folder(node.scratch, is_held_out=False))
        tokenizer = patiently(
            partial(Tokenizer, config.model.path, config.data.template_time), limit_s=limit_s
        )
        scorer = Scorer(config, parts.router.complete, parts.call_reward)
        shard = DataShard(config, rows, tokenizer)
        sampler = patiently(  # it reads the tokenizer too
            partial(Sampler, node, shard, scorer, parts.router, self._events, self._writer), limit_s=limit_s
        )
        validator = None
        if config.validation.reward:
            held_out = opened(config.data.val_files, scratch=rows_folder(node.scratch, is_held_out=True))
            validator = Validator(node, held_out, scorer, parts.router)
        training = NodeTraining(node, parts.workers, self._peers, self.trouble)
        stores = Stores(config, node.paths.root, say, parts.progress.done)
        return Owner(node, sampler, validator, training, scorer, stores)

    async def _serve(
        self, hub: Channel, peer_hub: Channel, lasting: "Sequence[asyncio.Future[None]]"
    ) -> None:
        assert self._controller is not None and self._parts is not None, "built before"
        node = self._node
        works = (
            self._controller.quit.wait(), self._parts.arbiter.run(), hub.failure(), peer_hub.failure(),
            self._peers.failure(),
            watch_epoch(node.paths, node.epoch, node.index), self._watch_stop(), self._watch_launcher(),
            self._report_trouble(), self._report_losses(), watch_writer(self._writer, self._events),
            self._parts.supervisor.shared_memory.run(), self._parts.supervisor.orphans.run(),
        )  # fmt: skip
        tasks: list[asyncio.Future[Any]] = [*lasting, *(asyncio.ensure_future(work) for work in works)]
        if self._coordinator is not None:
            tasks.append(asyncio.ensure_future(self._lead(self._coordinator)))
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            task.result()

    async def _lead(self, coordinator: Coordinator) -> None:
        end = await coordinator.run()
        if end.exit_code:
            sys.stderr.write(f"the run ends with exit code {end.exit_code}: {end.reason}\n")

    def trouble(self, error: str, exit_code: int, is_symptom: bool = False) -> None:
        """Something this node cannot mend: the leader decides."""
        self._trouble.put_nowait(c.Trouble(error=error, exit_code=exit_code, is_symptom=is_symptom))

    async def _report_trouble(self) -> None:
        while True:
            trouble = await self._trouble.get()
            self._events.emit("trouble", error=trouble.error, exit_code=trouble.exit_code)
            if self._coordinator is not None:
                self._coordinator.fail(trouble.error, trouble.exit_code, is_symptom=trouble.is_symptom)
            else:
                with contextlib.suppress(YattError):  # a leader that is lost is missed by others
                    await self._peers.request(0, trouble, self._node.config.launch.phase_timeout_s)

    def _lost(self, index: int, silence_s: float) -> None:
        """A peer was silent too long: the leader decides; others only say so."""
        _LOG.warning("node%d was not heard of for %.1f s", index, silence_s)
        self._losses.put_nowait((index, silence_s))

    async def _report_losses(self) -> None:
        while True:
            index, silence_s = await self._losses.get()
            if self._coordinator is not None:
                self._coordinator.lose(index, f"was not heard of for {silence_s:.1f} s", silence_s)

    def _gave_up(self, index: int, why: str) -> None:
        """A node that only runs engines cannot go on."""
        if self._coordinator is not None:
            self._coordinator.lose(index, f"gave up: {why}")

    async def _watch_stop(self) -> None:
        """The wish for an early end, written into the run folder by the launcher or `yatt cancel`."""
        node, told = self._node, ""
        while self._coordinator is not None:
            try:
                found = await call_in_thread(partial(record, node.paths, node.epoch, STOP))
            except OSError:  # it is looked for again
                found = {}
            if found and found["reason"] != told:
                told = str(found["reason"])
                self.stop(told)
            await asyncio.sleep(STOP_CHECK_S)
        await asyncio.Event().wait()

    async def _unless_given_up(self, work: Coroutine[Any, Any, T]) -> T:
        """A node that does not come is waited for; the launcher may know that it will not."""
        meeting, over = asyncio.ensure_future(work), asyncio.ensure_future(self._watch_launcher())
        done, _ = await asyncio.wait({meeting, over}, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        if meeting not in done:
            meeting.cancel()
            over.result()
        return await meeting

    async def _watch_launcher(self) -> None:
        await self._given_up.wait()
        raise WorkerFailed("the launcher has ended this attempt")

    async def _stand_by(self, succession: Succession) -> None:
        """On Slurm: see to it that the job goes on if the leader dies."""
        node, began_s = self._node, clock.monotonic_s()

        def silence_s() -> float:
            if self._liveness is None or not self._has_heard_leader:
                return clock.monotonic_s() - began_s
            return self._liveness.silence_s(0)

        events = EventLog(
            epoch=node.epoch,
            node=node.index,
            role="controller",
            sink=partial(self._writer.append, node.paths.events),
        )
        await DeadMan(node, succession, events, silence_s).run()

    async def _from_worker(self, sender: str, body: m.Message) -> m.Message | None:
        assert self._controller is not None, "workers start after the controller is built"
        return await self._controller.from_worker(sender, body)

    def _from_peer(self, sender: str, body: m.Message) -> Answer | Awaitable[Answer]:
        """What every node sends every second is taken at once; all else costs a task."""
        index = self._peers.index_of(sender, self._node.config.launch.nodes)
        if index is None:
            return m.Failed(error=f"{sender!r} is no node of this run, and is not heard")
        if index in self._peers.lost:
            return self._refuse(index, body)
        self._has_heard_leader |= index == 0
        if self._liveness is not None:
            self._liveness.heard(index)
        match body:
            case c.Alive():
                return None
            case c.EventLines():
                self._writer.append(self._node.paths.events, body.lines.decode(errors="replace"))
                return None
            case c.Trouble():
                self._trouble_of(index, body)
                return m.Done()
        return self._carry_out(sender, body)

    async def _carry_out(self, sender: str, body: m.Message) -> m.Message | None:
        if isinstance(body, c.Quit):
            await self._sender.flush()  # the leader hears no more once it has the answer
        try:
            await self._until_built()
        except DeadlineExceeded as error:
            return m.Failed(error=str(error), exit_code=error.exit_code)
        assert self._controller is not None, "waited for"
        return await self._controller.handle(sender, body)

    def _trouble_of(self, index: int, trouble: c.Trouble) -> None:
        """What costs an owner the attempt costs a node that only runs engines its place."""
        if index not in self._node.placement.owners and trouble.exit_code == EXIT_FAILED:
            self._gave_up(index, trouble.error)
        elif self._coordinator is not None:
            says = f"node{index}: {trouble.error}"
            self._coordinator.fail(says, trouble.exit_code, is_symptom=trouble.is_symptom)

    async def _refuse(self, index: int, body: m.Message) -> None:
        """A node that was declared lost and only stood still: nothing it says counts, and it has to end."""
        if self._node.is_leader and isinstance(body, c.Alive):
            reason = "the leader goes on without this node: it was silent too long"
            await self._peers.tell(index, c.Quit(reason=reason, exit_code=EXIT_FAILED))

    async def _until_built(self) -> None:
        """Data files and the store are waited for so long.

        Raises:
            DeadlineExceeded: they are not there in time.
        """
        limit_s, began_s = self._node.config.launch.phase_timeout_s, clock.monotonic_s()
        while self._controller is None:
            if clock.monotonic_s() - began_s > limit_s:
                raise DeadlineExceeded(f"{self._node.name} has not read its data within {limit_s:g} s")
            await asyncio.sleep(0.05)

    async def _worker_exit(self, worker: Worker, how: str) -> None:
        assert self._controller is not None, "workers start after the controller is built"
        await self._controller.on_worker_exit(worker, how)

    def _emit(self, line: str) -> None:
        if self._node.is_leader:
            self._writer.append(self._node.paths.events, line)
        else:
            self._sender(line)

    async def _close(self, channels: list[Channel]) -> None:
        if self._parts is not None:
            await self._parts.supervisor.close(WORKER_GRACE_S)
        await self._sender.close()
        await self._peers.close()
        for channel in channels:
            await channel.close()
        if not await call_in_thread(partial(self._writer.close, LAST_LINES_S)):
            _LOG.warning("the last lines could not be written: the run folder does not answer")


def vocab_size(model: str) -> int:
    """Of a Hugging Face folder's config."""
    return int(json.loads((Path(model) / "config.json").read_text())["vocab_size"])
