"""Calls and servers: every schedule of four calls on two servers, one of which kills whatever it runs in.

A server answers, dies of the poison in it, is killed from outside once, is put to sleep, or comes back; calls
are withdrawn. In all of it a call is in one place, a server is never over its room, the poison is soon over,
and no other call ever is. With two poisons that holds where suspects are isolated.
"""

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from yatt.core.requests.dispatch import SUSPECT, Dispatch

ROOM, PATIENCE, DEPTH = 2, SUSPECT + 1, 14
POISON, VENOM = "poison", "venom"
CALLS = {"a": "x", "b": "x", "c": "y", POISON: "y"}
TWO_POISONS = {"a": "", POISON: "", VENOM: ""}


@dataclass
class World:
    dispatch: Dispatch
    at: dict[str, str] = field(default_factory=dict)  # what was sent where, as a shell would know it
    up: set[str] = field(default_factory=set)
    under_way: set[str] = field(default_factory=set)
    over: set[str] = field(default_factory=set)
    kills_left: int = 1
    sleeps_left: int = 1
    deaths: int = 0
    isolates: bool = False
    story: list[str] = field(default_factory=list)


def begin(kind: type[Dispatch], calls: dict[str, str], *, isolates: bool) -> World:
    world = World(kind(patience=PATIENCE, isolates=isolates), isolates=isolates)
    for server in ("s", "t"):
        world.dispatch.serve(server, "pool", ROOM)
        world.up.add(server)
    for key, group in calls.items():
        world.dispatch.submit(key, "pool", group)
        world.under_way.add(key)
    return settled(world)


def settled(world: World) -> World:
    """Send what was assigned, and look at what must always hold."""
    for assignment in world.dispatch.assign():
        assert assignment.server in world.up, f"sent to a server that is gone: {world.story}"
        assert assignment.key not in world.at, f"{assignment.key} runs twice: {world.story}"
        assert assignment.key in world.under_way, f"{assignment.key} was done: {world.story}"
        world.at[assignment.key] = assignment.server
    for server in world.up:
        running = sorted(key for key, place in world.at.items() if place == server)
        assert len(running) <= ROOM, f"{server} is over its room: {running}"
        assert sorted(world.dispatch.keys(server)) == running
        suspects = [key for key in running if world.dispatch.suspicion(key) >= SUSPECT]
        assert len(suspects) < 2, f"two suspects in one server: {suspects} {world.story}"
        if world.isolates and suspects:
            assert running == suspects, f"a suspect and others in one server: {running} {world.story}"
    free = sum(ROOM - list(world.at.values()).count(server) for server in world.up)
    waiting = world.under_way - world.at.keys()
    unsuspected = [key for key in waiting if world.dispatch.suspicion(key) < SUSPECT]
    if not world.isolates:
        assert not (free and unsuspected), f"room, and {unsuspected} waits: {world.story}"
    assert not (free and waiting and not world.at), f"nothing runs, and {waiting} waits: {world.story}"
    return world


def died(world: World, server: str) -> None:
    world.deaths += 1
    over = world.dispatch.died(server)
    world.at = {key: place for key, place in world.at.items() if place != server}
    world.up.discard(server)
    world.under_way -= set(over)
    world.over |= set(over)


def moves(world: World) -> Iterator[tuple[str, Callable[[World], None]]]:
    for key, server in world.at.items():
        if key not in (POISON, VENOM):
            yield f"{key} answered", lambda w, key=key: finish(w, key)
        else:
            yield f"{server} dies of it", lambda w, server=server: died(w, server)
    for server in sorted(world.up):
        if world.kills_left:
            yield f"{server} is killed", lambda w, server=server: killed(w, server)
        if world.sleeps_left:
            yield f"{server} sleeps", lambda w, server=server: sleeps(w, server)
    for server in sorted({"s", "t"} - world.up):
        yield f"{server} comes back", lambda w, server=server: comes_back(w, server)


def finish(world: World, key: str) -> None:
    world.dispatch.done(key)
    del world.at[key]
    world.under_way.discard(key)


def killed(world: World, server: str) -> None:
    world.kills_left -= 1
    died(world, server)


def sleeps(world: World, server: str) -> None:
    world.sleeps_left -= 1
    world.dispatch.leave(server)
    world.at = {key: place for key, place in world.at.items() if place != server}
    world.up.discard(server)


def comes_back(world: World, server: str) -> None:
    world.dispatch.serve(server, "pool", ROOM)
    world.up.add(server)


def signature(world: World) -> object:
    calls = sorted((key, world.dispatch.suspicion(key), world.at.get(key)) for key in world.under_way)
    homes = sorted(world.dispatch._homes.items())
    order = tuple(world.dispatch._waiting.get("pool", ()))
    return str(
        (calls, homes, order, sorted(world.up), world.kills_left, world.sleeps_left, sorted(world.over))
    )


