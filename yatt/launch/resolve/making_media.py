"""Makes the rows of a data file with pictures or videos: each becomes a reference, and bytes become files
once.

Runs in the process that makes data files (`making_data`), before all else. verl's columns are read unchanged:
a list of paths, bytes, or objects with one of them. A reference has the file's digest and its size in pixels,
so no other process of the control plane reads a picture, and a resume sees that one has changed.
"""

import json
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from msgspec.structs import asdict

from yatt.adapters.inputs.data_rows import raw_rows
from yatt.adapters.inputs.media import store_picture
from yatt.adapters.inputs.media_head import MediaRefused, head_by_parts, refuse_pixels
from yatt.adapters.inputs.parquet_rows import parquet_batches, without_dictionaries
from yatt.errors import ConfigError, Finding
from yatt.launch.resolve.making_videos import VideoReferences
from yatt.launch.resolve.media_entries import RowFault, entry_parts, named_source
from yatt.media.fetch import MediaSources
from yatt.models.pictures.videos import video_tokens

WORKERS, WINDOW = 8, 64
STORE_S = 60.0
SHOWN_FAULTS = 3
T = TypeVar("T")
Reference = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaMaking:
    """What decides about the pictures of data rows.

    Attributes:
        image_key, video_key: columns.
        columns: those that the made rows have; None: all.
        root: `data.media_root`; empty: no row may name a path.
        store: folder of files that were bytes.
        most_pixels, most_per_prompt, storage_options: of `media`.
        model, video: the model's folder, and `media.video`.
    """

    image_key: str
    video_key: str
    columns: list[str] | None
    root: str
    store: str
    most_pixels: int
    most_per_prompt: int
    model: str
    video: dict[str, Any]
    storage_options: dict[str, Any] = field(default_factory=dict)


def write_with_references(source: Path, making: MediaMaking, target: Path) -> None:
    """Writes a data file with references in place of pictures, in the source's format.

    Other columns keep their types.

    Raises:
        ConfigError: the file or some rows cannot be used; names how many, and the first places of each kind.
        OSError: a transient error, or the file cannot be written.
    """
    faults: list[RowFault] = []
    write = _write_parquet if source.suffix == ".parquet" else _write_lines
    with target.open("xb") as file:
        write(source, making, file, faults)
        file.flush()
        os.fsync(file.fileno())
    if faults:
        raise _mistake_of(faults)


def _write_lines(source: Path, making: MediaMaking, file: BinaryIO, faults: list[RowFault]) -> None:
    keys = making.image_key, making.video_key
    rows = ((raw, raw.get(keys[0]), raw.get(keys[1]), place) for raw, place in raw_rows(source))
    for raw, found in _with_references(rows, making, faults):
        raw.update((key, references) for key, references in zip(keys, found, strict=True) if key in raw)
        file.write(json.dumps(raw).encode() + b"\n")


def _write_parquet(source: Path, making: MediaMaking, file: BinaryIO, faults: list[RowFault]) -> None:
    import pyarrow
    from pyarrow import parquet

    text, number = pyarrow.string(), pyarrow.int32()
    picture = {"path": text, "sha256": text, "width": number, "height": number}
    kinds = picture, picture | {"num_frames": number, "fps": pyarrow.float64()}
    keys = making.image_key, making.video_key
    columns = making.columns and {*making.columns, *keys}
    writer, first = None, 1
    for batch in parquet_batches(source, columns):
        values = (_values(batch, key) for key in keys)
        places = (f"{source}: row {number}" for number in range(first, first + len(batch)))
        rows = zip(range(len(batch)), *values, places, strict=True)
        found = [references for _, references in _with_references(rows, making, faults)]
        first += len(batch)
        if faults:
            continue
        arrays = {name: batch.column(name) for name in batch.schema.names if name not in keys}
        for key, kind, references in zip(keys, kinds, zip(*found, strict=True), strict=False):
            if key in batch.schema.names:
                arrays[key] = pyarrow.array(list(references), pyarrow.list_(pyarrow.struct(kind)))
        made = without_dictionaries(pyarrow.RecordBatch.from_pydict(arrays), source)
        writer = writer or parquet.ParquetWriter(file, made.schema)
        writer.write_batch(made)
    if writer is not None:
        writer.close()
    elif not faults:
        raise ConfigError(f"{source}: no rows. Write files with prompts.")


def _values(batch: Any, key: str) -> list[Any]:
    return list(batch.column(key).to_pylist()) if key in batch.schema.names else [None] * len(batch)


