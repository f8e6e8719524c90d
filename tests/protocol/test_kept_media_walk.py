"""Kept media: every sequence of orders, reservations, writes, failures and lost files, of four small files.

In all of it the files never exceed the limit, no file that an order needs is evicted, the least recently used
goes first and no more than needed, and a refusal is true. Planted mistakes show that the walk sees them.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from yatt.core.samples.kept_media import MediaCache, NoRoom

SIZES = {"a": 1, "b": 1, "c": 2, "d": 3}
ORDERS = (1, 2)
LIMIT = 4
IsHeld = Callable[[str], bool]


@dataclass
class World:
    """The rules' own view, and what a shell would know."""

    cache: MediaCache
    files: dict[str, int] = field(default_factory=dict)
    recent: list[str] = field(default_factory=list)
    needs: dict[int, set[str]] = field(default_factory=dict)
    writing: dict[str, int] = field(default_factory=dict)  # digest: order
    has_lowered: bool = False
    opening: set[str] = field(default_factory=set)
    """Files that an engine is about to open."""

    def key(self) -> tuple:
        needs = tuple(sorted((order, tuple(sorted(held))) for order, held in self.needs.items()))
        return (
            tuple(self.recent), needs, tuple(sorted(self.writing.items())), self.cache.limit_bytes,
            self.has_lowered, tuple(sorted(self.opening)),
        )  # fmt: skip

    def used(self) -> int:
        return sum(self.files.values()) + sum(SIZES[digest] for digest in self.writing)

    def held(self) -> set[str]:
        return self.opening.union(*self.needs.values())


def begin(world: World, order: int) -> None:
    world.cache.begin_order(order)
    world.needs[order] = set()


def end(world: World, order: int) -> None:
    world.cache.end_order(order)
    del world.needs[order]


def use(world: World, order: int, digest: str) -> None:
    """What the media process does for one item of an order."""
    if world.cache.hold_file(order, digest):
        assert digest in world.files, "a file that is not there was promised"
        world.recent.remove(digest)
        world.recent.append(digest)
        world.needs[order].add(digest)
        return
    assert digest not in world.files, "a file that is there is made again"
    if digest in world.writing:
        return
    size, before = SIZES[digest], world.used()
    free = [each for each in world.recent if each not in world.held()]
    try:
        victims = world.cache.reserve_room(order, digest, size, world.opening.__contains__)
    except NoRoom as refusal:
        others = world.used() - sum(SIZES[each] for each in free)
        assert others + size > world.cache.limit_bytes, "refused, though there is room"
        own = sum(SIZES[each] for each in world.needs[order])
        assert refusal.is_final == (own + size > world.cache.limit_bytes), "the refusal names the wrong cause"
        return
    for victim in victims:
        assert victim in world.files, "a file that is not there is removed"
        assert victim not in world.held(), "a file that an order or an engine needs is evicted"
        world.recent.remove(victim)
        del world.files[victim]
    assert list(victims) == free[: len(victims)], "not the least recently used"
    without_last = before + size - sum(SIZES[each] for each in victims[:-1])
    assert not victims or without_last > world.cache.limit_bytes, "evicted more than needed"
    world.writing[digest] = order
    world.needs[order].add(digest)


def wrote(world: World, digest: str) -> None:
    world.cache.written_file(digest)
    del world.writing[digest]
    world.files[digest] = SIZES[digest]
    world.recent.append(digest)


def failed(world: World, digest: str) -> None:
    world.cache.drop_room(digest)
    del world.writing[digest]
    for needed in world.needs.values():
        needed.discard(digest)


def full(world: World, digest: str) -> None:
    """The filesystem takes no more: the write fails, and the limit is lowered."""
    failed(world, digest)
    world.cache.lower_limit()
    assert world.cache.limit_bytes == world.used(), "it takes what is there, and no more"
    world.has_lowered = True


def vanish(world: World, digest: str) -> None:
    world.cache.forget_file(digest)
    world.recent.remove(digest)
    del world.files[digest]
    world.opening.discard(digest)
    for needed in world.needs.values():
        needed.discard(digest)


def opens(world: World, digest: str) -> None:
    """An engine is about to open a file, or has opened it."""
    world.opening ^= {digest}


