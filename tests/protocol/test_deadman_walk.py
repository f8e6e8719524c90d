"""The dead-man's switch: every schedule of a leader, two observers, Slurm and the shared folder.

The leader dies or lives; an observer dies, loses its network, is paused between any two of its steps; Slurm
does not answer; a requeue is lost on the way; the shared folder cannot be read for a while. In all of it a
start is requeued at most once, never while its leader lives, and never the start after it.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from tests.protocol.walked_values import changed, key_of
from yatt.core.attempts import deadman as rules
from yatt.core.attempts.deadman import (
    LATER_S,
    SPREAD_S,
    Action,
    Job,
    Limits,
    Observer,
    ObserverStage,
    limits_of,
)

LIMITS = Limits(silence_s=2.0, takeover_s=2.0)
LAST_TICK = 6
Step = Callable[[Observer, rules.Event, Limits], rules.Result]


@dataclass(frozen=True)
class Seat:
    """One observer. `todo`: what it is about to do; `is_told`: Slurm answered it within this tick."""

    observer: Observer = field(default_factory=Observer)
    todo: Action = Action.NOTHING
    has_looked: bool = False
    is_told: bool = False
    is_cut: bool = False


@dataclass(frozen=True)
class World:
    records: tuple[Seat | None, ...] = (Seat(), Seat())  # None: dead
    tick: int = 0
    counter: int = 0
    died_at: int = -1
    is_batch_dead: bool = False
    start: int = 1
    claims: tuple[int, ...] = ()  # owner of claim 1, 2 ...
    faults_left: int = 1

    @property
    def leader_lives(self) -> bool:
        return self.died_at < 0


def put(world: World, who: int, entry: Seat | None) -> World:
    records = (*world.records[:who], entry, *world.records[who + 1 :])
    return changed(world, records=records)


def feed(world: World, who: int, event: rules.Event, step: Step) -> World:
    entry = world.records[who]
    assert entry is not None
    observer, action = step(entry.observer, event, LIMITS)
    if action is Action.END_SELF:
        assert world.start == 2, f"ended itself, and nobody requeues: {world}"
        return put(world, who, None)
    return put(world, who, changed(entry, observer=observer, todo=action))


def later(world: World) -> World:
    records = tuple(s and changed(s, has_looked=False, is_told=False) for s in world.records)
    return changed(world, records=records, tick=world.tick + 1, counter=world.counter + world.leader_lives)


def moves(world: World, step: Step) -> Iterator[World]:
    if world.tick < LAST_TICK:
        yield later(world)
    if world.leader_lives and world.tick == 1:
        yield changed(world, died_at=world.tick)
        yield changed(world, died_at=world.tick, is_batch_dead=True)
    for who, entry in enumerate(world.records):
        if entry is None:
            continue
        if world.faults_left:
            hurt = changed(world, faults_left=world.faults_left - 1)
            yield put(hurt, who, None)
            if not entry.is_cut:
                yield put(hurt, who, changed(entry, is_cut=True))
            yield from acts(hurt, who, entry, step, goes_wrong=True)
        yield from acts(world, who, entry, step, goes_wrong=False)


def acts(world: World, who: int, entry: Seat, step: Step, *, goes_wrong: bool) -> Iterator[World]:
    match entry.todo:
        case Action.NOTHING if not entry.has_looked:
            yield look(world, who, entry, step, is_blind=goes_wrong)
        case Action.ASK_SLURM:
            running = Job.DIED if world.is_batch_dead else Job.SAME
            said = Job.UNKNOWN if goes_wrong else running if world.start == 1 else Job.OVER
            world = put(world, who, changed(entry, is_told=True))
            yield feed(world, who, rules.SlurmSaid(said), step)
        case Action.CLAIM if goes_wrong:
            yield feed(world, who, rules.ClaimTried(None), step)
        case Action.CLAIM:
            number = entry.observer.claim
            won = len(world.claims) < number
            claims = (*world.claims, who) if won else world.claims
            yield feed(changed(world, claims=claims), who, rules.ClaimTried(won), step)
        case Action.REQUEUE:
            yield feed(requeue(world, entry, is_lost=goes_wrong), who, rules.RequeueReturned(), step)


def look(world: World, who: int, entry: Seat, step: Step, *, is_blind: bool) -> World:
    lives = world.leader_lives and not entry.is_cut
    since = 0 if world.leader_lives and entry.is_cut else world.died_at
    silence = 0.0 if lives else float(world.tick - max(0, since))
    counter = None if is_blind else world.counter
    world = put(world, who, changed(entry, has_looked=True))
    return feed(world, who, rules.Look(float(world.tick), silence, counter), step)


def requeue(world: World, entry: Seat, *, is_lost: bool) -> World:
    """The caller asks again instead if Slurm's answer is not fresh."""
    if is_lost or not entry.is_told:
        return world
    assert not world.leader_lives, f"requeued while the leader lives: {world}"
    assert world.start == 1, f"the start after was requeued: {world}"
    return changed(world, start=2)