def _with_references(
    rows: Iterable[tuple[T, Any, Any, str]], making: MediaMaking, faults: list[RowFault]
) -> Iterator[tuple[T, tuple[list[Reference], list[Reference]]]]:
    """Yields rows with their references to pictures and to videos, in order; a few are under way. Those with
    faults are left out.

    Args:
        rows: of each what comes back, its pictures, its videos and its place.
    """
    waiting: deque[tuple[T, Future[tuple[list[Reference], list[Reference]]]]] = deque()
    maker, pool = _References(making), ThreadPoolExecutor(WORKERS)

    def oldest() -> Iterator[tuple[T, tuple[list[Reference], list[Reference]]]]:
        own, result = waiting.popleft()
        try:
            yield own, result.result()
        except RowFault as fault:
            faults.append(fault)

    try:
        for own, pictures, videos, place in rows:
            waiting.append((own, pool.submit(maker.references, pictures, videos, place)))
            if len(waiting) >= WINDOW:
                yield from oldest()
        while waiting:
            yield from oldest()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        maker.close()


def _mistake_of(faults: list[RowFault]) -> ConfigError:
    """The first faults of each kind."""
    kinds = Counter[str]()
    shown = list[Finding]()
    for fault in faults:
        kinds[fault.kind] += 1
        if kinds[fault.kind] <= SHOWN_FAULTS:
            shown.append(Finding(says=str(fault)))
    if left := len(faults) - len(shown):
        shown.append(Finding(says=f"and {left} more like these"))
    return ConfigError(heading=f"{len(faults)} rows have pictures that cannot be used:", findings=shown)


class _References:
    """Makes the references of rows. Safe for threads."""

    def __init__(self, making: MediaMaking) -> None:
        self._making = making
        self._sources = MediaSources(making.root, making.store, making.storage_options, STORE_S)
        self._videos = VideoReferences(
            self._sources, self._picture, making.root, making.store, making.most_pixels
        )

    def references(self, pictures: Any, videos: Any, place: str) -> tuple[list[Reference], list[Reference]]:
        """Returns the references to a row's pictures, and to its videos.

        Raises:
            RowFault: they cannot be used.
            ConfigError: the store of the pictures cannot.
            OSError: a picture cannot be written, or a transient error.
        """
        entries = _entries(pictures)
        self._refuse_many(len(entries), place, "pictures")
        places = (f"{place}: picture {number}" for number, _ in enumerate(entries, 1))
        found = [self._picture(entry, at) for entry, at in zip(entries, places, strict=True)]
        return found, self._video_references(_entries(videos), place, len(found))

    def close(self) -> None:
        """Ends what it has started."""
        self._videos.close()

    def _video_references(self, entries: list[Any], place: str, num_pictures: int) -> list[Reference]:
        making = self._making
        if not entries:
            return []
        try:
            tokens = video_tokens(making.model, **making.video)
        except ConfigError as error:
            raise RowFault(place, f"column '{making.video_key}' has videos; {error}") from error
        found, pairs = [], 0
        for number, entry in enumerate(entries, 1):
            made, grid = self._videos.reference(entry, f"{place}: video {number}", tokens)
            found.append(made)
            pairs += grid[0]
        self._refuse_many(num_pictures + pairs, place, "pictures and pairs of frames")
        return found

    def _refuse_many(self, number: int, place: str, what: str) -> None:
        if number > (most := self._making.most_per_prompt):
            raise RowFault(place, f"has {number} {what}, more than media.most_per_prompt ({most})")

    def _picture(self, entry: Any, place: str) -> Reference:
        """Returns the reference to a picture.

        Raises:
            RowFault: it cannot be used.
        """
        making = self._making
        content, path, digest = entry_parts(entry, place)
        try:
            if content is not None:
                stored = store_picture(content, making.store, making.most_pixels)
                return _without_video(asdict(stored))
            with named_source(path, making.root, self._sources) as (name, source):
                head = head_by_parts(source.read_at)
                refuse_pixels(head, making.most_pixels)
                found = source.content_digest()
            if digest and found != digest.lower():
                raise MediaRefused("is not the file that the row names: its SHA-256 differs")
        except MediaRefused as error:
            raise RowFault(place, str(error), "" if content is not None else path) from error
        width, height = head.shown_size
        return {"path": name, "sha256": found, "width": width, "height": height}


def _without_video(reference: Reference) -> Reference:
    return {key: value for key, value in reference.items() if key not in ("num_frames", "fps")}


def _entries(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
