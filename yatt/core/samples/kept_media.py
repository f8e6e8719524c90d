"""Decides which prepared media a node keeps. Pure.

The least recently used file goes first, and never one that an order needs.

The media process makes files and removes them; this says when. Of each file there is a digest and a size. An
*order* holds the files that it names from when it is begun until it is answered; a file that any order holds
is not evicted, nor one that an engine is about to open. Room is reserved before a file is written, so that
files being written count. There is no clock and no I/O.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field


class NoRoom(Exception):
    """A file has no room.

    Attributes:
        is_final: not even if all other orders were answered: the limit is too small for this order.
    """

    def __init__(self, *, is_final: bool) -> None:
        super().__init__("no room")
        self.is_final = is_final


@dataclass(slots=True)
class MediaCache:
    """The files of one node.

    Attributes:
        limit_bytes: most bytes of all files, also of those that are being written.
    """

    limit_bytes: int
    _sizes: OrderedDict[str, int] = field(default_factory=OrderedDict)  # the least recently used first
    _reserved: dict[str, int] = field(default_factory=dict)
    _orders: dict[int, set[str]] = field(default_factory=dict)

    @property
    def used_bytes(self) -> int:
        """Bytes of kept files and of reservations."""
        return sum(self._sizes.values()) + sum(self._reserved.values())

    @property
    def kept(self) -> tuple[str, ...]:
        """Digests of kept files, the least recently used first."""
        return tuple(self._sizes)

    def begin_order(self, order: int) -> None:
        """Begins an order, which holds nothing yet."""
        self._orders[order] = set()

    def end_order(self, order: int) -> None:
        """Ends an order: it was answered, and holds nothing any more."""
        self._orders.pop(order, None)

    def hold_file(self, order: int, digest: str) -> bool:
        """Makes an order hold a file, and the file the most recently used; returns whether it is kept.

        An order that has ended holds nothing.
        """
        if digest not in self._sizes:
            return False
        self._sizes.move_to_end(digest)
        if order in self._orders:
            self._orders[order].add(digest)
        return True

    def reserve_room(
        self, order: int, digest: str, size: int, is_held: Callable[[str], bool]
    ) -> tuple[str, ...]:
        """Reserves room for a file that is not kept, which the order holds from now on.

        Args:
            is_held: whether an engine is about to open a file.

        Returns:
            Files to remove before it is written; they are kept no more.

        Raises:
            NoRoom: other orders and engines hold too much, or this one; then nothing has changed.
        """
        if digest in self._sizes or digest in self._reserved:
            raise ValueError("a file is written once")
        if order not in self._orders:
            raise NoRoom(is_final=False)
        victims, missing = [], self.used_bytes + size - self.limit_bytes
        for each in self._evictable():
            if missing <= 0:
                break
            if is_held(each):
                continue
            victims.append(each)
            missing -= self._sizes[each]
        if missing > 0:
            own = self._orders[order]
            held = sum(self._sizes.get(d, self._reserved.get(d, 0)) for d in own)
            raise NoRoom(is_final=held + size > self.limit_bytes)
        for each in victims:
            del self._sizes[each]
        self._reserved[digest] = size
        self._orders[order].add(digest)
        return tuple(victims)

    def written_file(self, digest: str) -> None:
        """Records that a file was written: it is kept, and the most recently used."""
        self._sizes[digest] = self._reserved.pop(digest)

    def drop_room(self, digest: str) -> None:
        """Gives up a reservation: the file was not written."""
        del self._reserved[digest]
        for held in self._orders.values():
            held.discard(digest)

    def adopt_file(self, digest: str, size: int) -> bool:
        """Takes over a file of an earlier process, if it has room; returns whether it is kept."""
        if self.used_bytes + size > self.limit_bytes:
            return False
        self._sizes[digest] = size
        return True

    def forget_file(self, digest: str) -> None:
        """Records that a kept file has vanished."""
        self._sizes.pop(digest, None)
        for held in self._orders.values():
            held.discard(digest)

    def lower_limit(self) -> None:
        """Lowers the limit to what is kept and reserved now, because the filesystem takes no more."""
        self.limit_bytes = min(self.limit_bytes, self.used_bytes)

    def _evictable(self) -> list[str]:
        held = set().union(*self._orders.values())
        return [digest for digest in self._sizes if digest not in held]
