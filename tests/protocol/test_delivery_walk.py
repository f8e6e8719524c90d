"""One request over a line that loses frames, or holds them back: every schedule of both ends.

A request is acted on once whatever is lost or comes twice; the sender gets the answer once the line carries
again; it gives up only after its deadline without any progress, and never while progress is heard of. The
receiver forgets an answer only for room, or when a later frame says that nobody waits for it.
"""

import functools
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from tests.protocol.walked_values import changed, key_of
from yatt.core.requests import delivery
from yatt.core.requests.delivery import RECORD_BYTES, Answers, Due, DuplicateFilter, Outgoing, Pending

RESEND_S, LIMIT_S = 1.0, 4.0
Frame = tuple[str, int]  # send | probe | answer | working | unknown | later, and its number


class Rules:
    """What is walked; mistakes are planted by overriding."""

    tick = staticmethod(delivery.tick)
    working = staticmethod(delivery.seen_working)
    forgotten = staticmethod(delivery.seen_forgotten)

    def admits(self, seen: DuplicateFilter, seq: int) -> bool:
        return seen.admits(seq)

    def waits_from(self, pending: Pending[None], seq: int) -> int:
        """What a frame with this seq says."""
        return pending.oldest("receiver", seq)

    def settle(self, answers: Answers, waits_from: int) -> None:
        answers.settle("sender", waits_from)


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
    is_kept: bool = True  # the receiver has not forgotten its answer for room
    is_settled: bool = False  # nor because of a later frame
    has_sent_later: bool = False
    seen: frozenset[int] = frozenset()
    is_known_lost: bool = False  # the sender heard so, and has not repeated the request since
    outcome: str = ""
    most_lost: int = 3
    last_tick: int = 8


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
    if kind == "later":
        return settled(world, value, rules)
    if world.outcome:
        return world
    if kind == "answer":
        return changed(world, outcome="answered")
    if kind == "working":
        moved = value != world.sender.progress
        sender = rules.working(world.sender, value)
        return changed(world, sender=sender, heard_at=world.tick if moved else world.heard_at)
    assert not world.is_settled, f"forgotten though it is waited for: {world}"
    return changed(world, sender=rules.forgotten(world.sender), is_known_lost=True)


def later(world: World, rules: Rules) -> World:
    """The sender sends one more frame, after the request."""
    pending = Pending[None]()
    pending.add("receiver", 1, None)
    if world.outcome:
        pending.remove("receiver", 1)
    return put(changed(world, has_sent_later=True), ("later", rules.waits_from(pending, 2)))


def settled(world: World, waits_from: int, rules: Rules) -> World:
    if not world.has_answer or not world.is_kept:
        return world
    answers = Answers(most_bytes=10_000)
    answers.end("sender", 1, b"answer")
    rules.settle(answers, waits_from)
    if answers.answer("sender", 1):
        assert waits_from <= 1, f"kept though the frame says that nobody waits: {world}"
        return world
    return changed(world, is_settled=True)


def say(world: World) -> World:
    if world.has_answer and world.is_kept and not world.is_settled:
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
        if world.lost < world.most_lost:
            yield changed(rest, lost=world.lost + 1)
    if world.is_working:
        done = changed(world, is_working=False, has_answer=True)
        yield put(done, ("answer", 0))
        if world.progress < 2:
            yield changed(world, progress=world.progress + 1)
    if not world.has_sent_later:
        yield later(world, rules)
    if world.has_answer and world.is_kept and not world.is_settled and world.acted < 2:
        yield changed(world, is_kept=False, has_answer=False, seen=frozenset())
    if world.tick < world.last_tick and not world.outcome:
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


ALONE = World(delivery.sent_request(0.0), has_sent_later=True)
WITH_A_LATER_FRAME = World(delivery.sent_request(0.0), most_lost=1, last_tick=4)


def walk(world: World, rules: Rules) -> Counter[str]:
    first = put(world, ("send", 1))
    seen, todo, counts = {key_of(first)}, [first], Counter[str]()
    while todo:
        world = todo.pop()
        if world.outcome and world.has_sent_later and not any(kind == "later" for kind, _ in world.line):
            counts[world.outcome] += 1
            counts["after a loss"] += world.outcome == "answered" and world.lost > 0
            counts["twice"] += world.acted > 1
            counts["settled"] += world.is_settled
            continue
        for after in moves(world, rules):
            key = key_of(after)
            if key not in seen:
                seen.add(key)
                todo.append(after)
    return counts


def can_be_answered_after(rules: Rules, losses: int) -> bool:
    """Lose the first so many frames, then none; nothing comes out of order."""
    world = put(World(delivery.sent_request(0.0)), ("send", 1))
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
    counts = walk(ALONE, Rules()) + walk(WITH_A_LATER_FRAME, Rules())
    assert min(counts[what] for what in ("answered", "expired", "after a loss", "twice", "settled")) > 10, (
        counts
    )


