"""Host copies without a trainer, and a look at what an upload of them wrote."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from yatt.adapters.node_local.host_segment import AREAS, SegmentWriter, Stamp, plan_path, segment_path
from yatt.checkpoint.commit.pieces import check_piece
from yatt.checkpoint.store.store import Store
from yatt.records.message import PlannedPiece, SavePlan, ShardFile

FILES, PIECES, BYTES = 3, 2, 1000


class Trainer:
    """A rank's host copy: each byte of a version is the version's number."""

    def __init__(self, folder: Path, rank: int = 0, attempt: int = 1) -> None:
        self.stem, self._attempt = folder / f"rank-{rank:05d}", attempt
        places = iter(range(FILES * PIECES))
        files = tuple(tuple(self._piece(next(places)) for _ in range(PIECES)) for _ in range(FILES))
        self.plan = SavePlan(rank=rank, files=files)
        plan_path(self.stem).write_bytes(msgspec.msgpack.encode(self.plan))
        self._segments = {a: SegmentWriter(segment_path(self.stem, a), 3 * BYTES) for a in AREAS}
        self.becomes(1)

    def _piece(self, place: int) -> PlannedPiece:
        return PlannedPiece(
            key=f"main.p{place}", dtype="uint8", global_shape=(BYTES,), global_offset=(0,),
            local_shape=(BYTES,), area=("weights", "state")[place % 2], at=place // 2 * BYTES,
            size_bytes=BYTES,
        )  # fmt: skip

    def becomes(self, version: int, areas: tuple[str, ...] = AREAS) -> None:
        for segment in (self._segments[area] for area in areas):
            segment.invalidate()
            segment.data[:] = bytes([version]) * len(segment.data)
            segment.complete(Stamp(self._attempt, version))


def versions_in(store: Store, files: Iterable[ShardFile]) -> set[int]:
    """Checks every piece; gives the versions of all bytes."""
    found: set[int] = set()
    for file in files:
        assert store.size(file.path) == file.size_bytes
        for piece in file.tensors:
            (data,) = store.read_ranges(file.path, [(piece.begin, piece.begin + piece.size_bytes)])
            check_piece(file, piece, data)
            found |= set(data)
    return found
