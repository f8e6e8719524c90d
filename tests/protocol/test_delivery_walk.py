"""One request over a line that loses frames, or holds them back: every schedule of both ends.

A request is acted on once whatever is lost or comes twice; the sender gets the answer once the line carries
again; it gives up only after its deadline without any progress, and never while progress is heard of.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from tests.protocol.walked_values import changed, key_of
from yatt.core import delivery
from yatt.core.delivery import Answers, Due, DuplicateFilter, Outgoing

RESEND_S, LIMIT_S, LAST_TICK, MOST_LOST = 1.0, 4.0, 8, 3
Frame = tuple[str, int]  # send | probe | answer | working | unknown, and its number


class Rules:
    """What is walked; mistakes are planted by overriding."""

    tick = staticmethod(delivery.tick)
    working = staticmethod(delivery.working)
    forgotten = staticmethod(delivery.forgotten)

    def admits(self, seen: DuplicateFilter, seq: int) -> bool:
        return seen.admits(seq)


@dataclass(frozen=True)
class World:
    sender: Outgoing
    tick: int = 0
    line: tuple[Frame, ...] = ()  # in order of sending, both ways
    lost: int = 0
    acted: int = 0
    progress: int = 0
    moved_at: int = 0
    heard_at: int = 0
    is_working: bool = False
    has_answer: bool = False
    is_kept: bool = True  # the receiver still has its answer
    seen: frozenset[int] = frozenset()
    is_known_lost: bool = False  # the sender heard so, and has not repeated the request since
    outcome: str = ""


def arrive(world: World, frame: Frame, rules: Rules) -> World:
    kind, value = frame
    if kind == "send":
        seen = DuplicateFilter(top=1 if 1 in world.seen else 0)
        if rules.admits(seen, 1):
            assert not world.acted or not world.is_kept, f"acted on twice: {world}"
            return changed(
                world, seen=frozenset({1}), acted=world.acted + 1, is_working=True, has_answer=False
            )
        return say(world)
    if kind == "probe":
        return say(world)
    if world.outcome:
        return world
    if kind == "answer":
        return changed(world, outcome="answered")
    if kind == "working":
        moved = value != world.sender.progress
        sender = rules.working(world.sender, value)
        return changed(world, sender=sender, heard_at=world.tick if moved else world.heard_at)
    return changed(world, sender=rules.forgotten(world.sender), is_known_lost=True)


def say(world: World) -> World:
    if world.has_answer and world.is_kept:
        return put(world, ("answer", 0))
    if world.is_working:
        return put(world, ("working", world.progress))
    return put(world, ("unknown", 0))


def put(world: World, frame: Frame) -> World:
    return changed(world, line=(*world.line, frame)[-3:])


def moves(world: World, rules: Rules) -> Iterator[World]:
    for index, frame in enumerate(world.line):
        rest = changed(world, line=(*world.line[:index], *world.line[index + 1 :]))
        yield arrive(rest, frame, rules)
        if world.lost < MOST_LOST:
            yield changed(rest, lost=world.lost + 1)
    if world.is_working:
        done = changed(world, is_working=False, has_answer=True)
        yield put(done, ("answer", 0))
        if world.progress < 2:
            yield changed(world, progress=world.progress + 1)
    if world.has_answer and world.is_kept and world.acted < 2:
        yield changed(world, is_kept=False, has_answer=False, seen=frozenset())
    if world.tick < LAST_TICK and not world.outcome:
        yield tick(world, rules)


def tick(world: World, rules: Rules) -> World:
    now = world.tick + 1
    sender, due = ticked(rules.tick, world.sender, now)
    world = changed(world, tick=now, sender=sender)
    if due is Due.EXPIRED:
        quiet = now - world.heard_at
        assert quiet >= LIMIT_S, f"given up after {quiet} quiet ticks: {world}"
        return changed(world, outcome="expired")
    assert now - world.heard_at < LIMIT_S, f"not given up after {LIMIT_S} quiet ticks: {world}"
    if due is Due.SEND:
        assert world.is_known_lost, f"repeated whole, though it may be under way: {world}"
        return put(changed(world, is_known_lost=False), ("send", 1))
    return put(world, ("probe", 1)) if due is Due.PROBE else world


@functools.cache
def ticked(rule: Callable[..., tuple[Outgoing, Due]], sender: Outgoing, now: int) -> tuple[Outgoing, Due]:
    """Worlds are many, and what a sender knows is soon the same."""
    return rule(sender, float(now), planned_s=1.0, resend_s=RESEND_S, limit_s=LIMIT_S)


def walk(rules: Rules) -> dict[str, int]:
    first = put(World(delivery.sent(0.0)), ("send", 1))
    seen, todo, counts = (
        {key_of(first)},
        [first],
        {"answered": 0, "expired": 0, "after a loss": 0, "twice": 0},
    )
    while todo:
        world = todo.pop()
        if world.outcome:
            counts[world.outcome] += 1
            counts["after a loss"] += world.outcome == "answered" and world.lost > 0
            counts["twice"] += world.acted > 1
            continue
        for after in moves(world, rules):
            key = key_of(after)
            if key not in seen:
                seen.add(key)
                todo.append(after)
    return counts


def can_be_answered_after(rules: Rules, losses: int) -> bool:
    """Lose the first so many frames, then none; nothing comes out of order."""
    world = put(World(delivery.sent(0.0)), ("send", 1))
    for _ in range(60):
        if world.outcome:
            break
        if world.line:
            frame, world = world.line[0], changed(world, line=world.line[1:])
            if losses:
                losses -= 1
            else:
                world = arrive(world, frame, rules)
        elif world.is_working:
            world = put(changed(world, is_working=False, has_answer=True), ("answer", 0))
        else:
            world = tick(world, rules)
    return world.outcome == "answered"


def test_every_schedule_acts_once_and_gives_up_only_in_silence() -> None:
    counts = walk(Rules())
    assert min(counts.values()) > 10, counts


def test_the_answer_comes_once_the_line_carries_again() -> None:
    assert all(can_be_answered_after(Rules(), losses) for losses in range(3))


def test_what_the_sender_slept_is_nobodys_silence() -> None:
    limits = {"planned_s": 1.0, "resend_s": 1.0, "limit_s": 1.0}
    request, due = delivery.tick(delivery.sent(0.0), 100.0, **limits)
    assert (due, request.quiet_s) == (Due.NOTHING, 1.0), "what came meanwhile is read first"
    assert delivery.tick(request, 100.2, **limits)[1] is Due.EXPIRED


def test_answers_are_kept_up_to_their_bytes_and_what_goes_may_be_carried_out_again() -> None:
    answers, seen = Answers(most_bytes=10), DuplicateFilter()
    assert [seen.admits(seq) for seq in (1, 2, 2, 5, 4, 4, 3, 1)] == [
        True, True, False, True, True, False, True, False,
    ]  # fmt: skip
    for seq in (1, 2):
        answers.begin("a", seq)
        assert answers.is_working("a", seq)
        gone = answers.end("a", seq, b"123456")
    assert gone == [("a", 1)]
    assert answers.answer("a", 1) is None and answers.answer("a", 2) == b"123456"
    seen.forget(1)
    assert seen.admits(1) and not seen.admits(1)


def test_what_is_remembered_of_a_sender_has_a_bound() -> None:
    seen = DuplicateFilter(most_missing=8)
    for seq in range(1, 1000):
        assert seen.admits(seq)
        seen.forget(seq)
    assert len(seen.missing) <= 2 * 8
    assert not seen.admits(1), "so old that nobody waits for it"
    assert seen.admits(999) and not seen.admits(999)
    assert not seen.admits(999 + 9), "so far ahead that it is damaged"


class ActsAgain(Rules):
    def admits(self, seen: DuplicateFilter, seq: int) -> bool:
        return True


class NeverSendsAgain(Rules):
    @staticmethod
    def tick(request: Outgoing, now_s: float, **limits: float) -> tuple[Outgoing, Due]:
        request, due = delivery.tick(request, now_s, **limits)
        return request, due if due is Due.EXPIRED else Due.NOTHING


class CountsTheTotal(Rules):
    @staticmethod
    def working(request: Outgoing, progress: int) -> Outgoing:
        return replace(request, progress=progress)


class AnyWordIsProgress(Rules):
    @staticmethod
    def working(request: Outgoing, progress: int) -> Outgoing:
        return replace(request, progress=progress, quiet_s=0.0)


class OnlyProbes(Rules):
    @staticmethod
    def tick(request: Outgoing, now_s: float, **limits: float) -> tuple[Outgoing, Due]:
        request, due = delivery.tick(request, now_s, **limits)
        return request, Due.PROBE if due is Due.SEND else due


class RepeatsWhole(Rules):
    """As the first version of the rules did: a slow line was filled with copies of a large request."""

    @staticmethod
    def tick(request: Outgoing, now_s: float, **limits: float) -> tuple[Outgoing, Due]:
        request, due = delivery.tick(request, now_s, **limits)
        return request, Due.SEND if due is Due.PROBE and request.progress < 0 else due


@pytest.mark.parametrize(
    "mistaken",
    [
        ActsAgain,
        NeverSendsAgain,
        CountsTheTotal,
        AnyWordIsProgress,
        pytest.param(OnlyProbes, marks=pytest.mark.slow),
        RepeatsWhole,
    ],
)
def test_a_planted_mistake_is_caught(mistaken: type[Rules]) -> None:
    with pytest.raises(AssertionError):
        counts = walk(mistaken())
        assert min(counts.values()) > 10, counts
        assert all(can_be_answered_after(mistaken(), losses) for losses in range(3)), "never answered"
