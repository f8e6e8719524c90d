"""The save in flight: uploads by all trainer nodes, then the commit, while the run continues.

Whatever fails here costs this save and not the run; only an attempt that is over or a store that was taken
over ends it. `yatt.core.phases.saving` decides what follows.
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from functools import partial
from typing import Any

from yatt import clock
from yatt.adapters.files.patience import exit_code_of, with_retries
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.adapters.run_folder.attempt_claim import check_newest
from yatt.adapters.run_folder.ledger import COMMITTED, write_record
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.manifest_format import Manifest, prefix_of
from yatt.checkpoint.commit.retention import Removed, apply_retention
from yatt.checkpoint.commit.run_store import store_url
from yatt.checkpoint.store.unfinished import abort_uploads
from yatt.control.leader.inbox import Inbox
from yatt.control.leader.metrics_row import MetricsRow
from yatt.control.leader.node_clients import NodeClients
from yatt.control.leader.saves.last_save import LastSave, TooLate, whole_manifest
from yatt.control.node import Node
from yatt.control.rollouts.groups.kept_files import remove_files
from yatt.core.phases.kept_groups import covered_files
from yatt.core.phases.phases import Committed, SaveFailed, SaveGivenUp
from yatt.core.phases.time_left import SaveTarget
from yatt.errors import EXIT_DO_NOT_RESTART, EXIT_FAILED, EXIT_WILL_CONTINUE, YattError
from yatt.obs.metrics import read_metric_rows
from yatt.obs.story.events import EventLog
from yatt.records import message as m
from yatt.records.events.saves import (
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointGivenUp,
    RetentionFailed,
)

NOTE_S = 10.0
"""Longest wait for the record of a commit in the ledger."""

FATAL = (EXIT_DO_NOT_RESTART, EXIT_WILL_CONTINUE)
"""Exit codes of failures that end the attempt: a newer attempt exists, or another folder has the store."""


class Commits:
    """Uploads and commits one save at a time.

    Args:
        inbox: gets Committed or SaveFailed.
        row: rows of metrics, which decide about the best checkpoints.

    Attributes:
        checkpoints: those of the run.
        events: the leader's events.
    """

    def __init__(
        self,
        node: Node,
        clients: NodeClients,
        checkpoints: Checkpoints,
        events: EventLog,
        inbox: Inbox,
        row: MetricsRow,
    ) -> None:
        self._node, self._clients, self.events, self._inbox = node, clients, events, inbox
        self._row = row
        self.checkpoints = checkpoints
        self._last_save = LastSave(node, clients, events, inbox)
        self._committed = ""
        """Prefix of the newest committed save, which nodes keep in their local tier."""

        self._tasks: set[asyncio.Task[None]] = set()

    def resumed(self, manifest: Manifest) -> None:
        """Notes the checkpoint that this attempt resumed from."""
        self._committed = prefix_of(manifest)

    def begin(self, prefix: str, draft: Manifest, size_bytes: int) -> None:
        """Begins to upload the snapshots that were taken; if there is no time for that, to keep them.

        Args:
            draft: the manifest, without its files.
        """
        is_kept = self._last_save.target(size_bytes) is SaveTarget.LOCAL
        work = self._keep(prefix, draft) if is_kept else self._run(prefix, draft, size_bytes)
        task = asyncio.get_running_loop().create_task(self._guarded(draft.iteration, work))
        self._tasks.add(task)  # one that removes old checkpoints may be there too
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Gives up an upload that still runs: the attempt ends."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _guarded(self, iteration: int, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except TooLate:
            self.events.emit(CheckpointGivenUp(iteration=iteration))
            self._inbox.put(SaveGivenUp(iteration, is_kept=False))
        except (YattError, OSError) as error:
            self._failed(iteration, error)
        except Exception as error:  # noqa: BLE001 (reported: nobody awaits this task)
            self._inbox.fail(f"a defect in saving: {error!r}", EXIT_FAILED)

    async def _run(self, prefix: str, draft: Manifest, size_bytes: int) -> None:
        began_s = clock.monotonic_s()
        uploaded = self._uploaded(prefix, draft, size_bytes, began_s)
        await self._commit(await self._last_save.in_time(uploaded, size_bytes), began_s)
        self._inbox.put(Committed(draft.iteration))
        await self._retain(draft.iteration)

    async def _keep(self, prefix: str, draft: Manifest) -> None:
        await self.check_newest()
        await self._last_save.keep(prefix, draft, self._committed)
        self._inbox.put(SaveGivenUp(draft.iteration, is_kept=True))

    def _failed(self, iteration: int, error: YattError | OSError) -> None:
        code = exit_code_of(error) if isinstance(error, YattError) else EXIT_FAILED
        self.events.emit(CheckpointFailed(iteration=iteration, error=str(error)))
        if code in FATAL:
            self._inbox.fail(str(error), code)
        self._inbox.put(SaveFailed(iteration, str(error)))

    async def _uploaded(self, prefix: str, draft: Manifest, size_bytes: int, began_s: float) -> Manifest:
        """Returns the whole manifest, when all nodes have uploaded."""
        order = m.Upload(iteration=draft.iteration, url=prefix, committed=self._committed)
        try:
            uploaded = await self._clients.ask_trainer_nodes(order)
        except (YattError, OSError):
            await self._discard(prefix)  # after an upload only: a commit that failed may have taken effect
            raise
        self._last_save.measured(size_bytes, clock.monotonic_s() - began_s, uploaded)
        return whole_manifest(draft, uploaded)

    async def _commit(self, manifest: Manifest, began_s: float) -> None:
        iteration = manifest.iteration
        await self.check_newest()
        await call_in_thread(partial(self.checkpoints.commit, manifest))
        self._committed = prefix_of(manifest)
        size_bytes = sum(file.size_bytes for file in manifest.files)
        seconds = round(clock.monotonic_s() - began_s, 6)
        self.events.emit(CheckpointCommitted(iteration=iteration, size_bytes=size_bytes, seconds=seconds))
        await self.note(iteration)
        await self._remove_groups(iteration)

    async def _remove_groups(self, committed: int) -> None:
        """Removes the kept prompt groups that no attempt needs any more. The wait is short: those that are
        left are removed after the next commit."""
        chosen = partial(covered_files, attempt=self._node.attempt, committed=committed)
        remove = partial(remove_files, self._node.paths.kept_groups, chosen)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(NOTE_S):
                await call_in_thread(remove)

    async def note(self, iteration: int) -> None:
        """Records a commit in the ledger, so that a store that is not mounted later is not taken for a new
        one. The commit is valid without the record, so the wait is short."""
        record = partial(
            write_record, self._node.paths, self._node.attempt, COMMITTED, {"iteration": iteration}
        )
        with contextlib.suppress(OSError, YattError, TimeoutError):
            async with asyncio.timeout(NOTE_S):
                await call_in_thread(record)

    async def _retain(self, committed: int) -> None:
        """Removes checkpoints that are not kept, and records of local commits up to this iteration. Those
        that cannot be removed now are removed after the next commit."""
        config, paths, attempt = self._node.config, self._node.paths, self._node.attempt
        policy, is_first = config.checkpoint, not self.checkpoints.leftovers.is_searched
        newest_rows = (*self._row.unwritten, dict(self._row.values))

        def work() -> Removed:
            with contextlib.suppress(OSError):  # they are removed after the next commit
                self._last_save.committed(committed)
            if is_first:
                abort_uploads(store_url(config, paths.root), policy.storage_options, before=attempt)
            rows = read_metric_rows(paths.metrics) if policy.keep_best else []
            return apply_retention(self.checkpoints, policy, [*rows, *newest_rows])

        try:
            removed = await call_in_thread(work)
        except (OSError, YattError) as error:  # nobody awaits this: whatever it is, it is an event
            self.events.emit(RetentionFailed(reason=str(error)))
            return
        if removed.note:
            self.events.emit(RetentionFailed(reason=removed.note))

    async def _discard(self, prefix: str) -> None:
        """Removes the files of a failed save, if the store lets it; a later start removes them otherwise."""
        with contextlib.suppress(OSError, YattError):
            await call_in_thread(partial(self.checkpoints.discard, prefix))

    async def check_newest(self) -> None:
        """Refuses to go on if a newer attempt exists.

        Raises:
            StaleAttempt: it does.
        """
        check = partial(check_newest, self._node.paths, self._node.attempt)
        await call_in_thread(partial(with_retries, check))
