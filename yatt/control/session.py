"""One controller's attempt, put together and taken down in order."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path

import zmq.asyncio

from yatt import clock
from yatt.adapters.dataset import read_rows
from yatt.adapters.files import append_line
from yatt.adapters.tokenizer import Tokenizer
from yatt.adapters.wire import Channel, listening_socket
from yatt.checkpoint.manifest import Checkpoints
from yatt.checkpoint.store import Store, open_store
from yatt.config.schema import RunConfig
from yatt.control.acts import Acts
from yatt.control.controller import Controller, Parts
from yatt.control.coordinator import Coordinator
from yatt.control.epochs import check_newest
from yatt.control.node import Node
from yatt.control.ports import Ports
from yatt.control.rendezvous import meet
from yatt.control.sampling import Sampler
from yatt.control.shard import DataShard
from yatt.control.supervisor import Worker
from yatt.control.training import NodeTraining
from yatt.control.validation import Validator
from yatt.errors import YattError
from yatt.obs.events import EventLog
from yatt.records import cluster as c
from yatt.records import message as m

EPOCH_CHECK_S = 5.0
WORKER_GRACE_S = 3.0


class Session:
    """Everything one controller process runs."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._peers: dict[int, Channel] = {}
        self._events = EventLog(epoch=node.epoch, node=node.index, role="controller", sink=self._emit)
        self._controller: Controller | None = None
        self._coordinator: Coordinator | None = None
        self._trouble: asyncio.Queue[c.Trouble] = asyncio.Queue()
        self._background: set[asyncio.Task[None]] = set()
        self._parts: Parts | None = None

    def stop(self, reason: str) -> None:
        """A signal: wish for an early end. Only the leader's wish counts; it is told by the launcher too."""
        if self._coordinator is not None:
            self._events.emit("signal", name=reason)
            self._coordinator.stop(reason)

    async def run(self) -> int:
        """Until the leader says Quit; gives the exit code."""
        context = zmq.asyncio.Context()
        hub = Channel(
            listening_socket(context, self._node.endpoint), epoch=self._node.epoch, handler=self._from_worker
        )
        self._events.emit("attempt.start", nodes=self._node.config.launch.nodes)
        peer_hub, peers = await meet(self._node, context, self._from_peer)
        self._peers.update(peers)
        try:
            self._build(hub)
            await self._serve(hub, peer_hub)
        finally:
            await self._close([hub, peer_hub, *peers.values()])
            context.term()
        assert self._controller is not None, "built above"
        return self._controller.exit_code

    def _build(self, hub: Channel) -> None:
        node, config = self._node, self._node.config
        parts = Parts(node, hub, self._peers, self._events, self.trouble, self._worker_exit)
        shard = DataShard(
            config, read_rows(config.data.train_files, config.data), Tokenizer(config.model.path)
        )
        sampler = Sampler(node, shard, parts.scorer, parts.router, self._events)
        validator = None
        if config.validation.reward:
            held_out = read_rows(config.data.val_files, config.data)
            validator = Validator(node, held_out, parts.scorer, parts.router)
        training = NodeTraining(node, parts.workers, self._peers, self.trouble)
        self._parts = parts
        self._controller = Controller(node, parts, sampler, validator, training)
        if node.is_leader:
            ports = Ports(node, self._controller.handle, self._peers)
            checkpoints = Checkpoints(open_run_store(config, node.paths.root), node.epoch)
            acts = Acts(node, ports, checkpoints, self._events, vocab_size(config.model.path))
            self._coordinator = Coordinator(node, ports, acts, self._events)

    async def _serve(self, hub: Channel, peer_hub: Channel) -> None:
        assert self._controller is not None and self._parts is not None, "built before"
        tasks = [
            asyncio.ensure_future(work)
            for work in (
                self._controller.quit.wait(), self._parts.arbiter.run(), hub.failure(), peer_hub.failure(),
                self._watch_epoch(), self._report_trouble(),
            )
        ]  # fmt: skip
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

    def trouble(self, error: str, exit_code: int) -> None:
        """Something this node cannot mend: the leader decides."""
        self._trouble.put_nowait(c.Trouble(error=error, exit_code=exit_code))

    async def _report_trouble(self) -> None:
        while True:
            trouble = await self._trouble.get()
            self._events.emit("trouble", error=trouble.error, exit_code=trouble.exit_code)
            if self._coordinator is not None:
                self._coordinator.fail(trouble.error, trouble.exit_code)
            else:
                await self._peers[0].tell("node0", trouble)

    async def _watch_epoch(self) -> None:
        """End this controller once a newer attempt exists."""
        while True:
            check_newest(self._node.paths, self._node.epoch)
            await asyncio.sleep(EPOCH_CHECK_S)

    async def _from_worker(self, sender: str, body: m.Message) -> m.Message | None:
        assert self._controller is not None, "workers start after the controller is built"
        return await self._controller.from_worker(sender, body)

    async def _from_peer(self, sender: str, body: m.Message) -> m.Message | None:
        match body:
            case c.EventLine():
                append_line(self._node.paths.events, body.line.decode())
                return None
            case c.Trouble():
                if self._coordinator is not None:
                    self._coordinator.fail(f"{sender}: {body.error}", body.exit_code)
                return None
        await self._until_built()
        assert self._controller is not None, "waited for"
        return await self._controller.handle(sender, body)

    async def _until_built(self) -> None:
        limit_s, began_s = self._node.config.launch.start_timeout_s, clock.monotonic_s()
        while self._controller is None and clock.monotonic_s() - began_s < limit_s:
            await asyncio.sleep(0.05)

    async def _worker_exit(self, worker: Worker, how: str) -> None:
        assert self._controller is not None, "workers start after the controller is built"
        await self._controller.on_worker_exit(worker, how)

    def _emit(self, line: str) -> None:
        if self._node.is_leader:
            append_line(self._node.paths.events, line)
        elif 0 in self._peers:
            task = asyncio.get_running_loop().create_task(
                self._peers[0].tell("node0", c.EventLine(line=line.encode()))
            )
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _close(self, channels: list[Channel]) -> None:
        if self._parts is not None:
            await self._parts.supervisor.close(WORKER_GRACE_S)
        for task in set(self._background):
            with contextlib.suppress(asyncio.CancelledError, YattError):
                await asyncio.wait_for(task, 1.0)
        for channel in channels:
            await channel.close()


def open_run_store(config: RunConfig, root: Path) -> Store:
    """The run's checkpoint store.

    Raises:
        ConfigError: its URL cannot be used.
    """
    return open_store(config.checkpoint.url or str(root / "checkpoints"), config.checkpoint.storage_options)


def vocab_size(model: str) -> int:
    """Of a Hugging Face folder's config."""
    return int(json.loads((Path(model) / "config.json").read_text())["vocab_size"])
