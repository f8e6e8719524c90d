"""Makes the rows of a data file with pictures: each picture becomes a reference, and bytes become files once.

Runs in the process that makes data files (`making_data`), before all else. verl's columns are read unchanged:
a list of paths, bytes, or objects with one of them. A reference has the file's digest and its size in pixels,
so no other process of the control plane reads a picture, and a resume sees that one has changed.
"""

import base64
import binascii
import errno
import json
import os
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from msgspec.structs import asdict

from yatt.adapters.files.patience import is_passing
from yatt.adapters.inputs.data_rows import raw_rows
from yatt.adapters.inputs.media import store_picture
from yatt.adapters.inputs.media_head import MediaRefused, head_by_parts, refuse_pixels
from yatt.adapters.inputs.parquet_rows import parquet_batches, without_dictionaries
from yatt.errors import ConfigError, StoreUnreachable
from yatt.media.fetch import MediaSources
from yatt.printable import printable, value_in_words
from yatt.records.media import SHOWN_CHARACTERS, MediaItem

WORKERS, WINDOW = 8, 64
STORE_S = 60.0
SHOWN_FAULTS = 3
MOST_PATH = 4096
T = TypeVar("T")
_INLINE = "data:image/"


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaMaking:
    """What decides about the pictures of data rows.

    Attributes:
        image_key, video_key: columns.
        columns: those that the made rows have; None: all.
        root: `data.media_root`; empty: no row may name a path.
        store: folder of files that were bytes.
        most_pixels, most_per_prompt, storage_options: of `media`.
    """

    image_key: str
    video_key: str
    columns: list[str] | None
    root: str
    store: str
    most_pixels: int
    most_per_prompt: int
    storage_options: dict[str, Any] = field(default_factory=dict)


class _Fault(Exception):
    """A row whose pictures cannot be used.

    Args:
        place: file, row and picture.
        name: of the picture's file.
        says: goes on with the sentence; its first words are the kind of fault.
    """

    def __init__(self, place: str, says: str, name: str = "") -> None:
        super().__init__(f"{place}: {printable(name[:SHOWN_CHARACTERS])}{name and ' '}{says}")
        self.kind = re.sub(r"\d+", "", " ".join(says.split()[:4]))


def write_with_references(source: Path, making: MediaMaking, target: Path) -> None:
    """Writes a data file with references in place of pictures, in the source's format.

    Other columns keep their types.

    Raises:
        ConfigError: the file or some rows cannot be used; names how many, and the first places of each kind.
        OSError: a transient error, or the file cannot be written.
    """
    faults: list[_Fault] = []
    write = _write_parquet if source.suffix == ".parquet" else _write_lines
    with target.open("xb") as file:
        write(source, making, file, faults)
        file.flush()
        os.fsync(file.fileno())
    if faults:
        raise ConfigError(_listed(faults))


def _write_lines(source: Path, making: MediaMaking, file: BinaryIO, faults: list[_Fault]) -> None:
    image_key, video_key = making.image_key, making.video_key
    rows = ((raw, raw.get(image_key), raw.get(video_key), place) for raw, place in raw_rows(source))
    for raw, references in _with_references(rows, making, faults):
        raw.pop(video_key, None)
        if image_key in raw:
            raw[image_key] = references
        file.write(json.dumps(raw).encode() + b"\n")


def _write_parquet(source: Path, making: MediaMaking, file: BinaryIO, faults: list[_Fault]) -> None:
    import pyarrow
    from pyarrow import parquet

    numbers = {"width": pyarrow.int32(), "height": pyarrow.int32()}
    kind = pyarrow.list_(pyarrow.struct({"path": pyarrow.string(), "sha256": pyarrow.string(), **numbers}))
    columns = making.columns and {*making.columns, making.image_key, making.video_key}
    writer, first = None, 1
    for batch in parquet_batches(source, columns):
        pictures, videos = (_values(batch, key) for key in (making.image_key, making.video_key))
        places = (f"{source}: row {number}" for number in range(first, first + len(batch)))
        rows = zip(range(len(batch)), pictures, videos, places, strict=True)
        found = [references for _, references in _with_references(rows, making, faults)]
        first += len(batch)
        if faults:
            continue
        others = [name for name in batch.schema.names if name not in (making.image_key, making.video_key)]
        arrays = {name: batch.column(name) for name in others}
        if making.image_key in batch.schema.names:
            arrays[making.image_key] = pyarrow.array(found, kind)
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
    rows: Iterable[tuple[T, Any, Any, str]], making: MediaMaking, faults: list[_Fault]
) -> Iterator[tuple[T, list[dict[str, Any]]]]:
    """Yields rows with their references, in order; a few are under way. Those with faults are left out.

    Args:
        rows: of each what comes back, its pictures, its videos and its place.
    """
    waiting: deque[tuple[T, Future[list[dict[str, Any]]]]] = deque()
    sources = MediaSources(making.root, making.store, making.storage_options, STORE_S)
    pool = ThreadPoolExecutor(WORKERS)

    def oldest() -> Iterator[tuple[T, list[dict[str, Any]]]]:
        own, result = waiting.popleft()
        try:
            yield own, result.result()
        except _Fault as fault:
            faults.append(fault)

    try:
        for own, pictures, videos, place in rows:
            waiting.append((own, pool.submit(_references, pictures, videos, place, making, sources)))
            if len(waiting) >= WINDOW:
                yield from oldest()
        while waiting:
            yield from oldest()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _listed(faults: list[_Fault]) -> str:
    """The first faults of each kind, in one message."""
    kinds = Counter[str]()
    shown = []
    for fault in faults:
        kinds[fault.kind] += 1
        if kinds[fault.kind] <= SHOWN_FAULTS:
            shown.append(str(fault))
    left = len(faults) - len(shown)
    more = f"\n  and {left} more like these" if left else ""
    return f"{len(faults)} rows have pictures that cannot be used:\n  " + "\n  ".join(shown) + more


