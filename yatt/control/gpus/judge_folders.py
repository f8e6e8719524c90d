"""Which folder this node's engines of a GenRM are built from, where it takes weights of another run.

An engine with other weights is ended, and built anew where its GPU set is granted: as after any end of an
engine, but it is no failure.
"""

import asyncio
from functools import partial

from yatt.adapters.files.patience import with_retries
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.adapters.run_folder.judge_weights import newest_folder
from yatt.control.gpus.processes.supervisor import Supervisor
from yatt.control.node import Node
from yatt.core.gpus.placement import genrm_of_role
from yatt.records.message import Done, Message
from yatt.records.weights import UseJudges


class JudgeFolders:
    """The folders of one node's engines."""

    def __init__(self, node: Node, supervisor: Supervisor) -> None:
        self._node = node
        self._models = {g.name: g.model for g in node.config.genrms if g.refresh.url}
        self._folders = dict(self._models)  # that engines are built from now
        self._supervisor, self._using = supervisor, asyncio.Lock()
        engines = [w for w in supervisor.workers.values() if w.is_engine]
        self._argv = {w.name: w.argv for w in engines if genrm_of_role(w.role) in self._models}
        """Of each such worker, without a folder."""

    async def begin(self) -> None:
        """Takes the newest folders that are recorded: most likely those of the first batch.

        Raises:
            WorkerFailed: a record is damaged.
            OSError: the run folder cannot be read.
        """
        paths = self._node.paths
        find = {name: partial(newest_folder, paths, name, model) for name, model in self._models.items()}
        folders = {name: await call_in_thread(partial(with_retries, each)) for name, each in find.items()}
        await self.use(UseJudges(folders=folders))

    async def use(self, order: UseJudges) -> Message:
        """Has every engine of these GenRMs built from its folder; ends those that were built from others."""
        async with self._using:
            changed = {g: now for g, now in order.folders.items() if self._folders.get(g, now) != now}
            self._folders |= changed
            workers = [self._supervisor.workers[name] for name in self._argv]
            others = [worker for worker in workers if genrm_of_role(worker.role) in changed]
            for worker in others:
                folder = changed[genrm_of_role(worker.role)]
                worker.argv = (*self._argv[worker.name], "--model", folder)
            await self._supervisor.retire(others)
        return Done()
