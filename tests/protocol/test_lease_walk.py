"""Every schedule of one slab, two roles and the processes behind them, in whole ticks.

The world around the rules is as bad as it may be: a holder obeys or not, dies of TERM or only of KILL
or not at all, keeps memory or gives it back, and a paused holder wakes at any time. In all of it nobody
is granted the slab while another may use it or keeps its memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from yatt.core.gpus import lease as rules
from yatt.core.gpus.lease import SlabLease, Stage, Timing

TIMING = Timing(ttl_s=2, stall_s=4, release_s=1, term_s=1, kill_s=1, memory_check_s=1)
LAST_TICK = 6
Step = Callable[[SlabLease, rules.Event, float, Timing], rules.Result]


@dataclass(frozen=True)
class World:
    lease: SlabLease = field(default_factory=SlabLease)
    tick: int = 0
    using: frozenset[str] = frozenset()  # roles whose processes work on the GPU now
    memory: frozenset[str] = frozenset()  # roles whose processes keep device memory
    doomed: frozenset[str] = frozenset()  # roles sent SIGKILL and not gone yet
    asked: str = ""
    measuring: bool = False
    wants_left: tuple[str, ...] = ("A", "B", "A")
    last_token: int = 0
    crashes_left: int = 2


def feed(world: World, event: rules.Event, step: Step) -> World:
    lease, actions = step(world.lease, event, float(world.tick), TIMING)
    world = replace(world, lease=lease)
    for action in actions:
        world = effect(world, action)
    return world


def effect(world: World, action: rules.Action) -> World:
    match action:
        case rules.Give(role, token):
            others = (world.using | world.memory) - {role}
            assert not others, f"{role} was granted the slab while {set(others)} has it: {world}"
            assert role not in world.doomed, f"{role} is being killed and was granted the slab: {world}"
            assert token > world.last_token, f"token {token} does not rise: {world}"
            using, memory = world.using | {role}, world.memory | {role}
            return replace(world, using=using, memory=memory, last_token=token)
        case rules.RequestRelease(role):
            return replace(world, asked=role)
        case rules.Kill(role):
            return replace(world, doomed=world.doomed | {role})
        case rules.Terminate(role):
            return replace(world, crashes_left=max(1, world.crashes_left))
        case rules.Purge(spare):
            return replace(world, doomed=world.doomed | ((world.using | world.memory) - {spare}))
        case rules.Measure():
            return replace(world, measuring=True)
    return world


def gone(world: World, role: str, step: Step) -> World:
    world = replace(
        world, using=world.using - {role}, memory=world.memory - {role}, doomed=world.doomed - {role}
    )
    return feed(world, rules.Died(role), step)


def moves(world: World, step: Step) -> Iterator[World]:
    """Everything that may happen next."""
    if world.tick < LAST_TICK:
        yield feed(replace(world, tick=world.tick + 1), rules.Tick(), step)
    if world.wants_left:
        yield feed(replace(world, wants_left=world.wants_left[1:]), rules.Want(world.wants_left[0]), step)
    if world.using:
        yield feed(world, rules.Beat(world.lease.token, 0), step)
    yield from measured(world, step)
    yield from obeyed(world, step)
    yield from deaths(world, step)


def measured(world: World, step: Step) -> Iterator[World]:
    """The measurement is true: clean iff nobody but the wanted role keeps memory, nobody works or dies."""
    if world.measuring:
        clean = not (world.memory - {world.lease.wanted}) and not world.using and not world.doomed
        yield feed(replace(world, measuring=False), rules.MemoryChecked(clean), step)


def obeyed(world: World, step: Step) -> Iterator[World]:
    """A holder that was asked lets go, and gives its memory back or not."""
    if world.asked and world.asked in world.using:
        for keeps in (False, True):
            memory = world.memory if keeps else world.memory - {world.asked}
            let_go = replace(world, using=world.using - {world.asked}, memory=memory, asked="")
            yield feed(let_go, rules.Released(world.lease.token), step)


def deaths(world: World, step: Step) -> Iterator[World]:
    """A role on the GPU dies of its signal, or crashes."""
    for role in sorted(world.using | world.memory):
        if role in world.doomed:
            yield gone(world, role, step)
        elif world.crashes_left:
            yield gone(replace(world, crashes_left=world.crashes_left - 1), role, step)


def walk(step: Step) -> dict[Stage, int]:
    """All reachable worlds; counts the stages reached."""
    todo, seen = [World()], {World()}
    stages: dict[Stage, int] = {}
    while todo:
        world = todo.pop()
        stages[world.lease.stage] = stages.get(world.lease.stage, 0) + 1
        for after in moves(world, step):
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return stages


def test_no_schedule_gives_a_slab_to_two() -> None:
    stages = walk(rules.step)
    assert set(stages) == set(Stage), "a stage that was not reached was not tested"


def test_every_wait_of_the_arbiter_ends() -> None:
    """Left alone with a holder that never answers and never dies, it quarantines; it never waits for ever."""
    lease, _ = rules.step(SlabLease(), rules.Want("A"), 0.0, TIMING)
    lease, _ = rules.step(lease, rules.MemoryChecked(True), 0.0, TIMING)
    for tick in range(20):
        lease, _ = rules.step(lease, rules.Tick(), float(tick), TIMING)
    assert lease.stage is Stage.QUARANTINED
    assert "could not be killed" in lease.cause


def test_memory_that_never_comes_back_is_quarantined_after_the_sleepers_were_killed() -> None:
    lease, actions = rules.step(SlabLease(), rules.Want("A"), 0.0, TIMING)
    purged = False
    for tick in range(20):
        lease, actions = rules.step(lease, rules.Tick(), float(tick), TIMING)
        purged |= rules.Purge("A") in actions
        lease, _ = rules.step(lease, rules.MemoryChecked(False, "genrm keeps 16 GiB"), float(tick), TIMING)
    assert purged
    assert lease.stage is Stage.QUARANTINED
    assert "genrm keeps 16 GiB" in lease.cause


# ---- planted mistakes: each must be caught by the walk ------------------------------------------


def grants_without_proof(lease, event, now_s, timing):
    after, actions = rules.step(lease, event, now_s, timing)
    if after.stage is Stage.CHECKING and after.wanted:
        return rules.step(after, rules.MemoryChecked(True), now_s, timing)
    return after, actions


def takes_the_word_of_a_releaser(lease, event, now_s, timing):
    if isinstance(event, rules.Released) and lease.wanted:
        after, _ = rules.step(lease, event, now_s, timing)
        return rules.step(after, rules.MemoryChecked(True), now_s, timing)
    return rules.step(lease, event, now_s, timing)


def believes_kill_is_death(lease, event, now_s, timing):
    after, actions = rules.step(lease, event, now_s, timing)
    if any(isinstance(a, rules.Kill) for a in actions):
        after, more = rules.step(after, rules.Died(after.holder), now_s, timing)
        after, last = rules.step(after, rules.MemoryChecked(True), now_s, timing)
        return after, (*actions, *more, *last)
    return after, actions


def grants_on_expiry(lease, event, now_s, timing):
    after, actions = rules.step(lease, event, now_s, timing)
    if after.stage is Stage.TERMINATED and lease.stage is not Stage.TERMINATED and after.wanted:
        checking = replace(after, stage=Stage.CHECKING)
        return rules.step(checking, rules.MemoryChecked(True), now_s, timing)
    return after, actions


def reuses_a_token(lease, event, now_s, timing):
    after, actions = rules.step(lease, event, now_s, timing)
    if any(isinstance(a, rules.Give) for a in actions) and after.token > 1:
        return replace(after, token=1), (rules.Give(after.holder, 1),)
    return after, actions


def forgets_whom_it_kills(lease, event, now_s, timing):
    """Takes memory alone as proof, as the first version of the rules did."""
    if isinstance(event, rules.MemoryChecked) and lease.purged and lease.stage is Stage.CHECKING:
        return rules.step(lease, rules.MemoryChecked(True), now_s, timing)
    return rules.step(lease, event, now_s, timing)


def gives_up_checking_and_grants(lease, event, now_s, timing):
    overdue = lease.stage is Stage.CHECKING and now_s - lease.since_s >= timing.memory_check_s
    if overdue and lease.wanted and isinstance(event, rules.Tick):
        return rules.step(lease, rules.MemoryChecked(True), now_s, timing)
    return rules.step(lease, event, now_s, timing)


@pytest.mark.parametrize(
    "wrong",
    [
        grants_without_proof,
        takes_the_word_of_a_releaser,
        believes_kill_is_death,
        grants_on_expiry,
        reuses_a_token,
        forgets_whom_it_kills,
        gives_up_checking_and_grants,
    ],
)
def test_a_planted_mistake_is_caught(wrong: Step) -> None:
    with pytest.raises(AssertionError, match=r"was granted|does not rise"):
        walk(wrong)


def test_a_beat_of_an_old_token_does_not_renew() -> None:
    lease = SlabLease(stage=Stage.HELD, token=3, holder="A", wanted="A", heard_s=0.0)
    after, _ = rules.step(lease, rules.Beat(2, 9), 1.9, TIMING)
    after, actions = rules.step(after, rules.Tick(), 2.0, TIMING)
    assert actions == (rules.Terminate("A"),)
    assert not rules.is_live(after, 3)


def test_a_holder_that_is_heard_of_but_makes_no_progress_loses_its_lease() -> None:
    lease, _ = rules.step(SlabLease(), rules.Want("A"), 0.0, TIMING)
    lease, _ = rules.step(lease, rules.MemoryChecked(True), 0.0, TIMING)
    for tick in range(1, 6):
        lease, _ = rules.step(lease, rules.Beat(1, 7), float(tick), TIMING)
        lease, actions = rules.step(lease, rules.Tick(), float(tick), TIMING)
        if actions:
            break
    assert lease.stage is Stage.TERMINATED
    assert "made no progress" in lease.cause
