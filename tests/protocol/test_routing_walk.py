"""Requests between nodes whose engines come and go: every order of messages and moves, up to a depth.

From each world two ends are tried. If everything is delivered and answered, and an engine is awake, each
request is over, once. After an abort it is over without another answer of an engine, and while all sleep.
"""

import asyncio
import random
import sys
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from tests.protocol.routing_world import ABORTED, STOPPED, Kinds, World
from tests.seeds import seed_of
from yatt.control.gpus.engines import LocalEngines
from yatt.control.rollouts.rooms import RoomAnnouncer
from yatt.control.rollouts.router import Router
from yatt.core.gpus.placement import genrm_role
from yatt.records.message import MOVED, Completed

Schedule = tuple[tuple[str, Any], ...]
NAMES = ("x:a", "y:b", "y:c")
ABORT = ("abort", None)
JUDGE = genrm_role("g0")


@dataclass
class Walk:
    """Visits worlds; each is built anew from its schedule.

    Args:
        extra: further moves, each at most once in a schedule.
        most_moves: number of times that engines may be woken, drained, and so on.
    """

    kinds: Kinds
    names: tuple[str, ...]
    extra: tuple[tuple[str, Any], ...] = ()
    depth: int = 9
    most_moves: int = 5
    seen: dict[str, int] = field(default_factory=dict)
    """How many more moves were walked from each world."""

    async def run(self) -> "Walk":
        todo: list[Schedule] = [()]
        while todo:
            todo += await self._visit(todo.pop())
        return self

    async def _visit(self, schedule: Schedule) -> list[Schedule]:
        """Walks on from the end of this schedule as everything comes to its end: one world shows that all
        worlds on this way do. Returns the schedules that turn off from it."""
        world, others, is_new = World(self.kinds, self.names), [], False
        try:
            await world.settle()
            for move in schedule:
                await world.move(*move)
            while True:
                check(world, schedule)
                used = frozenset(move for move in schedule if move in self.extra)
                num_moves = sum(move[0] in ("wake", "drain", "slept") for move in schedule)
                key, left = f"{world.key()} {sorted(used)} {num_moves}", self.depth - len(schedule)
                if self.seen.get(key, -1) >= left:
                    break
                is_new |= key not in self.seen
                self.seen[key] = left
                nexts = self._nexts(world, used, num_moves) if left else []
                towards = to_the_end(world, is_aborted=ABORT in used)
                others += [(*schedule, move) for move in nexts if move != towards]
                if towards not in nexts:
                    break
                await world.move(*towards)
                schedule = (*schedule, towards)
            if is_new:
                await ended(world, schedule, is_aborted=ABORT in used)
            return others
        finally:
            await world.close()

    def _nexts(self, world: World, used: frozenset[Any], num_moves: int) -> list[tuple[str, Any]]:
        is_free = num_moves < self.most_moves
        found = [move for move in world.moves() if is_free or move[0] in ("deliver", "answer")]
        for kind, what in self.extra:
            is_there = what is None or (what not in world.lost and (kind != "die" or what in world.awake))
            if (kind, what) not in used and is_there:
                found.append((kind, what))
        return found


def check(world: World, schedule: Schedule) -> None:
    twice = [name for name, num in world.running().items() if num > 1]
    assert not twice, f"{twice} run in two engines: {schedule}"
    assert all(len(results) <= 1 for results in world.results.values()), f"answered twice: {schedule}"


async def ended(world: World, schedule: Schedule, *, is_aborted: bool) -> None:
    """Lets everything under way come to its end."""
    while (move := to_the_end(world, is_aborted=is_aborted)) is not None:
        await world.move(*move)
    for name, results in world.results.items():
        assert len(results) == 1, f"{name} waits for ever: {schedule}"
        fine = {STOPPED, ABORTED, MOVED} if is_aborted else {STOPPED}
        is_lost = len(world.lost) == len(world.sides)
        assert results[0] in fine or is_lost, f"{name}: {results[0]}: {schedule}"


def to_the_end(world: World, *, is_aborted: bool) -> tuple[str, Any] | None:
    """The next move of those that end what is under way: engines that fall asleep do so, one wakes if none is
    awake, and everything is delivered and answered; after an abort it is delivered only."""
    there = [index for index in world.sides if index not in world.lost]
    if leaving := [index for index in there if world.places[index].stage == "leaving"]:
        return "slept", leaving[0]
    if there and not (world.awake or is_aborted):
        return "wake", there[0]
    kinds = ("deliver",) if is_aborted else ("deliver", "answer")
    return next((move for move in world.moves() if move[0] in kinds), None)


def walk(kinds: Kinds | None = None, names: tuple[str, ...] = NAMES[:2], **limits: Any) -> Walk:
    return asyncio.run(Walk(kinds or Kinds(), names, **limits).run())


def test_no_order_of_messages_and_moves_loses_a_request() -> None:
    assert len(walk(depth=8).seen) > 500


def test_an_aborted_request_is_over_without_an_engine_that_ends_it() -> None:
    assert len(walk(depth=7, extra=(ABORT,)).seen) > 500