def _references(
    pictures: Any, videos: Any, place: str, making: MediaMaking, sources: MediaSources
) -> list[dict[str, Any]]:
    """Returns the references to a row's pictures.

    Raises:
        _Fault: its pictures cannot be used.
        ConfigError: the store of the pictures cannot.
        OSError: a picture cannot be written, or a transient error.
    """
    if videos:
        raise _Fault(place, f"column '{making.video_key}' has videos, which are not taken yet")
    entries = _entries(pictures)
    if len(entries) > making.most_per_prompt:
        raise _Fault(
            place,
            f"has {len(entries)} pictures, more than media.most_per_prompt ({making.most_per_prompt})",
        )
    places = (f"{place}: picture {number}" for number, _ in enumerate(entries, 1))
    return [_reference(entry, at, making, sources) for entry, at in zip(entries, places, strict=True)]


def _entries(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


# ---- one picture --------------------------------------------------------------------------------


def _reference(entry: Any, place: str, making: MediaMaking, sources: MediaSources) -> dict[str, Any]:
    content, path, digest = _parts(entry, place)
    try:
        if content is not None:
            found: dict[str, Any] = asdict(store_picture(content, making.store, making.most_pixels))
            return found
        return _named(path, digest, making, sources)
    except MediaRefused as error:
        raise _Fault(place, str(error), "" if content is not None else path) from error


def _parts(entry: Any, place: str) -> tuple[bytes | None, str, str]:
    """Returns an entry's bytes, else its path and the digest that it names."""
    if isinstance(entry, dict):
        inner = entry.get("bytes")
        inner = entry.get("image") if inner is None else inner
        if inner is None:
            path, digest = entry.get("path"), entry.get("sha256") or ""
            if isinstance(path, str) and path and isinstance(digest, str):
                return None, path, digest
            inner = entry  # refused below
    else:
        inner = entry
    if isinstance(inner, bytes | bytearray):
        return bytes(inner), "", ""
    if isinstance(inner, str) and inner.startswith(_INLINE):
        return _decoded(inner, place), "", ""
    if isinstance(inner, str) and inner:
        return None, inner.removeprefix("file://"), ""
    says = "is neither a path nor bytes nor an object with one of them"
    raise _Fault(place, says, value_in_words(inner))


def _decoded(text: str, place: str) -> bytes:
    _, comma, content = text.partition(";base64,")
    try:
        if not comma:
            raise ValueError("no base64")
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _Fault(place, "cannot be read as data:image/...;base64,...") from error


def _named(path: str, digest: str, making: MediaMaking, sources: MediaSources) -> dict[str, Any]:
    """Returns the reference to a file below `data.media_root`."""
    name = _below_root(path, making.root)
    try:
        with sources.opened_source(MediaItem(name)) as source:
            head = head_by_parts(source.read_at)
            refuse_pixels(head, making.most_pixels)
            found = source.content_digest()
    except (FileNotFoundError, NotADirectoryError):
        raise MediaRefused("does not exist below data.media_root") from None
    except OSError as error:
        if is_passing(error):
            raise
        raise MediaRefused(f"cannot be read ({error.strerror})") from None
    except StoreUnreachable as error:
        away = OSError(errno.EHOSTUNREACH, str(error)) if error.is_passing else None
        raise ConfigError(f"data.media_root: {making.root} cannot be read: {error}") from away
    if digest and found != digest.lower():
        raise MediaRefused("is not the file that the row names: its SHA-256 differs")
    width, height = head.shown_size
    return {"path": name, "sha256": found, "width": width, "height": height}


def _below_root(path: str, root: str) -> str:
    """Returns the path of a file in `data.media_root`.

    Raises:
        MediaRefused: it cannot be a path of a file there.
    """
    if "://" in path:
        raise MediaRefused("is an address: rows name files only, or have their bytes; fetch it first")
    if len(path) > MOST_PATH:
        raise MediaRefused("is too long for a path; write pictures in base64 as data:image/png;base64,...")
    if os.path.isabs(path):  # the root, or a folder above it, may be a link
        path = os.path.relpath(os.path.realpath(path), os.path.realpath(root))
    return os.path.normpath(path)