def test_the_answer_comes_once_the_line_carries_again() -> None:
    assert all(can_be_answered_after(Rules(), losses) for losses in range(3))


def test_time_in_which_the_sender_slept_is_not_silence_of_a_peer() -> None:
    limits = {"planned_s": 1.0, "resend_s": 1.0, "limit_s": 1.0}
    request, due = delivery.tick(delivery.sent_request(0.0), 100.0, **limits)
    assert (due, request.quiet_s) == (Due.NOTHING, 1.0), "what came meanwhile is read first"
    assert delivery.tick(request, 100.2, **limits)[1] is Due.EXPIRED


def test_answers_are_kept_up_to_their_bytes_and_what_goes_may_be_carried_out_again() -> None:
    answers, seen = Answers(most_bytes=RECORD_BYTES + 10), DuplicateFilter()
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


def test_answers_go_once_their_sender_waits_for_none_as_old() -> None:
    answers = Answers(most_bytes=100_000)
    for sender, seq in [("a", 1), ("b", 1), ("a", 3), ("a", 2), ("a", 4)]:
        answers.end(sender, seq, b"given")
    answers.settle("a", 3)
    kept = [(name, seq) for name in "ab" for seq in range(1, 5) if answers.answer(name, seq)]
    assert kept == [("a", 2), ("a", 3), ("a", 4), ("b", 1)], "2 was given after 3, which is waited for"
    answers.settle("a", 4)
    answers.settle("a", 2)
    answers.settle("nobody", 9)
    kept = [(name, seq) for name in "ab" for seq in range(1, 5) if answers.answer(name, seq)]
    assert kept == [("a", 4), ("b", 1)]
    for seq in range(5, 1000):
        answers.end("a", seq, b"given")
    assert answers.answer("b", 1) is None, "the oldest of all is removed for room"
    assert sum(answers.answer("a", seq) is not None for seq in range(1000)) == 100_000 // (RECORD_BYTES + 5)


def test_what_a_kept_answer_is_counted_with_is_what_it_takes() -> None:
    """Measured on many, because dictionaries grow in steps."""
    number, frame = 100_000, 70
    tracemalloc.start()
    answers = Answers(most_bytes=1 << 40)
    for seq in range(1, number + 1):
        answers.end("node1", seq, bytes(frame))
    taken = tracemalloc.get_traced_memory()[0] / number
    tracemalloc.stop()
    assert 0.5 * (frame + RECORD_BYTES) < taken < frame + RECORD_BYTES


def test_the_oldest_pending_request_is_found_whatever_order_they_end_in() -> None:
    pending, chance = Pending[int](), random.Random(3)
    expected: dict[str, dict[int, int]] = {"a": {}, "b": {}}
    for seq in range(1, 2000):
        to = chance.choice("ab")
        pending.add(to, seq, -seq)
        expected[to][seq] = -seq
        while chance.random() < 0.5:
            gone = chance.choice([*expected[to], 0])
            pending.remove(to, gone)
            expected[to].pop(gone, None)
        for name, requests in expected.items():
            assert pending.oldest(name, seq + 1) == min(requests, default=seq + 1)
            assert pending.to(name) == [*requests.values()]
        assert bool(pending) == any(expected.values())
    assert pending.every() == [*expected["a"].values(), *expected["b"].values()]


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


class ForgetsAtOnce(Rules):
    """A frame says that none is waited for but its own answer."""

    def waits_from(self, pending: Pending[None], seq: int) -> int:
        return seq


class ForgetsOneTooMany(Rules):
    def settle(self, answers: Answers, waits_from: int) -> None:
        answers.settle("sender", waits_from + 1)


class KeepsAll(Rules):
    def settle(self, answers: Answers, waits_from: int) -> None:
        pass


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
    ("mistaken", "world"),
    [
        (ActsAgain, ALONE),
        (NeverSendsAgain, ALONE),
        (CountsTheTotal, ALONE),
        (AnyWordIsProgress, ALONE),
        (OnlyProbes, ALONE),
        (RepeatsWhole, ALONE),
        (ForgetsAtOnce, WITH_A_LATER_FRAME),
        (ForgetsOneTooMany, WITH_A_LATER_FRAME),
        (KeepsAll, WITH_A_LATER_FRAME),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_planted_mistake_is_caught(mistaken: type[Rules], world: World) -> None:
    with pytest.raises(AssertionError):
        assert all(can_be_answered_after(mistaken(), losses) for losses in range(3)), "never answered"
        walk(world, mistaken())
