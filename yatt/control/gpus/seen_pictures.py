"""Has the pictures of an update's samples prepared on this node, and trainer ranks compute their features.

Pictures go in windows that fit into the node's prepared files beside what engines use. A file that is evicted
between its preparation and the rank's reading is prepared again.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator

from yatt.control.gpus.prepared_requests import PrepareMedia
from yatt.control.gpus.processes.worker_plan import Worker
from yatt.errors import WorkerFailed
from yatt.records import message as m
from yatt.records.media import MOST_ITEMS, item_of_media

MOST_WINDOW_BYTES = 64 << 20
PATCH_BYTES = 3 * 32 * 32
"""Bytes of a patch of 32 x 32 pixels; those of known models are smaller."""

TRIES = 10
"""Number of times that a window's files may vanish before a rank has read them all."""

OrderRank = Callable[[Worker, m.SeePictures], Awaitable[m.PicturesSeen]]


class SeenPictures:
    """Shows pictures to the trainer ranks of one node.

    Args:
        prepare: `MediaHost.prepare_media`.
        order: sends an order to a rank.
        folder: of the prepared files.
        cache_bytes: `media.cache_bytes`; 0: the default, which is larger than a window.
    """

    def __init__(self, prepare: PrepareMedia, order: OrderRank, folder: str, cache_bytes: int) -> None:
        self._prepare, self._order, self._folder = prepare, order, folder
        window_bytes = min(MOST_WINDOW_BYTES, cache_bytes // 4 or MOST_WINDOW_BYTES)
        self._most_patches = window_bytes // PATCH_BYTES
        self._turn = asyncio.Lock()

    async def show(self, worker: Worker, iteration: int, rollouts: Iterable[m.Rollout]) -> None:
        """Has a rank compute the features of all pictures of these samples.

        Raises:
            WorkerFailed: a picture cannot be used any more, or its file vanishes again and again.
        """
        for window in windows_of(pictures_of(rollouts), self._most_patches):
            async with self._turn:  # so that ranks do not evict each other's files
                await self._show_window(worker, iteration, window)

    async def _show_window(self, worker: Worker, iteration: int, items: tuple[m.MediaItem, ...]) -> None:
        for _ in range(TRIES):
            answer = await self._prepare(items)
            for fault in answer.faults:
                raise WorkerFailed(f"a picture of samples that are to be trained on: {fault.error}")
            pictures = tuple(
                m.PreparedPicture(items[each.index].sha256, each.digest) for each in answer.items
            )
            order = m.SeePictures(iteration=iteration, folder=self._folder, pictures=pictures)
            missing = (await self._order(worker, order)).missing
            if not missing:
                return
            items = tuple(items[answer.items[index].index] for index in missing)
        raise WorkerFailed(
            f"prepared files of {len(items)} pictures vanished {TRIES} times before they were read"
        )


def pictures_of(rollouts: Iterable[m.Rollout]) -> tuple[m.MediaItem, ...]:
    """Returns the pictures of samples, each once, in the order of the samples."""
    return tuple(dict.fromkeys(
        item_of_media(each)
        for rollout in rollouts for turn in rollout.turns for each in turn.media
    ))  # fmt: skip


def windows_of(items: Iterable[m.MediaItem], most_patches: int) -> Iterator[tuple[m.MediaItem, ...]]:
    """Yields items in order, with `most_patches` together, or a single one with more."""
    window, patches = list[m.MediaItem](), 0
    for item in items:
        size = math.prod(item.grid)
        if window and (patches + size > most_patches or len(window) == MOST_ITEMS):
            yield tuple(window)
            window, patches = [], 0
        window.append(item)
        patches += size
    if window:
        yield tuple(window)