def test_a_lost_node_costs_a_request_no_retry() -> None:
    assert len(walk(Kinds(retries=0), NAMES[:1], depth=7, extra=(("lose", 1),)).seen) > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "extra"),
    [
        (NAMES, ()),
        (NAMES, (ABORT,)),
        (NAMES[:2], (("die", 1), ("die", 2), ABORT)),
        (NAMES[:2], (("lose", 1), ABORT)),
        (NAMES[:1], (("lose", 1), ("lose", 2))),
    ],
)
def test_dying_engines_lost_nodes_and_aborts_lose_no_request(
    names: tuple[str, ...], extra: tuple[tuple[str, Any], ...]
) -> None:
    assert len(walk(names=names, extra=extra, depth=9).seen) > 500


async def wander(kinds: Kinds, draw: random.Random, length: int = 40) -> None:
    """One long schedule of two nodes that ask for more than the engines take at once."""
    world, schedule = World(kinds, tuple(f"{number // 4}:{number}" for number in range(8)), 2), []
    try:
        await world.settle()
        for _ in range(length):
            schedule.append(draw.choice(world.moves()))
            await world.move(*schedule[-1])
            check(world, tuple(schedule))
        if is_aborted := draw.random() < 0.3:
            schedule.append(ABORT)
            await world.move(*ABORT)
        await ended(world, tuple(schedule), is_aborted=is_aborted)
    finally:
        await world.close()


def wandered(kinds: Kinds, num: int) -> None:
    draw = random.Random(seed_of("YATT_FUZZ_SEED"))
    for _ in range(num):
        asyncio.run(wander(kinds, draw))


def test_long_schedules_of_two_nodes_that_ask_lose_no_request() -> None:
    wandered(Kinds(), 100)


@pytest.mark.parametrize("extra", [(), (ABORT,)])
def test_a_verdict_comes_whole_whatever_its_engine_did(extra: tuple[Any, ...]) -> None:
    """With the log-probs of its watched tokens, from one engine."""
    assert len(walk(Kinds(role=JUDGE), NAMES[:1], extra=extra, depth=8).seen) > 50


class LosesRows(LocalEngines):
    """A completion that goes on elsewhere keeps its tokens alone."""

    def _returned(self, request: Any, body: Completed) -> None:
        super()._returned(request, msgspec.structs.replace(body, watched=b""))


class ContinuesVerdicts(LocalEngines):
    """A verdict whose engine falls asleep is returned with its tokens, as a completion is."""

    def _returned(self, request: Any, body: Completed) -> None:
        self._end(body.request_id, completed=msgspec.structs.replace(body, finish_reason=MOVED))


@pytest.mark.parametrize(
    ("kinds", "says"),
    [
        (Kinds(engines=LosesRows), "log-probs of watched tokens are lost"),
        (Kinds(engines=ContinuesVerdicts, role=JUDGE), ": moved: "),
    ],
)
def test_the_walk_catches_log_probs_that_are_lost_at_a_move(kinds: Kinds, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        walk(kinds, NAMES[:1], depth=8)


class WaitsForTheNext(LocalEngines):
    """A request that comes too late waits for this node's next engine."""

    def room(self, role: str) -> int:
        return super().room(role) or (1 if sys._getframe(1).f_code.co_name == "complete" else 0)


class KeepsWhatWaits(LocalEngines):
    """Requests that wait here are not returned when the last engine leaves."""

    def _room_fell(self, role: str) -> None:
        self.version += 1
        self._changed(role)


def test_long_schedules_catch_requests_that_are_kept_without_an_engine() -> None:
    with pytest.raises(AssertionError, match="waits for ever"):
        wandered(Kinds(engines=KeepsWhatWaits), 2000)


class ForgetsWhatItRan(LocalEngines):
    """What a killed engine ran is not returned."""

    def remove(self, address: str, why: str, *, is_blamed: bool = False) -> None:
        for key in [key for key, request in self._requests.by_key.items() if request.engine == address]:
            self._end(key)
        super().remove(address, why, is_blamed=is_blamed)


class SendsTheAborted(Router):
    """An abort is forgotten where a request is on its way."""

    async def abort(self, role: str, request_ids: tuple[str, ...] = ()) -> None:
        await super().abort(role, request_ids)
        for request in self._requests.values():
            request.is_aborted = False


class WaitsThoughAborted(Router):
    """An aborted request that comes back ends when a node has room for it."""

    async def _place_for(self, request: Any) -> int | None:
        was_aborted, request.is_aborted = request.is_aborted, False
        index = await super()._place_for(request)
        return None if was_aborted else index


class TakesLateRooms(Router):
    """What a node reported first, it reported last."""

    def room(self, role: str, index: int, room: int, version: int, elsewhere: int = 0) -> None:
        super().room(role, index, room, -version, elsewhere)


class IsSilent(RoomAnnouncer):
    def _changed(self, role: str) -> None:
        """Says nothing."""


@pytest.mark.parametrize(
    ("kinds", "extra"),
    [
        (Kinds(engines=WaitsForTheNext), ()),
        (Kinds(engines=ForgetsWhatItRan), (("die", 1),)),
        (Kinds(router=SendsTheAborted), (ABORT,)),
        (Kinds(router=WaitsThoughAborted), (ABORT,)),
        (Kinds(router=TakesLateRooms), ()),
        (Kinds(announcer=IsSilent), ()),
    ],
)
def test_the_walk_catches_a_planted_mistake(kinds: Kinds, extra: tuple[tuple[str, Any], ...]) -> None:
    with pytest.raises(AssertionError, match=r"waits for ever|without end"):
        walk(kinds, depth=9, extra=extra)