def moves(world: World) -> Iterator[tuple]:
    for order in ORDERS:
        if order in world.needs:
            if order not in world.writing.values():
                yield end, order
            yield from ((use, order, digest) for digest in SIZES)
        else:
            yield begin, order
    for digest in world.writing:
        yield wrote, digest
        yield failed, digest
        if not world.has_lowered:
            yield full, digest
    if world.files:
        yield vanish, min(world.files)
    for digest in {*list(world.files)[:1], *world.opening}:
        yield opens, digest


def walk(kind: type[MediaCache]) -> int:
    """Goes through all states; returns their number."""
    layer, seen = {(): World(kind(LIMIT))}, set()
    while layer:
        following = {}
        for world in layer.values():
            for move, *arguments in moves(world):
                after = copy.deepcopy(world)
                move(after, *arguments)
                assert after.used() == after.cache.used_bytes <= max(LIMIT, after.cache.limit_bytes)
                assert after.used() <= after.cache.limit_bytes, "over the limit"
                assert tuple(after.recent) == after.cache.kept
                if after.key() not in seen:
                    seen.add(after.key())
                    following[after.key()] = after
        layer = following
    return len(seen)


def test_every_sequence_keeps_the_limit_and_what_orders_need() -> None:
    assert walk(MediaCache) > 1500


class EvictsHeld(MediaCache):
    def _evictable(self) -> list[str]:
        return list(self._sizes)


class EvictsNewest(MediaCache):
    def _evictable(self) -> list[str]:
        return super()._evictable()[::-1]


class ForgetsReservations(MediaCache):
    @property
    def used_bytes(self) -> int:
        return sum(self._sizes.values())


class IgnoresUse(MediaCache):
    def hold_file(self, order: int, digest: str) -> bool:
        if digest not in self._sizes:
            return False
        self._orders[order].add(digest)
        return True


class HoldsNothing(MediaCache):
    def hold_file(self, order: int, digest: str) -> bool:
        found = super().hold_file(order, digest)
        self._orders[order].discard(digest)
        return found


class KeepsHolding(MediaCache):
    def end_order(self, order: int) -> None:
        self._orders[order + 10] = self._orders.pop(order)


class EvictsWhatIsOpened(MediaCache):
    def reserve_room(self, order: int, digest: str, size: int, is_held: IsHeld) -> tuple[str, ...]:
        return super().reserve_room(order, digest, size, lambda _: False)


class EvictsAll(MediaCache):
    def reserve_room(self, order: int, digest: str, size: int, is_held: IsHeld) -> tuple[str, ...]:
        victims = super().reserve_room(order, digest, size, is_held)
        more = self._evictable() if victims else []
        for each in more:
            del self._sizes[each]
        return (*victims, *more)


class AlwaysFinal(MediaCache):
    def reserve_room(self, order: int, digest: str, size: int, is_held: IsHeld) -> tuple[str, ...]:
        try:
            return super().reserve_room(order, digest, size, is_held)
        except NoRoom:
            raise NoRoom(is_final=True) from None


class LowersNothing(MediaCache):
    def lower_limit(self) -> None:
        pass


@pytest.mark.parametrize(
    "planted",
    [EvictsHeld, EvictsNewest, ForgetsReservations, IgnoresUse, HoldsNothing, KeepsHolding,
     EvictsWhatIsOpened, EvictsAll, AlwaysFinal, LowersNothing],
)  # fmt: skip
def test_the_walk_sees_a_planted_mistake(planted: type[MediaCache]) -> None:
    with pytest.raises(AssertionError):
        walk(planted)


def test_files_of_an_earlier_process_are_taken_over_while_there_is_room() -> None:
    cache, is_opened = MediaCache(3), frozenset[str]().__contains__
    assert [cache.adopt_file(name, SIZES[name]) for name in "abc"] == [True, True, False]
    cache.begin_order(1)
    assert cache.reserve_room(1, "c", 2, is_opened) == ("a",), "those are evicted like others"
    with pytest.raises(ValueError, match="once"):
        cache.reserve_room(1, "c", 2, is_opened)
    with pytest.raises(NoRoom):
        cache.reserve_room(9, "d", 1, is_opened)
