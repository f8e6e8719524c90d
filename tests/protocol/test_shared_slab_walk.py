"""Every schedule of one slab of two GPUs, role A with an engine on each, and role B with one engine on both.

As in `test_lease_walk`, the world is as bad as it may be; beside that, memory of a dead process may stay for
a while. Nobody is granted the slab, and no engine is started on its GPU, while another may use them or memory
is kept there. An engine is only started under the grant of its role.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from yatt.core.gpus import lease as rules, shared_slab
from yatt.core.gpus.lease import Stage, Timing
from yatt.core.gpus.shared_slab import ForEngine, OfEngine, SharedSlab

TIMING = Timing(ttl_s=1, stall_s=4, release_s=1, term_s=1, kill_s=1, memory_check_s=1)
LAST_TICK = 3
NUM_ENGINES = {"A": 2}
UNITS = {"A": ("A0", "A1"), "B": ("B",)}
GPUS = {"A0": {0}, "A1": {1}, "B": {0, 1}}
Step = Callable[..., shared_slab.Result]


@dataclass(frozen=True)
class World:
    slab: SharedSlab = field(default_factory=SharedSlab)
    tick: int = 0
    using: frozenset[str] = frozenset()  # processes that work on their GPUs now
    memory: frozenset[str] = frozenset()  # processes that keep device memory
    doomed: frozenset[str] = frozenset()  # processes sent SIGKILL and not gone yet
    stays: frozenset[int] = frozenset()  # GPUs with memory of a process that is gone
    asked: str = ""
    measuring: frozenset[int] = frozenset()  # engines to be measured; -1: the slab
    wants_left: tuple[str, ...] = ("A", "B")
    crashes_left: int = 1
    last_token: int = 0
    has_restarted: bool = False


def feed(world: World, event: shared_slab.Event, step: Step) -> World:
    slab, actions = step(world.slab, event, float(world.tick), TIMING, NUM_ENGINES)
    world, lease = replace(world, slab=slab), slab.lease
    for action in actions:
        if not isinstance(action, ForEngine):
            world = effect(world, action, step)
        elif rules.is_live(world.slab.lease, lease.token):  # else their grant has ended meanwhile
            world = effect_on(world, UNITS["A"][action.index], action, step)
    return world


def effect(world: World, action: rules.Action, step: Step) -> World:
    match action:
        case rules.Give(role, token):
            mine = frozenset(UNITS[role])
            others = (world.using | world.memory) - mine
            assert not others, f"{role} was granted the slab while {set(others)} has it: {world}"
            assert not world.stays, f"{role} was granted GPUs {set(world.stays)}, which are not free: {world}"
            assert not mine & world.doomed, f"{role} is being killed and was granted the slab: {world}"
            assert token > world.last_token, f"token {token} does not rise: {world}"
            return replace(world, using=world.using | mine, memory=world.memory | mine, last_token=token)
        case rules.RequestRelease(role):
            return replace(world, asked=role)
        case rules.Terminate(role) | rules.Kill(role):
            awake = world.using & set(UNITS[role])
            if not awake:
                return feed(world, rules.Died(role), step)
            doomed = awake if isinstance(action, rules.Kill) else frozenset[str]()
            return replace(world, doomed=world.doomed | doomed, crashes_left=max(1, world.crashes_left))
        case rules.Purge(spare):
            others = (world.using | world.memory) - set(UNITS.get(spare, ()))
            return replace(world, doomed=world.doomed | others)
        case rules.Measure():
            return replace(world, measuring=world.measuring | {-1})
    return world


def effect_on(world: World, unit: str, action: ForEngine, step: Step) -> World:
    match action.action:
        case rules.Give():
            stage, holder = world.slab.lease.stage, world.slab.lease.holder
            assert (stage, holder) == (Stage.HELD, "A"), f"{unit} was started on a slab taken back: {world}"
            assert unit not in world.using | world.memory | world.doomed, f"{unit} was started twice: {world}"
            there = {other for other in world.using | world.memory if GPUS[other] & GPUS[unit]}
            assert not there, f"{unit} was started where {there} is: {world}"
            assert not world.stays & GPUS[unit], f"{unit} was started on a GPU that is not free: {world}"
            using, memory = world.using | {unit}, world.memory | {unit}
            return replace(world, using=using, memory=memory, has_restarted=True)
        case rules.Terminate():
            return replace(world, crashes_left=max(1, world.crashes_left))
        case rules.Kill():
            return replace(world, doomed=world.doomed | {unit})
        case rules.Measure():
            return replace(world, measuring=world.measuring | {action.index})
    return world


def gone(world: World, unit: str, step: Step, *, stays: bool) -> World:
    world = replace(
        world, using=world.using - {unit}, memory=world.memory - {unit}, doomed=world.doomed - {unit},
        stays=world.stays | (GPUS[unit] if stays else set()),
    )  # fmt: skip
    lease, role = world.slab.lease, unit[0]
    if world.slab.engines and (lease.stage, lease.holder) == (Stage.HELD, role):
        return feed(world, OfEngine(UNITS["A"].index(unit), rules.Died(role)), step)
    if lease.holder == role and not world.using & set(UNITS[role]):
        return feed(world, rules.Died(role), step)
    return world


def moves(world: World, step: Step) -> Iterator[World]:
    """Everything that may happen next."""
    if world.tick < LAST_TICK:
        yield feed(replace(world, tick=world.tick + 1), rules.Tick(), step)
    if world.wants_left:
        yield feed(replace(world, wants_left=world.wants_left[1:]), rules.Want(world.wants_left[0]), step)
    if world.stays:
        yield replace(world, stays=frozenset())
    yield from renewed(world, step)
    yield from measured(world, step)
    yield from obeyed(world, step)
    yield from deaths(world, step)


def renewed(world: World, step: Step) -> Iterator[World]:
    beat = rules.Beat(world.slab.lease.token, 0)
    for index, unit in enumerate(UNITS["A"]):
        if unit in world.using and world.slab.engines:
            yield feed(world, OfEngine(index, beat), step)
    if "B" in world.using:
        yield feed(world, beat, step)


def deaths(world: World, step: Step) -> Iterator[World]:
    """A process dies of its signal, or crashes; its memory stays for a while or not."""
    for unit in sorted(world.using | world.memory):
        for stays in (False, True) if unit in world.memory else (False,):
            if unit in world.doomed:
                yield gone(world, unit, step, stays=stays)
            elif world.crashes_left:
                yield gone(replace(world, crashes_left=world.crashes_left - 1), unit, step, stays=stays)


def measured(world: World, step: Step) -> Iterator[World]:
    """Measurements are true: GPUs are free if no other role keeps memory there, and nothing stays or dies."""
    for index in sorted(world.measuring):
        left = replace(world, measuring=world.measuring - {index})
        role = world.slab.lease.wanted if index < 0 else "A"
        gpus = {0, 1} if index < 0 else {index}
        there = {unit for unit in world.memory | world.using | world.doomed if GPUS[unit] & gpus}
        bad = {u for u in there if u[0] != role} | (there & world.doomed)
        bad |= world.using if index < 0 else {unit for unit in world.using if GPUS[unit] & gpus}
        checked = rules.MemoryChecked(not bad and not world.stays & gpus)
        yield feed(left, OfEngine(index, checked) if index >= 0 else checked, step)


def obeyed(world: World, step: Step) -> Iterator[World]:
    """Engines of a holder that was asked fall asleep one by one; the last one's sleep releases the slab."""
    mine = set(UNITS.get(world.asked, ()))
    for unit in sorted(world.using & mine):
        for keeps in (False, True):
            memory = world.memory if keeps else world.memory - {unit}
            after = replace(world, using=world.using - {unit}, memory=memory)
            if not after.using & mine:
                token = world.slab.lease.token
                after = feed(replace(after, asked=""), rules.Released(token), step)
            yield after


