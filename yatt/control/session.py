"""One controller's attempt: components are created top to bottom, run until the end, and closed in order."""

import asyncio
import hashlib
import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import zmq

from yatt import clock
from yatt.adapters.files.patience import with_retries
from yatt.adapters.inputs.data_rows import called_columns
from yatt.adapters.inputs.dataset import RowFiles
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.adapters.machine.collector import collect_rarely
from yatt.adapters.net.channel import Channel
from yatt.adapters.net.curve import CurveKeys, Gate, Socket, listening_socket
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.run_store import Stores, claimed_run_store, own_folder_id
from yatt.control.components import Components, build_components
from yatt.control.controller import Controller
from yatt.control.leader.alarms import Alarms
from yatt.control.leader.background import Background
from yatt.control.leader.batches import BatchSampling
from yatt.control.leader.coordinator import Coordinator
from yatt.control.leader.evaluation_work import EvaluationWork
from yatt.control.leader.inbox import Inbox
from yatt.control.leader.judge_refresh import JudgeRefresh
from yatt.control.leader.metrics_row import MetricsRow
from yatt.control.leader.node_clients import NodeClients
from yatt.control.leader.phase_work import PhaseWork
from yatt.control.leader.saves.commits import Commits
from yatt.control.leader.slabs.node_loads import NodeLoads
from yatt.control.leader.slabs.slabs import Slabs
from yatt.control.leader.stop_requests import StopRequests
from yatt.control.membership.deadman import DeadMan, write_heartbeat
from yatt.control.membership.event_sender import EventSender
from yatt.control.membership.failure_reports import FailureReports
from yatt.control.membership.liveness import Liveness
from yatt.control.membership.newer_attempt import may_wait, watch_newer_attempt
from yatt.control.membership.peers import Peers
from yatt.control.membership.rendezvous import meet_peers
from yatt.control.node import Node
from yatt.control.peer_messages import PeerMessages
from yatt.control.rollouts.episodes import (
    Episodes,
    evaluation_sampling,
    rollout_sampling,
    validation_sampling,
)
from yatt.control.rollouts.evaluator import EvaluatedRows, Evaluator
from yatt.control.rollouts.given import GivenGroups, HeldOutGroups
from yatt.control.rollouts.groups.data_shard import DataShard
from yatt.control.rollouts.groups.kept import KeptGroups
from yatt.control.rollouts.node_groups import NodeGroups
from yatt.control.rollouts.recording import RolloutRecorder
from yatt.control.rollouts.sampling import Sampler
from yatt.control.rollouts.scoring.judging import Judge
from yatt.control.rollouts.scoring.scoring import Scorer
from yatt.control.rollouts.scoring.sources import score_sources
from yatt.control.rollouts.validation import Validator
from yatt.control.trainer_node import TrainerNode
from yatt.control.training import NodeTraining
from yatt.control.writers import Writers, store_sayer, watch_writer
from yatt.core.attempts.deadman import limits_of
from yatt.errors import EXIT_WILL_CONTINUE, WorkerFailed
from yatt.models.pictures.probe import read_probe_tokens
from yatt.obs.story.events import EventLog
from yatt.paths import rows_folder
from yatt.records import cluster as c, message as m
from yatt.records.events.attempts import AttemptStarted
from yatt.records.events.groups import JudgeAwaited
from yatt.records.inputs import HELD_OUT

T = TypeVar("T")
WORKER_GRACE_S = 3.0


