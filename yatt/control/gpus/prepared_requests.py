"""Has the pictures of requests prepared on this node before an engine, or a judge behind a URL, gets them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from yatt.adapters.node_local.media_file import hold_prepared, mapped_prepared, release_prepared
from yatt.errors import WorkerFailed
from yatt.records import message as m
from yatt.records.media import ANY_GRID, MOST_ITEMS, item_of_media

PrepareMedia = Callable[[tuple[m.MediaItem, ...]], Awaitable[m.MediaPrepared]]

OPEN_TRIES = 10
"""Number of times that files may vanish between their preparation and their opening."""


class MediaUnusable(Exception):
    """A picture of a request cannot be used; the text names its file and says why."""


class PreparedRequests:
    """Asks this node's media process, once for requests that ask at the same time.

    Args:
        prepare: `MediaHost.prepare_media`.
        folder: of the node's prepared files.
    """

    def __init__(self, prepare: PrepareMedia, folder: Path) -> None:
        self._prepare, self._folder = prepare, folder
        self._under_way: dict[m.MediaItem, asyncio.Task[str]] = {}

    async def with_prepared(self, sample: m.SampleRequest, key: str, genrm: str = "") -> m.SampleRequest:
        """Returns a request whose pictures name their prepared files, which are held until the engine has
        opened them, or `release`. Those that were evicted before they were held are made again, together.

        Args:
            key: the request's id for the engine.
            genrm: whose engine gets it; empty: the policy's.

        Raises:
            MediaUnusable: one cannot be used.
            WorkerFailed: one cannot be read now, the media process cannot be started, or files vanish again
                and again.
        """
        items = [item_of_media(each, genrm) for each in sample.media]
        digests = await asyncio.gather(*map(self._digest, items))
        for _ in range(OPEN_TRIES):
            if hold_prepared(self._folder, digests, key):
                break
            found = await self._asked(items)
            digests = [found[item] for item in items]
        else:
            raise WorkerFailed(
                f"prepared pictures of a request vanished {OPEN_TRIES} times before they were held; raise "
                "media.cache_bytes"
            )
        media = tuple(
            msgspec.structs.replace(each, prepared=digest)
            for each, digest in zip(sample.media, digests, strict=True)
        )
        return msgspec.structs.replace(sample, media=media)

    def release(self, sample: m.SampleRequest, key: str) -> None:
        """Lets the prepared files of a request be evicted that no engine opens any more."""
        release_prepared(self._folder, len(sample.media), key)

    async def opened_files(self, refs: Sequence[m.MediaRef], genrm: str) -> list[memoryview]:
        """Returns the files of pictures that are encoded for a judge behind a URL. They are mapped: one that
        is evicted later can be read until the view is dropped. One that is evicted before is made again.

        Raises:
            MediaUnusable | WorkerFailed: as in `with_prepared`, or they vanish again and again.
        """
        items = [m.MediaItem(ref.path, ref.sha256, ANY_GRID, genrm) for ref in refs]
        for _ in range(OPEN_TRIES):
            digests = await self._asked(items)  # an order holds all of its files until its answer
            try:
                return [mapped_prepared(self._folder, digests[item])[1] for item in items]
            except (OSError, ValueError) as error:
                why = str(error)
        raise WorkerFailed(
            f"the pictures for GenRM '{genrm}' cannot be read ({OPEN_TRIES} tries): {why}; raise "
            "media.cache_bytes, or lower api.most_bytes or api.max_concurrency"
        )

    async def _digest(self, item: m.MediaItem) -> str:
        """Returns the digest of the prepared file. Who is cancelled leaves the others waiting for it."""
        task = self._under_way.get(item)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._asked_one(item))
            self._under_way[item] = task
            task.add_done_callback(partial(self._ended, item))
        return await asyncio.shield(task)

    def _ended(self, item: m.MediaItem, task: "asyncio.Task[str]") -> None:
        del self._under_way[item]
        if not task.cancelled():
            task.exception()  # nobody may wait for it any more

    async def _asked_one(self, item: m.MediaItem) -> str:
        return (await self._asked([item]))[item]

    async def _asked(self, items: Sequence[m.MediaItem]) -> dict[m.MediaItem, str]:
        """Returns the digests of prepared files, each item's once."""
        every, found = tuple(dict.fromkeys(items)), dict[m.MediaItem, str]()
        for at in range(0, len(every), MOST_ITEMS):
            order = every[at : at + MOST_ITEMS]
            answer = await self._prepare(order)
            for fault in answer.faults:
                raise WorkerFailed(fault.error) if fault.waits else MediaUnusable(fault.error)
            found |= {order[each.index]: each.digest for each in answer.items}
        return found
