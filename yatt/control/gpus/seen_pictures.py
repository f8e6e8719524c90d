"""Has the pictures of an update's samples prepared on this node, and trainer ranks compute their features.

Pictures go in windows that fit into the node's prepared files beside what engines use. A file that is evicted
between its preparation and the rank's reading is prepared again; one that cannot be used any more costs the
samples that need it.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

from yatt.control.gpus.prepared_requests import PrepareMedia
from yatt.control.gpus.processes.worker_plan import Worker
from yatt.errors import WorkerFailed
from yatt.records import message as m
from yatt.records.media import MOST_ITEMS, item_of_media

MOST_WINDOW_BYTES = 64 << 20
PATCH_BYTES = 3 * 32 * 32
"""Bytes of a patch of 32 x 32 pixels; those of known models are smaller."""

TRIES = 10
"""Number of times in a row that all files of a window may vanish before a rank has read one."""

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

    async def show(self, worker: Worker, iteration: int, rollouts: Sequence[m.Rollout]) -> dict[int, str]:
        """Has a rank compute the features of all pictures of these samples.

        Returns:
            Why a picture cannot be used any more, by the ids of samples that need it.

        Raises:
            WorkerFailed: a picture cannot be read now, or prepared files vanish again and again.
        """
        lost = dict[m.MediaItem, str]()
        for window in windows_of(pictures_of(rollouts), self._most_patches):
            async with self._turn:  # so that ranks do not evict each other's files
                lost |= await self._show_window(worker, iteration, window)
        needed = {rollout.sample_id: pictures_of([rollout]) for rollout in rollouts if lost}
        return {i: lost[item] for i, items in needed.items() for item in items[::-1] if item in lost}

    async def _show_window(
        self, worker: Worker, iteration: int, items: tuple[m.MediaItem, ...]
    ) -> dict[m.MediaItem, str]:
        """Returns why some items cannot be used any more; the rank has seen all others."""
        lost, tries = dict[m.MediaItem, str](), 0
        while tries < TRIES:
            answer = await self._prepare(items)
            for fault in answer.faults:
                if fault.waits:
                    raise WorkerFailed(f"a picture of samples that are to be trained on: {fault.error}")
                lost[items[fault.index]] = fault.error
            missing = await self._missing(worker, iteration, items, answer.items)
            if not missing:
                return lost
            tries = tries + 1 if len(missing) == len(answer.items) else 0
            items = missing
        raise WorkerFailed(
            f"prepared files of {len(items)} pictures vanished {TRIES} times before they were read"
        )

    async def _missing(
        self, worker: Worker, iteration: int, items: tuple[m.MediaItem, ...], made: Sequence[m.PreparedItem]
    ) -> tuple[m.MediaItem, ...]:
        """Orders a rank to see prepared items; returns those whose files it did not find."""
        if not made:
            return ()
        pictures = tuple(m.PreparedPicture(items[each.index].sha256, each.digest) for each in made)
        order = m.SeePictures(iteration=iteration, folder=self._folder, pictures=pictures)
        return tuple(items[made[index].index] for index in (await self._order(worker, order)).missing)


def pictures_of(rollouts: Iterable[m.Rollout]) -> tuple[m.MediaItem, ...]:
    """Returns the pictures of samples, each once, in the order of the samples."""
    return tuple(
        dict.fromkeys(
            item_of_media(each) for rollout in rollouts for turn in rollout.turns for each in turn.media
        )
    )


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