class Session:
    """All components of one controller. Those that need no other node and no file are created here."""

    def __init__(self, node: Node, context: "zmq.Context[Socket]") -> None:
        self._node, self._context = node, context
        self._given_up = asyncio.Event()
        self._writers = Writers(node)
        peers, inbox = Peers(node.absent), Inbox() if node.is_leader else None
        sender, to_file = EventSender(peers), partial(self._writers.lines.append, node.paths.events)
        self._events = _event_log(node, to_file if node.is_leader else sender)
        reports = FailureReports(self._events, partial(_deliver, node, peers, inbox))
        self.stop_requests = StopRequests(node, self._events, inbox)
        self._channel = Channel(
            listening_socket(context, node.endpoint),
            attempt=node.attempt,
            resend_s=0,  # inside a node messages are lost only by a process's end
        )
        self._parts = build_components(node, self._channel, peers, self._events, reports)
        self._messages = PeerMessages(
            node=node,
            peers=peers,
            liveness=Liveness(node, peers, inbox.silent if inbox else _tell_nobody, self._parts.load),
            to_file=to_file,
            sender=sender,
            inbox=inbox,
            loads=NodeLoads(self._parts.load),
            controller=asyncio.get_running_loop().create_future(),
        )

    def give_up(self) -> None:
        """Handles the launcher's signal: ends the lost attempt and removes all leftovers."""
        self._given_up.set()

    async def run(self) -> int:
        """Runs until the leader sends Quit; returns the exit code."""
        node, lasting = self._node, list[asyncio.Future[None]]()
        channels = [self._channel]
        gate = Gate(self._context, CurveKeys(node.paths.keys))
        self._events.emit(AttemptStarted(nodes=node.config.launch.nodes))
        try:
            lasting.append(asyncio.ensure_future(self._stand_in()))  # leader may be lost during rendezvous
            messages, progress = self._messages, self._parts.progress.told_to
            met = await self._unless_given_up(meet_peers(node, self._context, messages.handle, progress))
            channels.append(met.channel)
            messages.peers.lines.dial_with(met.dial)
            if node.is_newcomer:
                await self._unless_given_up(self._knock(met.address))
            lasting.append(asyncio.ensure_future(messages.liveness.run()))
            return await self._serve(met.channel, lasting)
        finally:
            for task in lasting:
                task.cancel()
            await self._close(channels)
            gate.close()
            self._context.term()

    async def _knock(self, address: str) -> None:
        """Asks the leader to let this newcomer take part.

        Raises:
            WorkerFailed: it may not.
            DeadlineExceeded: the leader does not answer.
        """
        limit_s = self._node.config.launch.node_silence_s
        answer = await self._parts.peers.request(0, c.Knock(address=address), limit_s)
        m.unless_failed(answer, "node0")

    async def _serve(self, peer_channel: Channel, lasting: Sequence[asyncio.Future[None]]) -> int:
        """Creates the components that read files, then carries out orders until Quit."""
        node, parts = self._node, self._parts
        sayer = store_sayer(self._events, node.name)
        # Reading data and tokenizers can take long, and peers must receive messages of this node meanwhile.
        trainer_node: TrainerNode | Evaluator | None = None
        if node.is_trainer_node:
            make = partial(_trainer_node, sayer=sayer) if node.config.trains else _evaluator
            trainer_node = await call_in_thread(partial(make, node, parts, self._events, self._writers))
        controller = Controller(node, parts, trainer_node)
        self._channel.serve(controller.from_worker, parts.progress.told_to)
        coordinator = None
        if (inbox := self._messages.inbox) is not None:
            coordinator = await self._coordinator(controller, inbox, sayer)
        collect_rarely()
        self._messages.controller.set_result(controller.handle)
        works = [
            controller.quit.wait(),
            controller.watch_exits(),
            parts.arbiter.run(),
            self._channel.failure(),
            peer_channel.failure(),
            parts.peers.lines.failure(),
            parts.reports.run(),
            self._watch_newer_attempt(),
            self._watch_launcher(),
            watch_writer(self._writers.lines, self._events),
            parts.supervisor.shared_memory.run(),
            parts.supervisor.orphans.run(),
        ]
        if coordinator is not None:
            works += [_lead(coordinator), self.stop_requests.watch()]
        await _until_one_ends([*lasting, *(asyncio.ensure_future(work) for work in works)])
        return controller.exit_code

    async def _coordinator(
        self, controller: Controller, inbox: Inbox, sayer: Callable[[str], None]
    ) -> Coordinator:
        node, parts, events, background = self._node, self._parts, self._events, Background(inbox)
        clients = NodeClients(node, controller.handle, parts.peers, inbox.gave_up, parts.progress.whole)
        slabs = Slabs(node, clients, self._messages.loads, events, background)
        row = MetricsRow(node, self._writers.lines, Alarms(node.config, events))
        if not node.config.trains:
            work = EvaluationWork(node, clients, slabs)
            return Coordinator(node, clients, work, row, events, background)
        store = await call_in_thread(partial(claimed_run_store, node.config, node.paths.root, sayer))
        folder_id = await call_in_thread(partial(with_retries, partial(own_folder_id, node.paths, store)))
        checkpoints = Checkpoints(store, node.attempt, node.config.run.id, folder_id)
        read = partial(
            read_probe_tokens, node.config.model.path, has_pictures=bool(node.config.data.media_store)
        )
        probe = await call_in_thread(partial(with_retries, read))
        commits = Commits(node, clients, checkpoints, events, inbox, row)
        judges = JudgeRefresh(node, clients, checkpoints, events)
        batches = BatchSampling(node, clients, slabs, judges, events, background)
        trained = PhaseWork(node, clients, commits, batches, row, probe)
        return Coordinator(node, clients, trained, row, events, background)

    async def _stand_in(self) -> None:
        """Writes the leader's heartbeat; on Slurm, runs the dead-man's switch of other controllers."""
        node = self._node
        if node.is_leader:
            await write_heartbeat(node.paths, node.attempt)
        elif node.requeue is not None:
            events = _event_log(node, self._messages.to_file)
            silence_s, limits = partial(self._messages.liveness.silence_s, 0), limits_of(node.index)
            await DeadMan(node, node.requeue, events, silence_s, limits).run()
        else:
            await asyncio.Event().wait()

    async def _unless_given_up(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for the rendezvous, or until the launcher ends the attempt because a node will not come."""
        meeting, over = asyncio.ensure_future(work), asyncio.ensure_future(self._watch_launcher())
        done, _ = await asyncio.wait({meeting, over}, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        if meeting not in done:
            meeting.cancel()
            over.result()
        return await meeting

    async def _watch_newer_attempt(self) -> None:
        node, silence_s = self._node, partial(self._messages.liveness.silence_s, 0)
        is_steady = partial(may_wait, node.index, node.config.launch.nodes, silence_s)
        await watch_newer_attempt(node.paths, node.attempt, node.index, node.life, is_steady=is_steady)

    async def _watch_launcher(self) -> None:
        await self._given_up.wait()
        raise WorkerFailed("the launcher has ended this attempt")

    async def _close(self, channels: list[Channel]) -> None:
        self._parts.given_weights.close()
        await self._parts.supervisor.close(WORKER_GRACE_S)
        await self._messages.sender.close()
        await self._parts.peers.lines.close()
        for channel in channels:
            await channel.close()
        await call_in_thread(self._writers.close)


def _event_log(node: Node, sink: Callable[[str], None]) -> EventLog:
    return EventLog(attempt=node.attempt, node=node.index, role="controller", sink=sink)


def _tell_nobody(*_: float) -> None:
    """Does nothing: only the leader decides about lost nodes."""


async def _deliver(node: Node, peers: Peers, inbox: Inbox | None, report: c.FailureReport) -> None:
    if inbox is not None:
        inbox.fail(report.error, report.exit_code, is_symptom=report.is_symptom)
    else:
        await peers.request(0, report, node.config.launch.phase_timeout_s)


def _opened_rows(node: Node, *, is_held_out: bool) -> RowFiles:
    config = node.config
    files = config.data.val_files if is_held_out else config.data.train_files
    return RowFiles(
        files,
        config.data,
        rows_folder(node.scratch, is_held_out=is_held_out),
        columns=called_columns(config),
        limit_s=config.launch.phase_timeout_s,
    )


def _scoring(node: Node, parts: Components, events: EventLog) -> tuple[Tokenizer, Judge, Scorer]:
    """Creates what samples are encoded and scored with."""
    config, limit_s = node.config, node.config.launch.phase_timeout_s
    tokenizer = with_retries(
        partial(Tokenizer, config.model.path, config.data.template_time), limit_s=limit_s
    )
    num_nodes = len(node.placement.trainer_nodes)
    judge = Judge(
        config,
        parts.router.complete,
        parts.router.abort,
        parts.rewards.call,
        num_nodes,
        lambda genrm, error: events.emit(JudgeAwaited(genrm=genrm, error=error)),
    )
    judge.show_with(parts.prepared.opened_files)
    return tokenizer, judge, Scorer(config, judge, score_sources(config, judge, parts.rewards.call))


def _evaluator(node: Node, parts: Components, events: EventLog, writers: Writers) -> Evaluator:
    """Creates the components that only a node with prompts of an evaluation has."""
    rows = _opened_rows(node, is_held_out=True)
    tokenizer, judge, scorer = _scoring(node, parts, events)
    sampling = evaluation_sampling(node.config)
    episodes = Episodes(node, tokenizer, parts.router, parts.rewards.call, sampling)
    kept = KeptGroups(node, events, writers.groups, data=rows.fingerprint, files=_sampled_with(node))
    return Evaluator(node, EvaluatedRows(rows, kept), episodes, scorer, judge, events)


def _trainer_node(
    node: Node, parts: Components, events: EventLog, writers: Writers, sayer: Callable[[str], None]
) -> TrainerNode:
    """Creates the components that only a node with trainer ranks has."""
    config = node.config
    rows = _opened_rows(node, is_held_out=False)
    tokenizer, judge, scorer = _scoring(node, parts, events)
    shard = DataShard(config, rows, tokenizer)
    training = NodeTraining(node, parts.workers, parts.peers, parts.uploads, parts.pictures)
    stores = Stores(config, node.paths.root, sayer, parts.progress.done)
    held_out = _opened_rows(node, is_held_out=True) if config.validates else None
    if config.is_given:
        given = GivenGroups(node, shard, HeldOutGroups(node, held_out, tokenizer))
        return TrainerNode(node, given, None, training, judge, stores)
    episodes = partial(Episodes, node, tokenizer, parts.router, parts.rewards.call)
    kept = KeptGroups(node, events, writers.groups, data=rows.fingerprint, files=_sampled_with(node))
    groups = NodeGroups(node, shard, kept)
    recorder = RolloutRecorder(node, scorer, tokenizer, events, writers)
    sampler = Sampler(node, groups, scorer, episodes(rollout_sampling(config)), events, recorder)
    validator = None
    if held_out is not None:
        validator = Validator(node, held_out, scorer, episodes(validation_sampling(config)))
    return TrainerNode(node, sampler, validator, training, judge, stores)


def _sampled_with(node: Node) -> str:
    """Returns a digest of the inputs that decide about samples and scores."""
    found = {name: digest for name, digest in node.inputs.items() if name != HELD_OUT}
    if not found:  # of no other attempt: groups are not used again
        return f"unknown in attempt {node.attempt}"
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


async def _lead(coordinator: Coordinator) -> None:
    end = await coordinator.run()
    if end.exit_code:
        says = f"the run ends with exit code {end.exit_code}: {end.reason}"
        level = "INFO" if end.exit_code == EXIT_WILL_CONTINUE else "ERROR"
        sys.stderr.write(f"{clock.wall_iso()} {level} yatt: {says}\n")


async def _until_one_ends(tasks: list[asyncio.Future[Any]]) -> None:
    """Waits until one task ends, cancels the others, and raises that task's error."""
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()
