"""Keeps finished prompt groups in the run folder, and uses those of an attempt that was killed.

A group is written when its samples are complete, and again when it has more scores. A thread writes, and
nothing waits for it. If the filesystem is slow or fails, groups are not kept, which costs only their
generation if the attempt is killed. `yatt.core.phases.kept_groups` has the rules.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from yatt.adapters.files.full_disk import is_full
from yatt.adapters.files.record_file import RecordWriter
from yatt.adapters.files.writer import BackgroundWriter
from yatt.adapters.processes.thread_call import call_in_thread
from yatt.control.node import Node
from yatt.control.rollouts.groups.groups import PromptGroup
from yatt.control.rollouts.groups.kept_files import (
    Found,
    KeptGroup,
    Search,
    encode_group,
    find_groups,
    head_of,
    remove_files,
)
from yatt.core.phases import kept_groups as rules
from yatt.core.phases.kept_groups import BEGINNING, KeptFile, Origin, Share
from yatt.errors import YattError, words_of
from yatt.obs.story.events import EventLog
from yatt.records.events.groups import GroupsNotKept, KeptGroupsPassedOver

MOST_WAITING_BYTES = 64 << 20
"""Bytes of groups that may wait to be written; groups beyond them are not kept."""

READ_S = 30.0
"""Longest wait for the groups of earlier attempts; then they are sampled anew."""


@dataclass(slots=True)
class _Current:
    """The file of the present iteration."""

    file: KeptFile
    writer: RecordWriter
    is_over: bool = False
    is_told: bool = False


@dataclass(slots=True)
class _Iterations:
    """The first iteration of this attempt, and those of which it took a snapshot."""

    first: int = 0
    saved: set[int] = field(default_factory=set)


class _BoundedWriter:
    """The writer, with a limit of the bytes that wait."""

    def __init__(self, writer: BackgroundWriter) -> None:
        self._writer, self._lock = writer, threading.Lock()
        self.waiting_bytes = 0

    def put(self, size: int, write: Callable[[], None]) -> bool:
        """Queues a write of so many bytes, which says when it is over (`written`); returns False if there
        is no room for it."""
        if self.waiting_bytes + size > MOST_WAITING_BYTES:
            return False
        self._count(size)
        self._writer.call(write)
        return True

    def call(self, work: Callable[[], None]) -> None:
        """Queues what needs no memory."""
        self._writer.call(work)

    def written(self, size: int) -> None:
        """So many bytes wait no more; from any thread."""
        self._count(-size)

    def _count(self, size: int) -> None:
        with self._lock:
            self.waiting_bytes += size


class KeptGroups:
    """One node's kept groups.

    Args:
        data: fingerprint of the training files.
        files: digest of the other inputs that decide about samples and scores.
        writer: makes the writes, in order; it is used for nothing else.
    """

    def __init__(
        self, node: Node, events: EventLog, writer: BackgroundWriter, *, data: str, files: str
    ) -> None:
        self._node, self._events, self._writer = node, events, _BoundedWriter(writer)
        self._inputs = data, files
        self._loop: asyncio.AbstractEventLoop | None = None
        self._iterations = _Iterations()
        self._current: _Current | None = None
        self._found: dict[int, KeptGroup] = {}
        self._num_scores: dict[int, int] = {}  # of what is written, by prompt number
        self.restored = BEGINNING
        """Identity of the weights that this attempt has restored."""

    @property
    def last(self) -> int:
        """The highest number of a group to use; -1 if there is none. Without deterministic mode all groups
        below it are opened too, as in the attempt that kept them."""
        return max(self._found, default=-1) if not self._node.config.run.deterministic else -1

    def saved(self, iteration: int) -> None:
        """Records that a snapshot of this iteration was taken: groups of the next one may be used later."""
        self._iterations.saved.add(iteration)

    async def begin(self, iteration: int, share: Share) -> None:
        """Begins an iteration: in the first one of the attempt, reads what earlier attempts have kept."""
        node, before, (data, files) = self._node, self._current, self._inputs
        is_first = not self._iterations.first
        first = self._iterations.first = self._iterations.first or iteration
        self._loop = asyncio.get_running_loop()
        weights = rules.weights_of(iteration, attempt=node.attempt, first=first, restored=self.restored)
        origin = Origin(
            run_id=node.config.run.id,
            settings=node.samples_hash,
            files=files,
            data=data,
            weights=weights,
            iteration=iteration,
        )
        file = KeptFile(iteration, node.attempt, share.shard, share.num_shards)
        folder = node.paths.kept_groups
        writer = RecordWriter(node.paths.root, folder / file.name, head_of(origin))
        self._current, self._found, self._num_scores = _Current(file, writer), {}, {}
        if before is not None:
            self._writer.call(partial(self._end, before))
        if is_first:
            await self._find(Search(folder, origin, share, node.attempt))
            if node.is_leader:
                useless = partial(rules.useless_files, attempt=node.attempt, first=iteration)
                self._writer.call(partial(remove_files, folder, useless))

    def like(self, group: PromptGroup) -> KeptGroup | None:
        """Returns the kept group for the prompt of `group`, once; None if there is none."""
        kept = self._found.pop(group.number, None)
        if kept is None or _identity(kept.group) != _identity(group):
            return None
        self._num_scores[group.number] = kept.num_scores
        return kept

    def keep(self, group: PromptGroup, counters: Mapping[str, int]) -> None:
        """Writes a group whose samples are complete, in the background, unless it is written already."""
        kept, current = KeptGroup(group=group, counters=dict(counters)), self._current
        if current is None or self._num_scores.get(group.number, -1) >= kept.num_scores:
            return
        data = encode_group(kept)
        write = partial(self._write, current, group.number, kept.num_scores, data)
        if self._writer.put(len(data), write):
            self._num_scores[group.number] = kept.num_scores
        else:
            self._say(current, f"{self._writer.waiting_bytes} bytes wait to be written")

    async def _find(self, search: Search) -> None:
        try:
            async with asyncio.timeout(READ_S):
                found: Found = await call_in_thread(partial(find_groups, search))
        except TimeoutError:
            found = Found(passed_over=[("", f"the run folder did not answer within {READ_S:g} s")])
        except OSError as error:
            found = Found(passed_over=[("", words_of(error))])
        finally:
            search.is_over.set()
        self._found = found.groups
        for name, reason in found.passed_over:
            self._events.emit(KeptGroupsPassedOver(name=name, reason=reason))

    # ---- in the writer's thread -----------------------------------------------------------------

    def _write(self, current: _Current, number: int, num_scores: int, data: bytes) -> None:
        """Writes one record. OSError: the writer tries again, as long as the iteration lasts."""
        if not current.is_over:
            try:
                current.writer.append(number, num_scores, data)
            except OSError as error:
                self._say(current, words_of(error))
                current.is_over = is_full(error) or current is not self._current
                if not current.is_over:
                    raise
                if is_full(error):  # what the run needs more shall have the space
                    _remove(current.writer)
            except (YattError, ValueError) as error:
                self._say(current, words_of(error))
                current.is_over = True
        self._writer.written(len(data))

    def _end(self, current: _Current) -> None:
        """Closes the file of an iteration that is over, and removes it if no attempt can use it."""
        current.is_over = True
        current.writer.close()
        mine = self._iterations
        if rules.is_for_nobody(current.file.iteration, first=mine.first, saved=mine.saved):
            _remove(current.writer)

    def _say(self, current: _Current, error: str) -> None:
        """Emits an event, once per file, from any thread."""
        if current.is_told or self._loop is None:
            return
        current.is_told = True
        emit = partial(self._events.emit, GroupsNotKept(iteration=current.file.iteration, error=error))
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(emit)


def _remove(writer: RecordWriter) -> None:
    with contextlib.suppress(OSError):  # it is removed when a later commit covers it
        writer.remove()


def _identity(group: PromptGroup) -> tuple[object, ...]:
    """Returns everything of a group that is known before it is sampled."""
    indexes = tuple(sample.index for sample in group.samples)
    return group.number, group.row, group.prompt_text, group.prompt, group.media, indexes
