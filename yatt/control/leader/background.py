"""Work of the leader that runs beside its loop; an error of it ends the attempt."""

import asyncio
from collections.abc import Awaitable

from yatt.adapters.files.patience import exit_code_of
from yatt.control.leader.inbox import Inbox
from yatt.errors import EXIT_FAILED, WorkerFailed, YattError


class Background:
    """Runs work in tasks.

    Attributes:
        inbox: receives failures.
    """

    def __init__(self, inbox: Inbox) -> None:
        self.inbox = inbox
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Awaitable[None]) -> None:
        """Runs `work` in a task of its own."""

        async def guarded() -> None:
            try:
                await work
            except YattError as error:
                self.inbox.fail(str(error), exit_code_of(error), is_symptom=isinstance(error, WorkerFailed))
            except OSError as error:  # a filesystem failed: another attempt may succeed
                self.inbox.fail(f"{error.filename or 'writing'}: {error.strerror or error}", EXIT_FAILED)

        task = asyncio.get_running_loop().create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.inbox.fail(f"a defect in the leader: {error!r}", EXIT_FAILED)
