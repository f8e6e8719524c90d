"""Makes one item of an order: reads, decodes, prepares and keeps it. A fault belongs to the item.

Calls run in threads. Together they use a bounded amount of memory: a large picture waits for others.
"""

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from yatt.adapters.files.patience import is_passing
from yatt.adapters.inputs.media import MOST_BYTES
from yatt.adapters.inputs.media_head import MediaRefused, head_by_parts, refuse_pixels
from yatt.adapters.node_local.media_file import media_digest
from yatt.core.samples.kept_media import NoRoom
from yatt.errors import YattError, error_line
from yatt.media.decode import decode_picture
from yatt.media.fetch import MediaSource, MediaSources
from yatt.media.kept import KeptFiles
from yatt.printable import printable
from yatt.records.media import ANY_GRID, Grid, MediaFault, MediaItem, PreparedItem, media_name

_LOG = logging.getLogger("yatt.media")
BYTES_PER_PIXEL = 16
"""Memory for decoding and preparing: the library's picture and its copy of another form, 4 bytes a pixel
each, two of three bytes for the processor, and room to resize."""

_SHA256 = re.compile(r"([0-9a-f]{64})?")


class MemoryBudget:
    """Memory that threads share. One that wants more than all waits until nobody else has any."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = self._left = size_bytes
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, size_bytes: int) -> Iterator[None]:
        """Context manager: waits for so many bytes, and has them until its end."""
        size = min(size_bytes, self.size_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._left >= size)
            self._left -= size
        try:
            yield
        finally:
            with self._changed:
                self._left += size
                self._changed.notify_all()


class PictureForm(Protocol):
    """What a picture is made into: patches for a model (`Preparation`), a file (`PictureEncoding`).

    Attributes:
        digest: of its settings, in hex.
    """

    @property
    def digest(self) -> str: ...

    def patches_of(self, picture: Image.Image) -> tuple[Grid, NDArray[np.uint8]]:
        """Returns the grid, and [rows, columns] uint8. Raises MediaRefused for a picture's own fault."""


class PictureMaker:
    """Makes prepared files of pictures.

    Args:
        preparations: by the GenRM's name; the empty name is the policy.
        most_pixels: largest picture that is decoded.
        tick: called in any thread when there was progress.

    Attributes:
        memory: of all threads together.
        reading: items that are being read now, as (order, index).
    """

    def __init__(
        self, sources: MediaSources, preparations: Mapping[str, PictureForm], files: KeptFiles,
        most_pixels: int, tick: Callable[[], None],
    ) -> None:  # fmt: skip
        self._sources, self._preparations, self._files = sources, preparations, files
        self._most_pixels, self._tick = most_pixels, tick
        self.memory = MemoryBudget(MOST_BYTES + BYTES_PER_PIXEL * most_pixels)
        self.reading: set[tuple[int, int]] = set()

    def make_item(self, order: int, index: int, item: MediaItem) -> PreparedItem | MediaFault:
        """Returns where the prepared item is, or why it is not. Whatever the file does, nothing is raised."""
        name = media_name(item)
        try:
            return self._made(order, index, item)
        except MediaRefused as error:
            return MediaFault(index, f"{name} {error}.")
        except NoRoom:
            says = f"{name} has no room beside what other orders need now."
            return MediaFault(index, says, waits=True, is_crowded=True)
        except MemoryError:
            return MediaFault(index, f"{name} needs more memory than a picture may.")
        except (OSError, YattError) as error:
            says = getattr(error, "strerror", None) or printable(str(error))
            return MediaFault(index, f"{name} cannot be read: {says}.", waits=is_passing(error))
        except Exception as error:  # noqa: BLE001 (the libraries may raise anything for such files)
            _LOG.exception("a defect at %s", name)
            return MediaFault(index, f"{name} cannot be prepared: {printable(error_line(error))}.")

    def _made(self, order: int, index: int, item: MediaItem) -> PreparedItem:
        if not _SHA256.fullmatch(item.sha256):
            raise MediaRefused("has a SHA-256 in the data that is none; write 64 hexadecimal digits")
        if not item.sha256:
            with self._reading(order, index, item) as source:
                item = msgspec.structs.replace(item, sha256=source.content_digest())
        digest = media_digest(item.sha256, self._preparations[item.genrm].digest)
        with self._files.claimed_file(order, digest) as shape:
            grid = shape.grid if shape is not None else self._make(order, index, item, digest)
        _check_grid(grid, item)
        return PreparedItem(index, digest, grid)

    def _make(self, order: int, index: int, item: MediaItem, digest: str) -> Grid:
        with contextlib.ExitStack() as stack:
            with self._reading(order, index, item) as source:
                head = head_by_parts(source.read_at)
                refuse_pixels(head, self._most_pixels)
                needed = source.size_bytes + BYTES_PER_PIXEL * head.num_pixels
                stack.enter_context(self.memory.taken(needed))
                data = source.content(item.sha256)
            self._tick()
            picture = decode_picture(data, self._most_pixels)
            del data
            self._tick()
            grid, patches = self._preparations[item.genrm].patches_of(picture)
            del picture
            _check_grid(grid, item)
            self._files.keep_file(order, digest, grid, patches)
        return grid

    @contextlib.contextmanager
    def _reading(self, order: int, index: int, item: MediaItem) -> Iterator[MediaSource]:
        key = (order, index)
        self.reading.add(key)
        try:
            with self._sources.opened_source(item) as source:
                yield source
        finally:
            self.reading.discard(key)


def _check_grid(grid: Grid, item: MediaItem) -> None:
    if item.grid not in (ANY_GRID, grid):
        raise MediaRefused(
            f"has {_text_of(grid)} patches, but its prompt was made for {_text_of(item.grid)}: "
            "the file or the processor's settings have changed"
        )


def _text_of(grid: Grid) -> str:
    return " x ".join(map(str, grid))