def walk(step: Step) -> tuple[set[Stage], bool]:
    """All reachable worlds: the stages reached, and whether an engine was started again."""
    todo, seen = [World()], {World()}
    stages, has_restarted = set[Stage](), False
    while todo:
        world = todo.pop()
        stages.add(world.slab.lease.stage)
        has_restarted |= world.has_restarted
        for after in moves(world, step):
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return stages, has_restarted


def test_no_schedule_gives_a_gpu_to_two() -> None:
    stages, has_restarted = walk(shared_slab.step)
    assert stages == set(Stage) and has_restarted, "what was not reached was not tested"


# ---- directed schedules -------------------------------------------------------------------------


def held(step: Step = shared_slab.step) -> SharedSlab:
    """A slab that role A holds from second 0 on, under token 1."""
    slab, _ = step(SharedSlab(), rules.Want("A"), 0.0, TIMING, NUM_ENGINES)
    slab, actions = step(slab, rules.MemoryChecked(True), 0.0, TIMING, NUM_ENGINES)
    assert actions == (rules.Give("A", 1),)
    return slab


def ended(step: Step, *, hung_progress: Callable[[int], int] | None) -> list[tuple[int, shared_slab.Action]]:
    """What happens, by second, while engine 0 works and engine 1 hangs.

    Args:
        hung_progress: the progress that engine 1's heartbeats report at a second; None: it sends none.
    """
    slab, found = held(step), list[tuple[int, shared_slab.Action]]()
    for second in range(1, 8):
        beats = [OfEngine(0, rules.Beat(1, second))]
        if hung_progress is not None:
            beats.append(OfEngine(1, rules.Beat(1, hung_progress(second))))
        for event in (*beats, rules.Tick()):
            slab, actions = step(slab, event, float(second), TIMING, NUM_ENGINES)
            found += [(second, action) for action in actions]
    return found