def walk(
    kind: type[Dispatch], depth: int = DEPTH, calls: dict[str, str] = CALLS, *, isolates: bool = False
) -> dict[str, int]:
    seen: set[object] = set()
    counts = {"states": 0, "poison over": 0, "finished": 0}
    todo = [begin(kind, calls, isolates=isolates)]
    while todo:
        world = todo.pop()
        if (mark := signature(world)) in seen or len(world.story) >= depth:
            continue
        seen.add(mark)
        counts["states"] += 1
        counts["poison over"] += POISON in world.over
        counts["finished"] += not world.under_way
        assert world.over <= {POISON, VENOM}, f"an innocent call is over: {world.over} {world.story}"
        whole = pickle.dumps(world)
        for name, move in moves(world):
            after: World = pickle.loads(whole)  # noqa: S301 (ours, and much faster than a deep copy)
            after.story.append(name)
            move(after)
            todo.append(settled(after))
    return counts


def test_every_schedule_ends_the_poison_and_spares_the_others() -> None:
    counts = walk(Dispatch)
    assert counts["states"] > 1000
    assert counts["poison over"] > 50
    assert counts["finished"] > 10


def test_two_poisons_spare_the_others_where_suspects_are_isolated() -> None:
    counts = walk(Dispatch, calls=TWO_POISONS, isolates=True)
    assert counts["poison over"] > 50
    assert counts["finished"] > 2
    with pytest.raises(AssertionError, match="an innocent call is over"):
        walk(Dispatch, calls=TWO_POISONS)


class BlamesNobody(Dispatch):
    def died(self, server: str) -> list[str]:
        self.leave(server)
        return []


class BlamesTwice(Dispatch):
    def died(self, server: str) -> list[str]:
        return [key for key in self.leave(server) if not (self.suspect(key) and self.suspect(key))]


class IsolatesNobody(Dispatch):
    def _takes(self, server: str, call: object) -> bool:
        known = self._servers.get(server)
        return known is not None and bool(known.free)


class ForgetsWhatRanThere(Dispatch):
    def leave(self, server: str) -> list[str]:
        if server in self._servers:
            self._servers[server].running.clear()
        return super().leave(server)


class IgnoresRoom(Dispatch):
    def _takes(self, server: str, call: object) -> bool:
        return server in self._servers


class NeverGivesUp(Dispatch):
    def suspect(self, key: str) -> bool:
        self._patience += 1
        return super().suspect(key)


class LetsOthersIn(Dispatch):
    def _has_suspect(self, server: object) -> bool:
        return False


def test_the_walk_catches_calls_that_join_a_suspect() -> None:
    with pytest.raises(AssertionError, match="a suspect and others"):
        walk(LetsOthersIn, calls=TWO_POISONS, isolates=True)


class KeepsTheDead(Dispatch):
    def leave(self, server: str) -> list[str]:
        for key in (running := self.keys(server)):
            self._wait_again(key)
        return running


@pytest.mark.parametrize(
    "mistaken",
    [
        BlamesNobody,
        BlamesTwice,
        IsolatesNobody,
        ForgetsWhatRanThere,
        IgnoresRoom,
        pytest.param(NeverGivesUp, marks=pytest.mark.slow),
        KeepsTheDead,
    ],
)
def test_the_walk_catches_a_planted_mistake(mistaken: type[Dispatch]) -> None:
    with pytest.raises(AssertionError):
        counts = walk(mistaken)
        assert counts["poison over"] > 50, "the poison goes on for ever"


def test_a_group_stays_in_one_server_while_it_has_room_and_then_spills() -> None:
    dispatch = Dispatch(patience=1)
    for server in ("s", "t", "u"):
        dispatch.serve(server, "pool", 4)
    for number in range(6):
        dispatch.submit(f"{number}", "pool", "group")
    places = [assignment.server for assignment in dispatch.assign()]
    assert places[:4] == [places[0]] * 4
    assert len(set(places[4:])) >= 1 and places[0] not in places[4:]


def test_what_others_ask_of_a_server_counts_as_its_load() -> None:
    dispatch = Dispatch(patience=1)
    dispatch.serve("busy", "pool", 16, elsewhere=12)
    dispatch.serve("idle", "pool", 16)
    dispatch.submit("a", "pool")
    assert [assignment.server for assignment in dispatch.assign()] == ["idle"]


def test_eight_processes_that_know_nothing_of_each_other_do_not_herd() -> None:
    taken: set[str] = set()
    for owner in range(8):
        dispatch = Dispatch(patience=1, salt=f"node{owner}")
        for server in range(56):
            dispatch.serve(f"node{8 + server}", "rollout", 256)
        for number in range(16):
            dispatch.submit(f"{owner}/{number}", "rollout", group=f"{number}")
        taken |= {assignment.server for assignment in dispatch.assign()}
    assert len(taken) >= 45, f"{56 - len(taken)} of 56 servers have nothing to do"
