"""Makes one item of an order: reads, decodes, prepares and keeps it. A fault belongs to the item.

Calls run in threads. Together they use a bounded amount of memory: a large picture waits for others.
"""

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from yatt.adapters.files.patience import is_passing
from yatt.adapters.inputs.media import MOST_BYTES
from yatt.adapters.inputs.media_head import MediaRefused, head_by_parts, refuse_pixels
from yatt.adapters.inputs.video_files import FrameList, frame_list, is_frame_list
from yatt.adapters.node_local.media_file import media_digest
from yatt.core.samples.kept_media import NoRoom
from yatt.errors import YattError, error_line
from yatt.media.decode import decode_picture
from yatt.media.fetch import MediaSource, MediaSources
from yatt.media.kept import KeptFiles
from yatt.media.prepare import Preparation
from yatt.media.videos import VideoPreparation, decoded_frames
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


class PictureMaker:
    """Makes prepared files of pictures and videos.

    Args:
        preparations: by the GenRM's name; the empty name is the policy.
        most_pixels: largest picture that is decoded.
        tick: called in any thread when there was progress.

    Attributes:
        memory: of all threads together.
        reading: items that are being read now, as (order, index).
    """

    def __init__(
        self,
        sources: MediaSources,
        preparations: Mapping[str, Preparation],
        files: KeptFiles,
        most_pixels: int,
        tick: Callable[[], None],
    ) -> None:
        self._sources, self._preparations, self._files = sources, preparations, files
        self._most_pixels, self._tick = most_pixels, tick
        self.videos: Callable[[], VideoPreparation] | None = None
        """How the policy's videos are prepared; None: they are refused."""

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
        make = self._make_video if item.is_video else self._make
        digest = media_digest(item.sha256, self._preparation_of(item).digest)
        with self._files.claimed_file(order, digest) as shape:
            grid = shape.grid if shape is not None else make(order, index, item, digest)
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

    def _preparation_of(self, item: MediaItem) -> Preparation | VideoPreparation:
        if not item.is_video:
            return self._preparations[item.genrm]
        if self.videos is None or item.genrm:
            raise MediaRefused("is a video, and only the policy is shown some")
        return self.videos()

    def _make_video(self, order: int, index: int, item: MediaItem, digest: str) -> Grid:
        preparation = self._preparation_of(item)
        assert isinstance(preparation, VideoPreparation), "an item with a video"
        if item.video.width * item.video.height > self._most_pixels:
            raise MediaRefused(
                f"has frames of {item.video.width} x {item.video.height} pixels, more than "
                f"media.most_pixels ({self._most_pixels})"
            )
        grid = preparation.grid_of_facts(item.video)
        _check_grid(grid, item)
        with contextlib.ExitStack() as stack:
            with self._reading(order, index, item) as source:
                needed = 2 * source.size_bytes + preparation.memory_bytes(item.video)  # once for the decoder
                stack.enter_context(self.memory.taken(needed))
                data = source.content(item.sha256)
            self._tick()
            wanted = preparation.tokens.sampled_frames(item.video.num_frames, item.video.fps)
            if is_frame_list(data):
                listed = frame_list(data)
                if (len(listed.frames), listed.fps) != (item.video.num_frames, item.video.fps):
                    raise MediaRefused("has other frames than when the data was made")
                frames = self._listed_frames(listed, wanted, (item.video.width, item.video.height))
            else:
                frames = decoded_frames(data, item.video, wanted)
            patches = preparation.patches_of_video(grid, frames, self._tick)
            self._files.keep_file(order, digest, grid, patches)
        return grid

    def _listed_frames(
        self, listed: FrameList, wanted: Sequence[int], size: tuple[int, int]
    ) -> Iterator[NDArray[np.uint8]]:
        """Yields some of the pictures that a file names as frames of a video, each read when it is needed."""
        for number in wanted:
            frame = listed.frames[number]
            try:
                with self._sources.opened_source(MediaItem(frame.path, frame.sha256)) as source:
                    data = source.content(frame.sha256)
                picture = decode_picture(data, self._most_pixels)
                if picture.size != size:
                    raise MediaRefused(f"has {picture.size[0]} x {picture.size[1]} pixels, not {size}")
                yield np.asarray(picture)
            except MediaRefused as error:
                name = media_name(MediaItem(frame.path, frame.sha256))
                raise MediaRefused(f"names {name} as its frame {number + 1}, which {error}") from error

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