def walk(world: World, step: Step) -> tuple[list[World], set[ObserverStage]]:
    todo, seen, stages = [world], {key_of(world): world}, set[ObserverStage]()
    while todo:
        world = todo.pop()
        stages |= {entry.observer.stage for entry in world.records if entry is not None}
        for after in moves(world, step):
            if seen.setdefault(key_of(after), after) is after:
                todo.append(after)
    return list(seen.values()), stages


def left_alone(world: World, step: Step, known: dict[tuple[object, ...], int]) -> int:
    """Returns which start there is if from here on nothing goes wrong, and everybody acts in turn.

    Args:
        known: results of worlds of a later tick, which many worlds come to. Begin at the same tick each time.
    """
    way = []
    for _ in range(40):
        world = later(world)
        way.append(key_of(world))
        if way[-1] in known:
            break
        for who in range(len(world.records)):
            for _ in range(4):
                entry = world.records[who]
                if entry is not None:
                    world = next(acts(world, who, entry, step, goes_wrong=False), world)
    start = known.get(way[-1], world.start)
    known.update(dict.fromkeys(way, start))
    return start


def survey(step: Step) -> None:
    """Safety in every world, and an end to every zombie that somebody survives to see."""
    reached = set[ObserverStage]()
    for records, faults in ((1, 3), (2, 1)):
        worlds, stages = walk(World(records=(Seat(),) * records, faults_left=faults), step)
        reached |= stages
        known: dict[tuple[object, ...], int] = {}
        for world in worlds:
            if world.tick == LAST_TICK and not world.leader_lives and world.start == 1 and any(world.records):
                assert left_alone(world, step, known) == 2, f"nobody requeues: {world}"
    assert reached == set(ObserverStage) - {ObserverStage.ENDED}, (
        "a stage that was not reached was not tested"
    )


@pytest.mark.slow
def test_a_dead_leader_is_succeeded_once_and_a_living_one_never() -> None:
    survey(rules.step)


# ---- planted mistakes ---------------------------------------------------------------------------


def watches_the_wire_only(observer, event, limits):
    if isinstance(event, rules.Look) and event.counter is not None:
        observer = replace(observer, counter=event.counter, moved_s=-100.0)
    return rules.step(observer, event, limits)


def takes_blindness_for_silence(observer, event, limits):
    if isinstance(event, rules.Look) and event.counter is None:
        event = replace(event, counter=observer.counter)
        observer = replace(observer, moved_s=-100.0)
    return rules.step(observer, event, limits)


def requeues_without_a_claim(observer, event, limits):
    after, action = rules.step(observer, event, limits)
    if action is Action.CLAIM:
        return replace(after, stage=ObserverStage.REQUEUEING), Action.REQUEUE
    return after, action


def takes_no_answer_for_the_end(observer, event, limits):
    if event == rules.SlurmSaid(Job.UNKNOWN):
        event = rules.SlurmSaid(Job.OVER)
    return rules.step(observer, event, limits)


def takes_a_death_for_the_end(observer, event, limits):
    if event == rules.SlurmSaid(Job.DIED):
        event = rules.SlurmSaid(Job.OVER)
    return rules.step(observer, event, limits)


def never_takes_over(observer, event, limits):
    if observer.stage is ObserverStage.WAITING:
        return observer, Action.NOTHING
    return rules.step(observer, event, limits)


def keeps_an_old_claim(observer, event, limits):
    """Requeues under its old claim after asking again, as the first version of the rules did."""
    after, action = rules.step(observer, event, limits)
    if observer.claim and observer.stage is ObserverStage.ASKING and action is Action.CLAIM:
        return replace(after, stage=ObserverStage.REQUEUEING, claim=observer.claim), Action.REQUEUE
    return after, action


def claims_the_same_again(observer, event, limits):
    after, action = rules.step(observer, event, limits)
    return (replace(after, claim=1), action) if action is Action.CLAIM else (after, action)


def goes_on_without_the_claim(observer, event, limits):
    """What the shell must not do: see `is_fresh`."""
    if isinstance(event, rules.ClaimTried) and event.is_mine is False:
        return replace(observer, stage=ObserverStage.REQUEUEING), Action.REQUEUE
    return rules.step(observer, event, limits)


@pytest.mark.parametrize(
    "wrong",
    [
        watches_the_wire_only,
        takes_blindness_for_silence,
        requeues_without_a_claim,
        takes_no_answer_for_the_end,
        takes_a_death_for_the_end,
        never_takes_over,
        keeps_an_old_claim,
        claims_the_same_again,
        goes_on_without_the_claim,
    ],
)
def test_a_planted_mistake_is_caught(wrong: Step) -> None:
    with pytest.raises(AssertionError, match=r"requeued while|start after|nobody requeues"):
        survey(wrong)


def test_of_512_nodes_three_look_for_a_dead_leader_first() -> None:
    """They look later than the witnesses' takeover, and never many in one second."""
    waits = [limits_of(index).silence_s for index in range(1, 512)]
    first = Limits()
    assert [each for each in waits if each < first.silence_s + first.takeover_s] == [first.silence_s] * 3
    by_second = Counter(int(each) for each in waits[3:])
    assert max(by_second.values()) <= 27
    assert max(waits) < first.silence_s + LATER_S + SPREAD_S
    assert {limits_of(index).takeover_s for index in range(1, 512)} == {first.takeover_s}
