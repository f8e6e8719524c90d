"""Every order in which two nodes, the leader's acts and a wish to stop can come, over two iterations."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from yatt.core import phases
from yatt.core.phases import Part, Phase, Program, RunState

PROGRAM = Program(
    nodes=frozenset({0, 1}),
    owners=frozenset({0, 1}),
    total_iterations=2,
    save_every=2,
    validate_every=0,
    validates=True,
    num_scorings=1,
)
Step = Callable[[RunState, phases.Event, Program], phases.Result]
NEEDS_TRAINER = {Phase.BUILD, Phase.TRAIN, Phase.SAVE, Phase.PUBLISH}
TRAINER, ENGINES, JUDGES = "trainer", "engines", "judges"


@dataclass(frozen=True)
class World:
    state: RunState
    holder: tuple[str, ...] = ("", "")  # which kind of role holds each node
    orders: frozenset[phases.Order] = frozenset()  # sent, not carried out yet
    mail: frozenset[phases.Event] = frozenset()  # answers under way; each may arrive more than once
    acting: phases.Act | None = None
    again_left: int = 1
    stop_left: int = 1
    trained: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()
    end: phases.End | None = None


def kind_of(phase: Phase) -> str:
    if phase in NEEDS_TRAINER:
        return TRAINER
    return JUDGES if phase is Phase.SCORE else ENGINES


def apply(world: World, state: RunState, actions: tuple[phases.Action, ...]) -> World:
    world = replace(world, state=state)
    for action in actions:
        match action:
            case phases.Order():
                world = replace(world, orders=world.orders | {action})
            case phases.Act():
                world = begin_act(world, action)
            case phases.BreakOff():
                world = replace(world, acting=None)
            case phases.End():
                world = replace(world, end=action)
    return world


def begin_act(world: World, act: phases.Act) -> World:
    if act.phase is not Phase.JOIN:
        kinds = set(world.holder)
        assert kinds == {kind_of(act.phase)}, f"{act.phase} acts while the nodes are held by {kinds}"
    if act.phase is Phase.TRAIN:
        assert world.trained == tuple(range(1, act.iteration)), f"iteration {act.iteration} out of turn"
        world = replace(world, trained=(*world.trained, act.iteration))
    if act.phase is Phase.SAVE:
        assert act.iteration not in world.saved, f"iteration {act.iteration} is saved twice"
        assert world.trained[-1:] == (act.iteration,), "a save of something that was not trained"
        world = replace(world, saved=(*world.saved, act.iteration))
    return replace(world, acting=act)


def carry_out(world: World, order: phases.Order) -> World:
    holder = list(world.holder)
    wanted = kind_of(order.phase)
    if order.part is Part.PREPARE:
        holder[order.node] = wanted if holder[order.node] == wanted else ""
    else:
        others = {kind for kind in holder if kind and kind != wanted}
        assert not others, f"node {order.node} enters {order.phase} while another is held by {others}"
        holder[order.node] = wanted
    answered = phases.Answered(order.node, order.seq)
    return replace(world, holder=tuple(holder), orders=world.orders - {order}, mail=world.mail | {answered})


def moves(world: World, step: Step) -> Iterator[World]:
    if world.end is not None:
        return
    for order in world.orders:
        yield carry_out(world, order)
    for letter in world.mail:
        for kept in (world.mail, world.mail - {letter}):
            yield apply(replace(world, mail=kept), *step(world.state, letter, PROGRAM))
    if world.acting is not None:
        for again in (False, True) if world.again_left and world.acting.phase is Phase.SCORE else (False,):
            done = replace(world, acting=None, again_left=world.again_left - again)
            acted = phases.Acted(world.acting.seq, again=again)
            yield apply(done, *step(world.state, acted, PROGRAM))
    if world.stop_left:
        stopped = replace(world, stop_left=0)
        yield apply(stopped, *step(world.state, phases.StopWanted("preempted"), PROGRAM))


def walk(step: Step) -> list[World]:
    first = World(RunState(phase=Phase.ENDED, part=Part.ACT, seq=0, owed=frozenset()))
    todo = [apply(first, *phases.start(PROGRAM))]
    seen, ends = set(todo), []
    while todo:
        world = todo.pop()
        if world.end is not None:
            ends.append(world)
            check_end(world)
        after = [w for w in (replace(m, mail=fresh(m)) for m in moves(world, step)) if w not in seen]
        assert world.end or after or any(True for _ in moves(world, step)), f"stuck: {world}"
        seen.update(after)
        todo.extend(after)
    return ends


def fresh(world: World) -> frozenset[phases.Event]:
    """Old mail is kept for two turns only, so that the walk ends."""
    return frozenset(m for m in world.mail if isinstance(m, phases.Answered) and m.seq >= world.state.seq - 2)


def check_end(world: World) -> None:
    assert world.end is not None
    if world.end.exit_code == 0:
        assert world.trained == (1, 2), "a run that says it is finished trained everything"
    assert world.trained[-1:] == world.saved[-1:], f"the end of the run is not saved: {world}"


def test_no_order_of_events_breaks_a_run() -> None:
    ends = walk(phases.step)
    codes = {world.end.exit_code for world in ends if world.end}
    assert codes == {0, 75}, "both ways to end were reached"
    assert any(world.again_left == 0 for world in ends), "resampling was reached"


def enters_before_all_prepared(state, event, program):
    if isinstance(event, phases.Answered) and event.seq == state.seq and state.part is Part.PREPARE:
        state = replace(state, owed=frozenset({event.node}))
    return phases.step(state, event, program)


def counts_late_answers(state, event, program):
    if isinstance(event, phases.Answered):
        event = phases.Answered(event.node, state.seq)
    return phases.step(state, event, program)


def stops_without_saving(state, event, program):
    after, actions = phases.step(state, event, program)
    if isinstance(event, phases.StopWanted) and after.phase is Phase.SAVE:
        return replace(after, phase=Phase.ENDED), (phases.End(75, "preempted"),)
    return after, actions


def acts_twice(state, event, program):
    after, actions = phases.step(state, event, program)
    trains = [a for a in actions if isinstance(a, phases.Act) and a.phase is Phase.TRAIN]
    return after, (*actions, *trains)


@pytest.mark.parametrize(
    "wrong", [enters_before_all_prepared, counts_late_answers, stops_without_saving, acts_twice]
)
def test_a_planted_mistake_is_caught(wrong: Step) -> None:
    with pytest.raises(AssertionError):
        walk(wrong)


def test_a_failure_ends_the_run_with_its_exit_code() -> None:
    state, _ = phases.start(PROGRAM)
    _, actions = phases.step(state, phases.Failure("trainer-n0r0 ended", 1), PROGRAM)
    assert actions == (phases.End(1, "trainer-n0r0 ended"),)


def test_a_resumed_run_goes_on_after_its_checkpoint() -> None:
    state = RunState(phase=Phase.BUILD, part=Part.ACT, seq=3, owed=frozenset())
    after, _ = phases.step(state, phases.Acted(3, resumed=1), PROGRAM)
    assert (after.trained, after.saved, after.phase) == (1, 1, Phase.PUBLISH)
