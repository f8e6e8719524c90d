"""Has the pictures of requests prepared on this node before an engine gets them."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from yatt.errors import WorkerFailed
from yatt.records import message as m
from yatt.records.media import item_of_media

PrepareMedia = Callable[[tuple[m.MediaItem, ...]], Awaitable[m.MediaPrepared]]


class MediaUnusable(Exception):
    """A picture of a request cannot be used; the text names its file and says why."""


class PreparedRequests:
    """Asks this node's media process, once for requests that ask at the same time.

    Args:
        prepare: `MediaHost.prepare_media`.
    """

    def __init__(self, prepare: PrepareMedia) -> None:
        self._prepare = prepare
        self._under_way: dict[m.MediaItem, asyncio.Task[str]] = {}

    async def with_prepared(self, sample: m.SampleRequest, genrm: str = "") -> m.SampleRequest:
        """Returns a request whose pictures name their prepared files. An engine that comes too late for one,
        because it was evicted meanwhile, fails the request, which is then sent again.

        Args:
            genrm: whose engine gets it; empty: the policy's.

        Raises:
            MediaUnusable: one cannot be used.
            WorkerFailed: one cannot be read now, or the media process cannot be started.
        """
        digests = await asyncio.gather(*(self._digest(each, genrm) for each in sample.media))
        media = tuple(
            msgspec.structs.replace(each, prepared=digest)
            for each, digest in zip(sample.media, digests, strict=True)
        )
        return msgspec.structs.replace(sample, media=media)

    async def _digest(self, media: m.PlacedMedia, genrm: str) -> str:
        """Returns the digest of the prepared file. Who is cancelled leaves the others waiting for it."""
        item = item_of_media(media, genrm)
        task = self._under_way.get(item)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._asked(item))
            self._under_way[item] = task
            task.add_done_callback(partial(self._ended, item))
        return await asyncio.shield(task)

    def _ended(self, item: m.MediaItem, task: "asyncio.Task[str]") -> None:
        del self._under_way[item]
        if not task.cancelled():
            task.exception()  # nobody may wait for it any more

    async def _asked(self, item: m.MediaItem) -> str:
        answer = await self._prepare((item,))
        for fault in answer.faults:
            raise WorkerFailed(fault.error) if fault.waits else MediaUnusable(fault.error)
        return answer.items[0].digest