def check_that_hung_engines_are_ended(step: Step) -> None:
    silent = ended(step, hung_progress=None)
    assert silent[:2] == [(1, ForEngine(1, rules.Terminate("A"))), (2, ForEngine(1, rules.Kill("A")))]
    stalled = ended(step, hung_progress=lambda _: 7)
    assert stalled[:2] == [(5, ForEngine(1, rules.Terminate("A"))), (6, ForEngine(1, rules.Kill("A")))]
    assert not ended(step, hung_progress=lambda second: second), "both work"


def test_an_engine_that_hangs_is_ended_alone_however_busy_its_neighbour_is() -> None:
    check_that_hung_engines_are_ended(shared_slab.step)


def test_a_process_that_cannot_be_killed_or_memory_that_stays_ends_the_whole_holder() -> None:
    """Every wait for one engine ends; then the slab's own rules decide."""
    found = ended(shared_slab.step, hung_progress=None)
    quarantine = rules.Quarantine("A could not be killed within 1 s")
    assert found[2:] == [(3, rules.Terminate("A")), (4, rules.Kill("A")), (5, quarantine)]
    slab, stays = held(), rules.MemoryChecked(False, "5000 MiB are in use")
    for event in (OfEngine(1, rules.Died("A")), OfEngine(1, stays), OfEngine(0, rules.Beat(1, 1))):
        slab, _ = shared_slab.step(slab, event, 0.5, TIMING, NUM_ENGINES)
    slab, actions = shared_slab.step(slab, rules.Tick(), 1.49, TIMING, NUM_ENGINES)
    assert actions == (ForEngine(1, rules.Measure()),)
    slab, _ = shared_slab.step(slab, OfEngine(0, rules.Beat(1, 2)), 1.5, TIMING, NUM_ENGINES)
    slab, actions = shared_slab.step(slab, rules.Tick(), 1.5, TIMING, NUM_ENGINES)
    assert actions == (rules.Terminate("A"),)
    assert slab.lease.cause == "engine 1 has ended, and its GPUs are not free: 5000 MiB are in use"
    assert slab.engines == ()


def check_that_a_dead_engine_is_started_again_alone(step: Step) -> None:
    slab, actions = step(held(step), OfEngine(1, rules.Died("A")), 1.0, TIMING, NUM_ENGINES)
    assert actions == (ForEngine(1, rules.Measure()),)
    checked = OfEngine(1, rules.MemoryChecked(True))
    slab, actions = step(slab, checked, 1.0, TIMING, NUM_ENGINES)
    assert [type(action.action) for action in actions] == [rules.Give]
    assert (slab.lease.stage, slab.lease.token) == (Stage.HELD, 1)


