"""References to the videos of data rows: files, bytes, and lists of frames.

A file is decoded, once for all starts, by another process, which says how many frames it has
(`yatt.media.head_processes`), since tokens follow from that. A list of frames becomes a file that names its
pictures.
"""

import contextlib
import hashlib
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from yatt.adapters.files.files import write_atomically
from yatt.adapters.inputs.media import MOST_BYTES, media_path, store_content
from yatt.adapters.inputs.media_head import MediaRefused
from yatt.adapters.inputs.video_files import FrameList, NamedFrame, refuse_other_files
from yatt.launch.resolve.media_entries import RowFault, entry_parts, named_source
from yatt.media.fetch import MediaSources
from yatt.media.head_processes import HeadProcesses
from yatt.models.pictures.videos import MOST_FPS, MOST_FRAMES, VideoTokens
from yatt.printable import value_in_words
from yatt.records.episode import MediaRef
from yatt.records.media import Grid, VideoFacts

KEYS = frozenset({"video", "path", "bytes", "fps", "sha256", "type"})
"""Of an object that is a video; the run file says all else for all videos."""

FIRST_BYTES = 64
FACTS = ".video-1"
"""End of the names of notes; another number where videos are decoded by other rules."""

_MOST_LOADED = 4
"""Videos that are in memory at the same time."""


class VideoReferences:
    """Makes references to videos. Safe for threads.

    Args:
        picture: makes the reference to a picture, from an entry and its place.
        root, store: `data.media_root` and `data.media_store`.
        most_pixels: largest frame.
    """

    def __init__(
        self,
        sources: MediaSources,
        picture: Callable[[Any, str], dict[str, Any]],
        root: str,
        store: str,
        most_pixels: int,
    ) -> None:
        self._sources, self._picture, self._root, self._store = sources, picture, root, store
        self._most_pixels, self._heads = most_pixels, HeadProcesses(most_pixels)
        self._room = threading.Semaphore(_MOST_LOADED)

    def close(self) -> None:
        """Ends the processes that it has started."""
        self._heads.close()

    def reference(self, entry: Any, place: str, tokens: VideoTokens) -> tuple[dict[str, Any], Grid]:
        """Returns the reference to a video, and its grid.

        Raises:
            RowFault: it cannot be used.
            ConfigError, OSError: as of pictures.
        """
        fps, frames = _rate_of(entry, place), _frames_of(entry)
        if frames is not None:
            made = self._listed(frames, place, fps or tokens.fps)
        else:
            if fps not in (0.0, tokens.fps):
                raise RowFault(
                    place,
                    f"asks for {fps:g} frames a second; media.video.fps ({tokens.fps:g}) is for all files",
                )
            made = self._file(entry, place)
        try:
            grid = tokens.grid_of_ref(MediaRef(**made))
        except ValueError as error:
            raise RowFault(place, f"cannot be shown: {error}") from error
        return made, grid

    def _file(self, entry: Any, place: str) -> dict[str, Any]:
        content, path, digest = entry_parts(entry, place, "video")
        name = ""
        try:
            with self._room:
                if content is None:
                    with named_source(path, self._root, self._sources) as (name, source):
                        refuse_other_files(source.read_at(0, FIRST_BYTES))
                        content = source.read_at(0, source.size_bytes)
                elif len(content) > MOST_BYTES:
                    raise MediaRefused(f"has more than {MOST_BYTES >> 20} MiB")
                refuse_other_files(content[:FIRST_BYTES])
                found = hashlib.sha256(content).hexdigest()
                facts = self._facts(content, found)
                if not name:
                    store_content(content, self._store)
        except MediaRefused as error:
            raise RowFault(place, str(error), path) from error
        if digest and found != digest.lower():
            raise RowFault(place, "is not the file that the row names: its SHA-256 differs", path)
        return {"path": name, "sha256": found, **msgspec.structs.asdict(facts)}

    def _facts(self, content: bytes, digest: str) -> VideoFacts:
        """Returns what a file has; decodes it once, and notes that in the store for later starts."""
        note = Path(self._store, f"{media_path('', digest)}{FACTS}")
        with contextlib.suppress(OSError, msgspec.DecodeError):
            known = msgspec.json.decode(note.read_bytes(), type=VideoFacts)
            if known.width * known.height <= self._most_pixels:
                return known
        found = self._heads.facts(content)
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(note, msgspec.json.encode(found))
        return found

    def _listed(self, frames: Sequence[Any], place: str, fps: float) -> dict[str, Any]:
        if not 2 <= len(frames) <= MOST_FRAMES:
            raise RowFault(place, f"has {len(frames)} frames; a video needs 2 to {MOST_FRAMES}")
        found = [self._picture(each, f"{place}: frame {number}") for number, each in enumerate(frames, 1)]
        sizes = [(each["width"], each["height"]) for each in found]
        if odd := next((index for index, size in enumerate(sizes) if size != sizes[0]), 0):
            (width, height), first = sizes[odd], f"{sizes[0][0]} x {sizes[0][1]}"
            raise RowFault(
                place,
                f"has frames of different sizes: number {odd + 1} has {width} x {height} "
                f"pixels, the first one {first}",
            )
        named = tuple(NamedFrame(each["path"], each["sha256"]) for each in found)
        content = msgspec.json.encode(FrameList(fps=fps, frames=named))
        width, height = sizes[0]
        return {
            "path": "",
            "sha256": store_content(content, self._store),
            "width": width,
            "height": height,
            "num_frames": len(found),
            "fps": fps,
        }


def _frames_of(entry: Any) -> Sequence[Any] | None:
    """The entries of a list of frames; None: it is no such list."""
    inner = entry.get("video") if isinstance(entry, dict) else entry
    return inner if isinstance(inner, list | tuple) else None


def _rate_of(entry: Any, place: str) -> float:
    """The frames a second that an entry names; 0: none.

    Raises:
        RowFault: it is no such number, or there are other settings.
    """
    if not isinstance(entry, dict):
        return 0.0
    given = {key: value for key, value in entry.items() if value is not None}
    if unknown := sorted(map(str, given.keys() - KEYS)):
        says = "a video may have video, path, bytes and fps; media.video says how frames are taken"
        raise RowFault(place, f"has '{unknown[0]}', and {says}")
    fps = given.get("fps", 0.0)
    is_number = isinstance(fps, int | float) and not isinstance(fps, bool) and math.isfinite(fps)
    if "fps" in given and not (is_number and 0.001 <= fps <= MOST_FPS):
        raise RowFault(
            place, f"has fps {value_in_words(fps)}; it needs a number between 0.001 and {MOST_FPS:g}"
        )
    return float(fps)
