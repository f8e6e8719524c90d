"""Every order in which the two tracks can meet: training asks, engines end a batch or a load, the run stops.

The training side is its own small program, apart from the rules: load the first weights, validate, then for
each iteration ask for the batch, train, publish, continue. Walked for no credit, one and two batches ahead.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from yatt.core.phases import sampling_track as core
from yatt.core.phases.sampling_track import Track, TrackRules

TURNS = TrackRules(total_iterations=3)
ONE = TrackRules(total_iterations=4, ahead=1, max_age=1)
TWO = TrackRules(total_iterations=5, ahead=2, max_age=2)
GIVEN = TrackRules(total_iterations=3, has_engines=False)
HELD_BACK = TrackRules(total_iterations=4, ahead=2, max_age=1)
VALIDATED = frozenset({0, 2})
"""Policy versions that are validated."""

Step = Callable[[Track, core.Event, TrackRules], core.Result]
ASK, PUBLISH, TRAIN, VALIDATE, DONE = "ask", "publish", "train", "validate", "done"
MAY_PUBLISH, MAY_VALIDATE = "may publish", "may validate"


NOTHING_YET = Track()


@dataclass(frozen=True)
class World:
    track: Track = NOTHING_YET
    trained: int = 0
    doing: str = ""  # what training does; "" while it waits
    waits_for: str = ""
    sampling: int = 0
    sampled_by: int = -1  # the version at the begin of the batch
    batches: tuple[tuple[int, int], ...] = ()  # complete batches with the version that sampled them
    loading: int = -1
    version: int = -1
    weights_change: bool = False
    lacks_left: int = 1
    again_left: int = 1  # a batch may lack groups after it was scored
    stop_left: int = 1
    is_stopped: bool = False
    overlapped: bool = False


def apply(world: World, result: core.Result, rules: TrackRules) -> World:
    track, actions = result
    world = replace(world, track=track)
    for action in actions:
        match action:
            case core.SampleBatch(batch, version):
                assert version == world.version
                world = begin_sampling(world, batch, rules)
            case core.LoadVersion(version):
                assert not world.sampling, "weights are loaded during a batch"
                assert world.loading < 0, "weights are loaded twice at once"
                assert not world.weights_change, "weights are loaded while they change"
                assert not world.is_stopped, "weights are loaded after a request to stop"
                world = replace(world, loading=version)
            case core.Grant():
                world = continue_training(world, action, rules)
    return world


def begin_sampling(world: World, batch: int, rules: TrackRules) -> World:
    assert not world.sampling, "two batches are sampled at once"
    assert world.loading < 0, "a batch is begun while engines load"
    assert world.doing != VALIDATE, "a batch is begun during a validation"
    assert not world.is_stopped, "a batch is begun after a request to stop"
    assert batch == len(world.batches) + 1, f"batch {batch} out of turn"
    is_young = 0 <= batch - 1 - world.version <= rules.max_age
    assert is_young or not rules.has_engines, f"batch {batch} by version {world.version}"
    assert batch <= world.track.wanted + rules.ahead, f"batch {batch} without credit"
    assert batch <= rules.total_iterations, f"batch {batch} is for nobody"
    return replace(world, sampling=batch, sampled_by=world.version)


def continue_training(world: World, grant: core.Grant, rules: TrackRules) -> World:
    waited, world = world.waits_for, replace(world, waits_for="")
    assert waited, "training may continue, but did not wait"
    if grant.is_stopped:
        assert world.is_stopped, "in vain, but nobody asked to stop"
        return replace(world, doing=DONE)
    if waited == ASK and grant.again:
        return replace(world, doing=ASK)
    if waited == ASK:
        assert len(world.batches) > world.trained, "a batch is trained on before it is complete"
        batch, version = world.batches[world.trained]
        assert batch == world.trained + 1
        is_young = 0 <= world.trained - version <= rules.max_age
        assert is_young or not rules.has_engines, "a batch that is too old is trained on"
        return replace(world, doing=TRAIN)
    if waited == PUBLISH:
        assert world.loading < 0, "weights change while engines load them"
        if not rules.has_engines:  # it was saved
            return replace(world, doing=ASK)
        return replace(world, doing=PUBLISH, weights_change=True)
    if waited == VALIDATE:
        assert not world.sampling and world.loading < 0, "a validation beside other work"
        assert world.version == world.trained, "another version is validated"
        return replace(world, doing=VALIDATE)
    assert rules.ahead or world.version == world.trained, "without credit engines load first"
    return replace(world, doing=MAY_VALIDATE if world.trained in VALIDATED else ASK)


def training_moves(world: World, step: Step, rules: TrackRules) -> Iterator[World]:
    is_over = world.is_stopped or (world.doing == ASK and world.trained == rules.total_iterations)
    if world.doing in (ASK, MAY_VALIDATE, MAY_PUBLISH) and is_over:
        yield replace(world, doing=DONE)
        return
    asked: dict[str, tuple[core.Event, str, str]] = {
        ASK: (core.WantBatch(world.trained + 1), "", ASK),
        MAY_VALIDATE: (core.WantQuiet(), "", VALIDATE),
        VALIDATE: (core.QuietOver(), ASK, ""),
        MAY_PUBLISH: (core.WantPublishing(), "", PUBLISH),
        PUBLISH: (core.VersionPublished(world.trained), "", "sync"),
    }
    if world.doing == TRAIN:
        yield replace(world, trained=world.trained + 1, doing=MAY_PUBLISH)
        if not rules.has_engines:  # not every iteration is saved
            yield replace(world, trained=world.trained + 1, doing=ASK)
        if world.again_left and not rules.ahead and not world.is_stopped:
            lacks = replace(world, batches=world.batches[:-1], again_left=0)
            yield replace(lacks, doing=ASK)
    elif world.doing in asked:
        event, doing, waits_for = asked[world.doing]
        changed = replace(
            world, doing=doing, waits_for=waits_for, weights_change=world.weights_change and doing != ""
        )
        yield apply(changed, step(world.track, event, rules), rules)


def moves(world: World, step: Step, rules: TrackRules) -> Iterator[World]:
    yield from training_moves(world, step, rules)
    if world.sampling:
        together = replace(world, overlapped=world.overlapped or world.doing == TRAIN)
        for lacks in (False, True) if world.lacks_left else (False,):
            batches = world.batches if lacks else (*world.batches, (world.sampling, world.sampled_by))
            ended = replace(together, sampling=0, batches=batches, lacks_left=world.lacks_left - lacks)
            event = core.Sampled(world.sampling, not lacks)
            yield apply(ended, heard_once(world.track, event, step, rules), rules)
    if world.loading >= 0:
        loaded = replace(world, loading=-1, version=world.loading)
        yield apply(loaded, heard_once(world.track, core.Loaded(world.loading), step, rules), rules)
    if world.stop_left:
        stopped = replace(world, stop_left=0, is_stopped=True)
        yield apply(stopped, step(world.track, core.EndSampling(), rules), rules)


def heard_once(track: Track, event: core.Event, step: Step, rules: TrackRules) -> core.Result:
    """The end of a batch or of a load that is reported for another one changes nothing."""
    other = replace(event, **{"batch": 9} if isinstance(event, core.Sampled) else {"version": 9})
    assert step(track, other, rules) == (track, ()), f"{other} counts"
    return step(track, event, rules)


def walk(step: Step, rules: TrackRules, resumed: int = 0) -> list[World]:
    """From the begin, or from a checkpoint after `resumed` iterations."""
    first = World(waits_for="sync", trained=resumed, batches=tuple((i + 1, i) for i in range(resumed)))
    track, _ = step(first.track, core.TrackResumed(resumed), rules)
    begun = step(track, core.VersionPublished(resumed), rules)
    if not rules.has_engines:
        first, begun = replace(first, waits_for="", doing=ASK), (track, ())
    todo = [apply(first, begun, rules)]
    seen, ends = set(todo), []
    while todo:
        world = todo.pop()
        is_over = world.doing == DONE and not world.sampling and world.loading < 0
        if is_over:
            ends.append(world)
        calm = replace(world, stop_left=0, lacks_left=0)
        assert is_over or any(True for _ in moves(calm, step, rules)), f"stuck: {world}"
        after = [each for each in moves(world, step, rules) if each not in seen]
        seen.update(after)
        todo.extend(after)
    return ends


@pytest.mark.parametrize("rules", [TURNS, ONE, TWO, HELD_BACK])
def test_no_order_of_events_breaks_the_two_tracks(rules: TrackRules) -> None:
    ends = walk(core.step, rules)
    finished = [world for world in ends if world.trained == rules.total_iterations]
    assert finished, "some runs train everything"
    assert [world for world in ends if world.trained < rules.total_iterations], "some are stopped"
    assert any(world.overlapped for world in finished) == bool(rules.ahead), "tracks overlap with credit only"
    ages = {age for world in finished for age in ages_of(world)}
    assert ages == set(range(min(rules.ahead, rules.max_age) + 1))


@pytest.mark.parametrize("resumed", [0, 2])
def test_without_engines_batches_are_there_when_training_asks(resumed: int) -> None:
    ends = walk(core.step, GIVEN, resumed)
    finished = [world for world in ends if world.trained == GIVEN.total_iterations]
    assert finished and not any(world.overlapped or world.version >= 0 for world in ends)


def waits_for_weights(track, event, rules):
    return core.step(track, event, replace(rules, has_engines=True))


def test_a_planted_wait_for_weights_is_caught() -> None:
    with pytest.raises(AssertionError):
        walk(waits_for_weights, GIVEN)


@pytest.mark.parametrize("rules", [TURNS, ONE, TWO])
def test_a_run_that_resumes_goes_on_after_its_checkpoint(rules: TrackRules) -> None:
    finished = [w for w in walk(core.step, rules, 2) if w.trained == rules.total_iterations]
    assert any(world.overlapped for world in finished) == bool(rules.ahead)


def forgets_what_is_sampled(track, event, rules):
    after, actions = core.step(track, event, rules)
    return (replace(after, sampled=0) if isinstance(event, core.TrackResumed) else after), actions


def forgets_what_was_wanted(track, event, rules):
    after, actions = core.step(track, event, rules)
    return (replace(after, wanted=0) if isinstance(event, core.TrackResumed) else after), actions


def test_a_planted_mistake_at_a_resume_is_caught() -> None:
    with pytest.raises(AssertionError):
        walk(forgets_what_is_sampled, ONE, 2)
    _, actions = core.step(resumed(forgets_what_was_wanted), core.Loaded(2), ONE)
    assert not actions
    _, actions = core.step(resumed(core.step), core.Loaded(2), ONE)
    assert actions == (core.SampleBatch(3, 2),), "the credit counts from the checkpoint"


def resumed(step: Step) -> Track:
    track, _ = step(Track(), core.TrackResumed(2), ONE)
    return step(track, core.VersionPublished(2), ONE)[0]


def ages_of(world: World) -> set[int]:
    return {batch - 1 - version for batch, version in world.batches}


def test_with_credit_the_next_batch_is_sampled_while_this_one_is_trained() -> None:
    """In steady state: one batch ahead, sampled by the version before."""
    rules = replace(ONE, total_iterations=9)
    track = Track(wanted=3, sampled=3, version=2, published=2)
    after, actions = core.step(replace(track, sampled=2, sampling=3), core.Sampled(3, True), rules)
    assert actions == (core.SampleBatch(4, 2),)
    after, actions = core.step(after, core.WantPublishing(), rules)
    assert actions == (core.Grant(),)
    after, actions = core.step(after, core.VersionPublished(3), rules)
    assert actions == (core.Grant(),), "training continues; engines load at the end of their batch"
    after, actions = core.step(after, core.Sampled(4, True), rules)
    assert actions == (core.LoadVersion(3),)
    after, actions = core.step(after, core.WantBatch(4), rules)
    assert actions == (core.Grant(),)
    _, actions = core.step(after, core.Loaded(3), rules)
    assert actions == (core.SampleBatch(5, 3),)


def loads_during_a_batch(track, event, rules):
    after, actions = core.step(replace(track, sampling=0), event, rules)
    return (after, actions) if isinstance(event, core.VersionPublished) else core.step(track, event, rules)


def publishes_while_engines_load(track, event, rules):
    if isinstance(event, core.WantPublishing):
        return replace(track, is_publishing=True), (core.Grant(),)
    return core.step(track, event, rules)


def loads_what_is_being_changed(track, event, rules):
    return core.step(replace(track, is_publishing=False), event, rules)


def ignores_the_age(track, event, rules):
    return core.step(track, event, replace(rules, max_age=9))


def ignores_the_credit(track, event, rules):
    return core.step(track, event, replace(rules, ahead=rules.ahead + 1, max_age=9))


def counts_a_batch_that_lacks_groups(track, event, rules):
    if isinstance(event, core.Sampled):
        event = replace(event, is_whole=True)
    return core.step(track, event, rules)


def goes_on_after_a_stop(track, event, rules):
    return core.step(track, None if isinstance(event, core.EndSampling) else event, rules)


def counts_any_end(track, event, rules):
    if isinstance(event, core.Sampled) and track.sampling:
        event = replace(event, batch=track.sampling)
    return core.step(track, event, rules)


def validates_beside_a_batch(track, event, rules):
    if isinstance(event, core.WantQuiet) and not track.is_stopped:
        return replace(track, is_quiet=True), (core.Grant(),)
    return core.step(track, event, rules)


def forgets_who_waits(track, event, rules):
    after, actions = core.step(track, event, rules)
    if isinstance(event, core.Loaded):
        return after, tuple(a for a in actions if not isinstance(a, core.Grant))
    return after, actions


def samples_with_any_weights(track, event, rules):
    """Does not load what is published before the next batch."""
    after, actions = core.step(track, event, rules)
    if any(isinstance(action, core.LoadVersion) for action in actions) and track.version >= 0:
        return core.step(replace(track, version=track.published), event, rules)
    return after, actions


@pytest.mark.parametrize(
    "wrong",
    [
        loads_during_a_batch, publishes_while_engines_load, loads_what_is_being_changed, ignores_the_age,
        ignores_the_credit, counts_a_batch_that_lacks_groups, goes_on_after_a_stop, counts_any_end,
        validates_beside_a_batch, forgets_who_waits, samples_with_any_weights,
    ],
)  # fmt: skip
def test_a_planted_mistake_is_caught(wrong: Step) -> None:
    with pytest.raises(AssertionError):
        for rules in (TURNS, ONE, TWO, HELD_BACK):
            walk(wrong, rules)
