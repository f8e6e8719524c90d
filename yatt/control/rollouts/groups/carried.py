"""A controller's part of a checkpoint: a binary file beside the shards, written and read as a stream.

The file is a sequence of records: a length (4 bytes, little-endian), then that many bytes of msgpack. The
first record is a header with the counters; the accepted groups follow, then the unfinished ones. Token ids
and log-probs stay packed. The manifest has the file's size and checksum. The number of trainer nodes may
change between writing and reading: then each reads all files and keeps its share.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import xxhash

from yatt.checkpoint.commit.writing import Streams
from yatt.checkpoint.local.local_first import Ranges
from yatt.control.rollouts.groups.groups import NodeState, PromptGroup
from yatt.core.samples.prompts import PromptNumbers, dealt_numbers
from yatt.errors import CheckpointError
from yatt.records.shards import Count, StateFile

VERSION = 6
READABLE = (4, 5, 6)
"""Versions that can be read: files of version 4 have no counters, those below 6 no numbers that are left."""

FETCH_BYTES = 16 << 20
"""Bytes that a reader requests in one call."""

_LENGTH_BYTES = 4


Step = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first record of a file. Who starts from a stranger's checkpoint takes `next_number` from it."""

    version: int = VERSION
    data: str = ""
    next_number: Count
    left: list[tuple[Count, Count, Step]] = []
    num_accepted: Count
    num_unfinished: Count
    counters: dict[int, dict[str, int]] = {}


_ENCODER = msgspec.msgpack.Encoder()
_HEADER, _GROUP = msgspec.msgpack.Decoder(Header), msgspec.msgpack.Decoder(PromptGroup)


@dataclass(frozen=True, slots=True)
class _Saved:
    """The groups of one file that are in a share, and the file's header with its numbers of groups."""

    header: Header
    accepted: list[PromptGroup]
    unfinished: list[PromptGroup]

    @property
    def left(self) -> tuple[range, ...]:
        """Numbers below the next one that the node was to open."""
        return tuple(range(*each) for each in self.header.left)


def frozen_state(state: NodeState) -> NodeState:
    """Returns a copy of the state that later changes of its groups do not affect. Tokens are shared."""
    return NodeState(
        data=state.data,
        next_number=state.next_number,
        left=state.left,
        accepted=[_frozen_group(group) for group in state.accepted],
        unfinished=[_frozen_group(group) for group in state.unfinished],
        counters={number: dict(counters) for number, counters in state.counters.items()},
    )


def write_state(store: Streams, path: str, state: NodeState) -> StateFile:
    """Writes the state, group by group. Blocks: not for an event loop; `state` must not change meanwhile."""

    def chunks() -> Iterator[bytes]:
        header = Header(
            data=state.data,
            next_number=state.next_number,
            left=[(numbers.start, numbers.stop, numbers.step) for numbers in state.left],
            num_accepted=len(state.accepted),
            num_unfinished=len(state.unfinished),
            counters=state.counters,
        )
        for record in (header, *state.accepted, *state.unfinished):
            data = _ENCODER.encode(record)
            yield len(data).to_bytes(_LENGTH_BYTES, "little") + data

    written = store.write_stream(path, chunks)
    return StateFile(path=path, size_bytes=written.size_bytes, checksum=written.checksum)


def read_state(store: Ranges, files: Sequence[StateFile], *, shard: int, num_shards: int) -> NodeState:
    """Reads the state of data shard `shard` of `num_shards`. Blocks: not for an event loop.

    If as many nodes read as saved, each reads its own file; else groups are dealt in turn over all files.

    Raises:
        CheckpointError: a file differs from the one that was saved.
        StoreUnreachable: the store does not respond.
    """
    if len(files) == num_shards:
        saved = _read(store, files[shard], first=0, step=1)
        return NodeState(
            data=saved.header.data,
            next_number=saved.header.next_number,
            left=saved.left,
            accepted=saved.accepted,
            unfinished=saved.unfinished,
            counters=saved.header.counters,
        )
    all_saved: list[_Saved] = []
    for file in files:
        before = [each.header for each in all_saved]
        skip = (sum(h.num_accepted for h in before), sum(h.num_unfinished for h in before))
        all_saved.append(_read(store, file, first=shard, step=num_shards, skip=skip))
    former = [
        PromptNumbers(number, len(files), saved.header.next_number, saved.left)
        for number, saved in enumerate(all_saved)
    ]
    numbers = dealt_numbers(former, shard=shard, num_shards=num_shards)
    return NodeState(
        data=all_saved[0].header.data,
        next_number=numbers.next,
        left=numbers.left,
        accepted=[group for saved in all_saved for group in saved.accepted],
        unfinished=[group for saved in all_saved for group in saved.unfinished],
        counters={
            number: counters
            for saved in all_saved
            for number, counters in saved.header.counters.items()
            if number % num_shards == shard
        },
    )


def _frozen_group(group: PromptGroup) -> PromptGroup:
    samples = [copy.copy(sample) for sample in group.samples]
    for sample in samples:
        for name in ("turns", "observations", "scores", "extras", "verdicts", "unmeasured"):
            setattr(sample, name, copy.copy(getattr(sample, name)))
    return msgspec.structs.replace(group, samples=samples)


def _read(store: Ranges, file: StateFile, *, first: int, step: int, skip: tuple[int, int] = (0, 0)) -> _Saved:
    """Reads every `step`-th group, counted from `first` over `skip` earlier groups and this file."""
    try:
        records = _records(store, file)
        header = _HEADER.decode(next(records))
        if header.version not in READABLE:
            raise CheckpointError(f"{file.path}: has version {header.version}, known are {READABLE}")
        accepted = [
            _GROUP.decode(data)
            for number, data in zip(range(skip[0], skip[0] + header.num_accepted), records, strict=False)
            if number % step == first
        ]
        unfinished = [
            _GROUP.decode(data)
            for number, data in enumerate(records, start=skip[1])
            if number % step == first
        ]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, StopIteration) as error:
        raise CheckpointError(f"{file.path} is not what was saved: {error}") from error
    return _Saved(header, accepted, unfinished)


def _records(store: Ranges, file: StateFile) -> Iterator[bytes]:
    """Yields the file's records. After the last one, size and checksum are compared with the saved ones.

    Raises:
        CheckpointError: they differ.
    """
    digest, waiting, begin = xxhash.xxh3_128(), bytearray(), 0
    while begin < file.size_bytes:
        end = min(begin + FETCH_BYTES, file.size_bytes)
        (data,) = store.read_ranges(file.path, [(begin, end)])
        if len(data) != end - begin:
            raise CheckpointError(f"{file.path} is not what was saved: it ends at byte {begin + len(data)}")
        digest.update(data)
        waiting += data
        begin = end
        yield from _whole_records(waiting)
    if waiting or digest.hexdigest() != file.checksum:
        raise CheckpointError(
            f"{file.path} is not what was saved: checksum {digest.hexdigest()[:12]} instead of "
            f"{file.checksum[:12]}"
        )


def _whole_records(waiting: bytearray) -> Iterator[bytes]:
    """Yields the complete records in `waiting` and removes them from it."""
    at = 0
    while at + _LENGTH_BYTES <= len(waiting):
        size = int.from_bytes(waiting[at : at + _LENGTH_BYTES], "little")
        if at + _LENGTH_BYTES + size > len(waiting):
            break
        yield bytes(waiting[at + _LENGTH_BYTES : at + _LENGTH_BYTES + size])
        at += _LENGTH_BYTES + size
    del waiting[:at]
