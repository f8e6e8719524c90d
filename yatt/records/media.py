"""Messages between a controller and its node's media process."""

import msgspec

from yatt.printable import printable
from yatt.records.episode import MediaRef, PlacedMedia
from yatt.records.order import Message, Order

MOST_ITEMS = 1024
"""Most media of one order; the media process refuses a longer one."""

Grid = tuple[int, int, int]
"""Patches in time, height and width."""

ANY_GRID: Grid = (0, 0, 0)


class VideoFacts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a video's file has: frames, frames a second, and pixels of a frame as it is shown."""

    num_frames: int
    fps: float
    width: int
    height: int


NO_VIDEO = VideoFacts(0, 0.0, 0, 0)


class MediaItem(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A medium that is to be prepared.

    `path` is below `data.media_root`; empty: the file lies in `data.media_store`, by its digest. `sha256` is
    the expected digest of the file in hex; empty: not checked. `grid` is what the prompt was made for;
    ANY_GRID: not checked. `genrm`: the GenRM whose model's processor prepares it; empty: the policy's.
    `video` is what a video's file has to have; NO_VIDEO: it is a picture.
    """

    path: str
    sha256: str = ""
    grid: Grid = ANY_GRID
    genrm: str = ""
    video: VideoFacts = NO_VIDEO

    @property
    def is_video(self) -> bool:
        """Whether it is a video."""
        return self.video.num_frames > 0


def item_of_media(media: PlacedMedia, genrm: str = "") -> MediaItem:
    """Returns what is to be prepared for a medium of a prompt; the same for all parts of a video."""
    return MediaItem(media.ref.path, media.ref.sha256, media.file_grid, genrm, facts_of_video(media.ref))


def facts_of_video(ref: MediaRef) -> VideoFacts:
    """Returns what a reference says of a video; NO_VIDEO: it is a picture's."""
    return VideoFacts(ref.num_frames, ref.fps, ref.width, ref.height) if ref.is_video else NO_VIDEO


class PreparedItem(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The prepared file of the order's item number `index`, in the node's folder (see
    `yatt.adapters.node_local.prepared_media`)."""

    index: int
    digest: str
    grid: Grid


class MediaFault(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Why the order's item number `index` is not prepared: one sentence that names its file.

    `waits`: the same order may succeed later. `is_crowded`: it has no room beside other orders.
    """

    index: int
    error: str
    waits: bool = False
    is_crowded: bool = False


class MediaPrepared(Message, frozen=True, kw_only=True):
    """Each item of the order is in `items` or in `faults`. Prepared files stay at least until this is sent.

    `cache_bytes`: the limit of the node's files now. It is lower than `media.cache_bytes` after the memory
    filesystem was full.
    """

    items: tuple[PreparedItem, ...]
    faults: tuple[MediaFault, ...] = ()
    cache_bytes: int = 0


class PrepareMedia(Order[MediaPrepared], frozen=True, kw_only=True):
    """Order to have these media prepared, all at the same time."""

    items: tuple[MediaItem, ...]


SHOWN_CHARACTERS = 200


def media_name(item: MediaItem) -> str:
    """Returns how messages name an item."""
    return printable(item.path[:SHOWN_CHARACTERS]) or f"{item.sha256[:64]} in data.media_store"
