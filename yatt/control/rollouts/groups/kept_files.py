"""The files of kept prompt groups in the run folder: their records, and what an attempt may use of them.

A file begins with a line that names its format and with a record of its `Origin`. Then there is one record
per group: its number, the number of scores that it has, and the group with its counters in the encoding of
checkpoints (`yatt.control.rollouts.groups.carried`). Everything here blocks: not for an event loop.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from yatt.adapters.files.record_file import RecordPlace, RecordReader, encoded_record
from yatt.control.rollouts.groups.groups import PromptGroup
from yatt.core.phases import kept_groups as rules
from yatt.core.phases.kept_groups import KeptFile, KeptRecord, Origin, Share, kept_file

KIND = b"yatt kept groups "
LINE = KIND + b"1\n"
MOST_ORIGIN_BYTES = 1 << 16


class KeptGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt group whose samples are complete, and its counters for metrics."""

    group: PromptGroup
    counters: dict[str, int] = {}

    @property
    def num_scores(self) -> int:
        """Number of scores that its samples have, or have a reason not to have."""
        return sum(len(sample.scores) + len(sample.unmeasured) for sample in self.group.samples)


_ENCODER = msgspec.msgpack.Encoder()
_ORIGIN, _KEPT = msgspec.msgpack.Decoder(Origin), msgspec.msgpack.Decoder(KeptGroup)


@dataclass(slots=True)
class Found:
    """Kept groups by prompt number; names of files that were passed over, and why."""

    groups: dict[int, KeptGroup] = field(default_factory=dict)
    passed_over: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Search:
    """What a controller looks for. `is_over` ends the search: nobody waits for it any more."""

    folder: Path
    origin: Origin
    share: Share
    attempt: int
    is_over: threading.Event = field(default_factory=threading.Event)


def head_of(origin: Origin) -> bytes:
    """Returns the bytes with which a file begins."""
    return LINE + encoded_record(0, 0, _ENCODER.encode(origin))


def encode_group(kept: KeptGroup) -> bytes:
    """Returns the data of a group's record. Texts are left out: they are decoded again from tokens."""
    samples = [msgspec.structs.replace(sample, text="") for sample in kept.group.samples]
    group = msgspec.structs.replace(kept.group, samples=samples)
    return _ENCODER.encode(msgspec.structs.replace(kept, group=group))


def find_groups(search: Search) -> Found:
    """Returns the groups that other attempts have kept and that this one can use. Nothing in a file raises.

    Raises:
        OSError: the folder cannot be listed.
    """
    found = Found()
    share, records, places = search.share, list[KeptRecord](), dict[KeptRecord, RecordPlace]()
    for file in kept_files(search.folder):
        is_candidate = rules.may_hold_mine(
            file,
            iteration=search.origin.iteration,
            attempt=search.attempt,
            shard=share.shard,
            num_shards=share.num_shards,
        )
        if not is_candidate or search.is_over.is_set():
            continue
        try:
            for place in (each for each in _places(search, file) if share.has(each.key)):
                record = KeptRecord(number=place.key, num_scores=place.rank, file=file, begin=place.begin)
                places[record] = place
                records.append(record)
        except (OSError, _Unusable) as error:
            found.passed_over.append((file.name, str(error)))
    for number, same in rules.by_preference(records, share).items():
        for record in same:
            if search.is_over.is_set() or _read(search, record, places[record], found):
                break
            found.passed_over.append((record.file.name, f"its record of prompt {number} is damaged"))
    return found


class _Unusable(Exception):
    """The reason why no group of a file can be used."""


def _places(search: Search, file: KeptFile) -> Iterator[RecordPlace]:
    with RecordReader(search.folder / file.name, len(LINE)) as reader:
        if reader.line != LINE:
            is_of_other_version = reader.line.startswith(KIND)
            raise _Unusable(
                "it has the format of another version" if is_of_other_version else "it has another format"
            )
        places = reader.places()
        first = next(places, None)
        data = reader.data(first) if first is not None and first.size_bytes <= MOST_ORIGIN_BYTES else None
        try:
            origin = _ORIGIN.decode(data or b"")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _Unusable("its first record is damaged") from error
        if reason := rules.origin_fault(origin, search.origin):
            raise _Unusable(reason)
        yield from places


def _read(search: Search, record: KeptRecord, place: RecordPlace, found: Found) -> bool:
    """Adds the group of one record; returns whether it is whole."""
    try:
        with RecordReader(search.folder / record.file.name, len(LINE)) as reader:
            kept = _KEPT.decode(reader.data(place) or b"")
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    group = kept.group
    if group.number != record.number or not group.is_sampled() or group.failure() is not None:
        return False
    found.groups[record.number] = kept
    return True


def kept_files(folder: Path) -> list[KeptFile]:
    """Returns the files in the folder, by their names; none if there is no folder.

    Raises:
        OSError: it cannot be listed.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(file for name in names if (file := kept_file(name)) is not None)


def remove_files(folder: Path, chosen: Callable[[list[KeptFile]], Iterable[KeptFile]]) -> None:
    """Removes files; those that cannot be removed now are removed with later ones."""
    try:
        for file in chosen(kept_files(folder)):
            (folder / file.name).unlink(missing_ok=True)
    except OSError:
        return