def test_an_engine_that_has_ended_is_started_again_under_the_same_token() -> None:
    check_that_a_dead_engine_is_started_again_alone(shared_slab.step)


def test_a_role_with_one_engine_has_the_rules_of_the_slabs_lease() -> None:
    slab = SharedSlab()
    for event in (rules.Want("B"), rules.MemoryChecked(True)):
        slab, _ = shared_slab.step(slab, event, 0.0, TIMING, NUM_ENGINES)
    assert slab.engines == ()
    slab, actions = shared_slab.step(slab, rules.Tick(), 2.0, TIMING, NUM_ENGINES)
    assert actions == (rules.Terminate("B"),)


# ---- planted mistakes: each must be caught ------------------------------------------------------


def starts_without_a_memory_check(slab, event, now_s, timing, num_engines):
    after, actions = shared_slab.step(slab, event, now_s, timing, num_engines)
    if isinstance(event, OfEngine) and isinstance(event.event, rules.Died) and actions:
        checked = OfEngine(event.index, rules.MemoryChecked(True))
        return shared_slab.step(after, checked, now_s, timing, num_engines)
    return after, actions


def believes_kill_is_death(slab, event, now_s, timing, num_engines):
    after, actions = shared_slab.step(slab, event, now_s, timing, num_engines)
    for action in actions:
        if isinstance(action, ForEngine) and isinstance(action.action, rules.Kill):
            for more in (rules.Died("A"), rules.MemoryChecked(True)):
                after, last = shared_slab.step(
                    after, OfEngine(action.index, more), now_s, timing, num_engines
                )
            return after, (*actions, *last)
    return after, actions


def starts_engines_on_a_slab_that_is_taken_back(slab, event, now_s, timing, num_engines):
    if not isinstance(event, OfEngine) or slab.lease.stage is not Stage.RELEASING or not slab.engines:
        return shared_slab.step(slab, event, now_s, timing, num_engines)
    as_held = replace(slab, lease=replace(slab.lease, stage=Stage.HELD))
    after, actions = shared_slab.step(as_held, event, now_s, timing, num_engines)
    return replace(after, lease=slab.lease), actions


def takes_one_engines_end_for_the_roles(slab, event, now_s, timing, num_engines):
    if isinstance(event, OfEngine) and isinstance(event.event, rules.Died) and slab.engines:
        return shared_slab.step(slab, event.event, now_s, timing, num_engines)
    return shared_slab.step(slab, event, now_s, timing, num_engines)


@pytest.mark.parametrize(
    "wrong",
    [
        starts_without_a_memory_check,
        believes_kill_is_death,
        starts_engines_on_a_slab_that_is_taken_back,
    ],
)
def test_a_planted_mistake_is_caught_by_the_walk(wrong: Step) -> None:
    with pytest.raises(AssertionError, match=r"was granted|was started"):
        walk(wrong)


def renews_all_engines_by_one_heartbeat(slab, event, now_s, timing, num_engines):
    """As one sum of progress for the whole holder did."""
    if isinstance(event, OfEngine) and isinstance(event.event, rules.Beat):
        for index in range(len(slab.engines)):
            beat = OfEngine(index, event.event)
            slab, _ = shared_slab.step(slab, beat, now_s, timing, num_engines)
        return slab, ()
    return shared_slab.step(slab, event, now_s, timing, num_engines)


def ends_all_engines_for_one(slab, event, now_s, timing, num_engines):
    after, actions = shared_slab.step(slab, event, now_s, timing, num_engines)
    return after, tuple(a.action if isinstance(a, ForEngine) else a for a in actions)


@pytest.mark.parametrize(
    "wrong",
    [renews_all_engines_by_one_heartbeat, ends_all_engines_for_one, takes_one_engines_end_for_the_roles],
)
def test_a_mistake_about_what_an_engine_costs_is_caught(wrong: Step) -> None:
    with pytest.raises(AssertionError):
        check_that_hung_engines_are_ended(wrong)
        check_that_a_dead_engine_is_started_again_alone(wrong)
