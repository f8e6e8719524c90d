"""The node's prepared files: how many bytes they are at most, while many more are made than have room."""

import asyncio
import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from tests.bench.media_process import media_server
from tests.tiny_processors import write_processor
from tests.worker_process import write_run
from yatt.control.gpus.seen_pictures import PATCH_BYTES, windows_of
from yatt.records.media import MediaItem

CACHE_BYTES, NUM_PICTURES, SIDE, PATCH = 32 << 20, 512, 512, 16
GRID = (1, SIDE // PATCH, SIDE // PATCH)
SHARED_MEMORY = "/dev/shm"
LOOK_S = 0.0005
ENGINE_REQUESTS = 32
"""Pictures that an engine's requests ask for at the same time, beside the windows of training."""


class FolderWatch:
    """Looks at a folder again and again, in a thread; the most bytes of its files."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stopped = folder, threading.Event()
        self.most_bytes = self.num_looks = 0
        self.names: set[str] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        thread = threading.Thread(target=self._look)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            thread.join()

    def _look(self) -> None:
        while not self._stopped.wait(LOOK_S):
            sizes = {}
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        sizes[found.st_ino] = found.st_blocks * 512  # a renamed file may be seen twice
                        self.names.add(entry.name)
            self.most_bytes = max(self.most_bytes, sum(sizes.values()))
            self.num_looks += 1


def write_pictures(folder: Path) -> list[MediaItem]:
    folder.mkdir()
    draw = np.random.default_rng(0)
    for number in range(NUM_PICTURES):
        small = Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        small.resize((SIDE, SIDE)).save(folder / f"{number}.jpg")
    return [MediaItem(f"{number}.jpg", grid=GRID) for number in range(NUM_PICTURES)]


async def prepare_all(run: Path, kept: Path, items: list[MediaItem]) -> None:
    """An iteration's orders: one for each picture of requests, and windows for the trainer's ranks."""
    room = asyncio.Semaphore(ENGINE_REQUESTS)
    async with media_server(run, kept) as media:

        async def ask(item: MediaItem) -> None:
            async with room:
                await media.prepare((item,))

        async def show() -> None:
            for window in windows_of(items[::-1], CACHE_BYTES // 4 // PATCH_BYTES):
                await media.prepare(window)

        await asyncio.gather(show(), *map(ask, items))


def most_room() -> int:
    """Prepares all pictures twice over; returns the most bytes that the folder of prepared files had."""
    with tempfile.TemporaryDirectory(prefix="yatt-", dir=SHARED_MEMORY) as name:
        folder, kept = Path(name), Path(name) / "kept"
        write_processor(folder, size={"shortest_edge": 32 * 32, "longest_edge": SIDE * SIDE})
        items = write_pictures(folder / "pictures")
        data = {"media_root": str(folder / "pictures"), "media_store": str(folder / "store")}
        run = write_run(folder, {"data": data, "media": {"cache_bytes": CACHE_BYTES}})
        kept.mkdir(mode=0o700)
        watch = FolderWatch(kept)
        with watch.watching():
            asyncio.run(prepare_all(run, kept, items))
        assert len(watch.names) > NUM_PICTURES // 2 and watch.num_looks > 100
        return watch.most_bytes
