"""Every order in which answers of nodes, acts of the leader, requests to stop and losses of nodes can come.

Three settings: slabs that change hands on two nodes over two iterations; one trainer node with two engine
nodes, of which two may be lost at any moment, dead or only standing still, and join again; and one node that
saves each of three iterations, or by time, whose uploads end or fail at any moment, are reported twice, and
late.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.protocol.walked_values import Remembered, changed
from yatt.core.phases import phases
from yatt.core.phases.nodeset import NodeSet
from yatt.core.phases.phases import Phase, PhasePart, Program, RunState
from yatt.core.phases.saving import MAX_FAILURES, NO_SAVES

PROGRAM = Program(
    nodes=frozenset({0, 1}),
    trainer_nodes=frozenset({0, 1}),
    total_iterations=2,
    save_every=2,
    validate_every=0,
    validates=True,
    num_scorings=1,
)
ELASTIC = Program(
    nodes=frozenset({0, 1, 2}),
    trainer_nodes=frozenset({0}),
    pools={"rollout": frozenset({1, 2}), "genrm:judge": frozenset({2})},
    total_iterations=1,
    save_every=0,
    validate_every=0,
    validates=False,
    num_scorings=0,
)
JOINING = replace(ELASTIC, pools={"rollout": frozenset({1, 2})})
STAYING = replace(JOINING, is_static=True, total_iterations=2)
STATIC = replace(ELASTIC, is_static=True, total_iterations=2, save_every=1)
SAVING = Program(
    nodes=frozenset({0}),
    trainer_nodes=frozenset({0}),
    total_iterations=3,
    save_every=1,
    validate_every=0,
    validates=False,
    num_scorings=0,
    exports=True,
)
SPLIT = replace(PROGRAM, num_scorings=2, total_iterations=1, save_every=0, validates=False)
"""Batches are scored meanwhile, or roles take turns, as the leader chooses for each one."""

GIVEN = replace(
    PROGRAM, save_every=1, validate_every=1, num_scorings=0, exports=True, is_static=True, has_engines=False
)
EVALUATED = Program(
    nodes=frozenset({0, 1, 2}),
    trainer_nodes=frozenset({0}),
    pools={"rollout": frozenset({0, 1, 2}), "genrm:judge": frozenset({1, 2})},
    total_iterations=0,
    save_every=0,
    validate_every=0,
    validates=True,
    num_scorings=1,
    exports=True,
    trains=False,
)
"""Prompts on one node, and engines of which each role has its turn."""

TIMED = replace(SAVING, save_every=0, save_every_s=1.0, exports=False)
PLAIN = replace(SAVING, exports=False)
LATEST_S = 2
"""Acts of the timed walk take no time or a second, together at most so long."""

Step = Callable[[RunState, phases.Event, Program], phases.Result]
NEEDS_TRAINER = {Phase.BUILD, Phase.TRAIN, Phase.SAVE, Phase.PUBLISH, Phase.EXPORT}
OF_LEADER = (Phase.JOIN, Phase.EXPORT)  # in an evaluation
OF_TRAINING = {Phase.PUBLISH, Phase.ROLLOUT, Phase.TRAIN, Phase.SAVE, Phase.COMMIT}
OF_ENGINES = {Phase.PUBLISH, Phase.SYNC, Phase.SCORE}
TRAINER, ENGINES, JUDGES = "trainer", "engines", "judges"


@dataclass(frozen=True)
class World:
    state: RunState
    holder: tuple[str, ...] = ("", "")  # which kind of role holds each node
    orders: frozenset[phases.PhaseOrder] = frozenset()  # sent, not carried out yet
    mail: frozenset[phases.OrderAnswered] = frozenset()  # answers under way; each may arrive more than once
    acting: phases.Act | None = None
    done: frozenset[tuple[int, int]] = frozenset()  # (node, seq) of orders carried out, of late
    lost: frozenset[int] = frozenset()
    lose_left: int = 0
    join_left: int = 0
    lives: tuple[int, ...] = (1, 1, 1)  # newest of each node
    preparing: frozenset[tuple[int, int]] = frozenset()  # (node, life) of newcomers that start their workers
    ready: frozenset[tuple[int, int]] = frozenset()  # that have said so
    new: frozenset[int] = frozenset()  # nodes that were admitted and have entered no phase yet
    again_left: int = 1
    unscored: tuple[int, ...] = ()  # scoring phases that the batch has still to go through, in order
    has_turned: bool = False
    stop_left: int = 1
    acts_after_stop: tuple[Phase, ...] = ()
    fails_after_stop: int = 0
    trained: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()
    in_flight: int = 0
    committed: tuple[int, ...] = ()
    fail_left: int = 0
    give_left: int = 0  # uploads that may still be given up, after a request to stop
    kept: tuple[int, ...] = ()  # on the nodes' disks
    now_s: int = 0
    taken_s: int = 0
    is_save_due: bool = False
    exported: bool = False
    validated: tuple[int, ...] = ()  # to the end
    end: phases.End | None = None


def kind_of(phase: Phase, node: int, program: Program) -> str:
    if not program.has_engines:
        return TRAINER
    if program.pools and program.trains:
        return TRAINER if node in program.trainer_nodes else ENGINES
    if phase in NEEDS_TRAINER and program.trains:
        return TRAINER
    return JUDGES if phase is Phase.SCORE else ENGINES


def apply(world: World, program: Program, result: phases.Result) -> World:
    state, actions = result
    world = changed(world, state=state)
    for action in actions:
        match action:
            case phases.PhaseOrder():
                check_order(world, action, program)
                world = changed(world, orders=world.orders | {action})
            case phases.Act():
                world = begin_act(world, action, program)
            case phases.BreakOff():
                world = changed(world, acting=None)
            case phases.Exclude() | phases.Prepare() | phases.Admit():
                world = AT_MEMBERS[type(action)](world, action)
            case phases.PostponeSave():
                assert action.in_flight == world.in_flight, "a save is postponed for nothing"
            case phases.End():
                world = changed(world, end=action)
    return world


def excluded(world: World, action: phases.Exclude) -> World:
    its = (action.node, action.life)
    if its in world.preparing | world.ready:
        return changed(world, preparing=world.preparing - {its}, ready=world.ready - {its})
    assert action.node not in world.lost, f"{action} twice"
    return changed(world, lost=world.lost | {action.node}, new=world.new - {action.node})


def prepare(world: World, action: phases.Prepare) -> World:
    assert action.node in world.lost, f"{action}: the former process takes part still"
    assert all(node != action.node for node, _ in world.preparing | world.ready), f"{action}: two newcomers"
    return changed(world, preparing=world.preparing | {(action.node, action.life)})


def admit(world: World, action: phases.Admit) -> World:
    """A newcomer takes part from now on; its slabs were granted while it prepared."""
    its = (action.node, action.life)
    assert its in world.ready, f"{action}, which is not ready"
    assert action.life == world.lives[action.node], f"{action}, which is over"
    acting = world.acting is not None and world.acting.phase
    assert acting is not Phase.SCORE, f"{action} with engines that sample, while judges score"
    holder = tuple(ENGINES if node == action.node else held for node, held in enumerate(world.holder))
    return changed(
        world, holder=holder, lost=world.lost - {action.node}, ready=world.ready - {its},
        new=world.new | {action.node},
    )  # fmt: skip


AT_MEMBERS: dict[type, Callable[[World, Any], World]] = {
    phases.Exclude: excluded, phases.Prepare: prepare, phases.Admit: admit,
}  # fmt: skip


def check_order(world: World, order: phases.PhaseOrder, program: Program) -> None:
    assert order.node not in world.lost, f"{order} to a node that is lost"
    if order.part is PhasePart.ENTER:
        for node in program.nodes - world.lost - world.new:
            assert (node, order.seq - 1) in world.done, f"{order} before node {node} has prepared"


def begin_act(world: World, act: phases.Act, program: Program) -> World:
    there = program.nodes - world.lost
    assert there >= program.trainer_nodes, f"{act.phase} acts without a trainer node"
    for block in program.blocks:
        assert len(block & there) in (0, len(block)), f"{act.phase} acts with a part of {sorted(block)}"
    for role, pool in program.pools.items():
        assert pool & there or world.state.stop, f"{act.phase} acts without anybody to run {role}"
    for node in there if act.phase not in ((Phase.JOIN,) if program.trains else OF_LEADER) else ():
        held = world.holder[node]
        assert held == kind_of(act.phase, node, program), f"{act.phase} acts, node {node} held by '{held}'"
        is_entered = (node, act.seq - 1) in world.done or (program.is_static and act.phase is not Phase.BUILD)
        is_entered |= node in world.new and act.phase is Phase.PUBLISH  # its first work: it takes the weights
        assert is_entered, f"{act.phase} acts before node {node} has entered"
    assert program.has_engines or act.phase not in OF_ENGINES, f"{act.phase} acts, and nobody is there for it"
    world = changed(world, new=frozenset())
    if world.state.stop:
        after_stop = (*world.acts_after_stop, act.phase)
        saves = (Phase.SAVE,) * len(after_stop)
        assert after_stop == saves and len(saves) <= 1 + world.fails_after_stop, (
            f"the work after a request to stop is not bounded: {after_stop}"
        )
        world = changed(world, acts_after_stop=after_stop)
    if act.phase is Phase.TRAIN:
        assert world.trained == tuple(range(1, act.iteration)), f"iteration {act.iteration} out of turn"
        world = changed(world, trained=(*world.trained, act.iteration))
    if act.phase is Phase.SAVE:
        assert not world.in_flight, "two saves are in flight"
        assert act.iteration not in world.committed, f"iteration {act.iteration} is saved twice"
        assert world.trained[-1:] == (act.iteration,), "a save of something that was not trained"
    assert program.trains or act.phase not in OF_TRAINING, f"{act.phase} acts in an evaluation"
    if act.phase is Phase.EXPORT:
        is_due = world.committed[-1:] == (program.total_iterations,) if program.trains else world.validated
        assert not world.exported and is_due, "an early export"
    has_turns = program is SPLIT or not program.trains
    return changed(world, acting=act, unscored=unscored_after(world, act) if has_turns else ())


def unscored_after(world: World, act: phases.Act) -> tuple[int, ...]:
    if act.phase is not Phase.SCORE:
        assert not world.unscored, f"{act.phase} before the batch is scored"
        return ()
    assert world.unscored[:1] == (act.scoring,), f"a scoring phase out of turn: {act}, {world.unscored}"
    return world.unscored[1:]


def carry_out(world: World, order: phases.PhaseOrder, program: Program) -> World:
    holder = list(world.holder)
    wanted = kind_of(order.phase, order.node, program)
    if order.part is PhasePart.PREPARE:
        holder[order.node] = wanted if holder[order.node] == wanted else ""
    else:
        others = {
            held for node, held in enumerate(holder)
            if held and held != kind_of(order.phase, node, program) and node not in world.lost
        }  # fmt: skip
        is_heard = order.node not in world.lost  # else its engines get no requests
        assert not (others and is_heard), f"node {order.node} enters {order.phase}, others hold {others}"
        holder[order.node] = wanted
    answered = phases.OrderAnswered(order.node, order.seq)
    return changed(
        world, holder=tuple(holder), orders=world.orders - {order}, mail=world.mail | {answered},
        done=world.done | {(order.node, order.seq)},
    )  # fmt: skip


def losses(world: World, step: Step, program: Program) -> Iterator[World]:
    """Each node may die with all it was told and said, or stand still and say it later."""
    for node in program.nodes - world.lost if world.lose_left else ():
        gone = world.lost | program.block_of(node)
        lost = changed(world, lose_left=world.lose_left - 1)
        dead = changed(
            lost,
            orders=frozenset(o for o in world.orders if o.node not in gone),
            mail=frozenset(a for a in world.mail if a.node not in gone),
        )
        fatal = program.cause_without(gone, is_stopping=bool(world.state.stop))
        for before in (lost, dead):
            event = phases.NodeLost(node, "is gone", world.lives[node])
            after = apply(before, program, step(world.state, event, program))
            # If the run ends, the next start has the rest of a block.
            noticed = world.lost | {node} if fatal else gone
            assert after.lost == noticed, f"the loss of node {node} was not noticed"
            has_failed = after.end is not None and after.end.exit_code == 1
            assert has_failed == bool(fatal), f"lost {sorted(after.lost)}: {after.end}, but '{fatal}'"
            yield after


def returns(world: World, step: Step, program: Program) -> Iterator[World]:
    """A later process of an engine node may knock at any moment, before its loss is noticed too, get ready at
    any later one, and be lost before it takes part; the loss of a former process may be reported again."""
    for node in program.nodes - program.trainer_nodes if world.join_left else ():
        life = world.lives[node] + 1
        lives = tuple(life if index == node else its for index, its in enumerate(world.lives))
        former = changed(
            world, join_left=world.join_left - 1, lives=lives,
            orders=frozenset(o for o in world.orders if o.node != node),
        )  # fmt: skip
        knock = phases.NodeKnocked(node, life)
        if world.state.stop:
            assert step(world.state, knock, program) == (world.state, ()), "a newcomer while the run stops"
            continue
        after = heard(former, knock, step, program)
        if node not in world.lost and program.cause_without(world.lost | program.block_of(node)):
            assert after.end is not None, "the loss of the last node of a role was not noticed"
        else:
            assert (node, life) in after.preparing, f"the knock of node {node} was not heard"
            late = step(after.state, phases.NodeLost(node, "is gone", life - 1), program)
            assert late == (after.state, ()), "the loss of a former process is not one of the newcomer"
        yield after
    for its in world.preparing:
        prepared = changed(world, preparing=world.preparing - {its}, ready=world.ready | {its})
        yield heard(prepared, phases.NodeReady(*its), step, program)
    for node, life in (world.preparing | world.ready) if world.lose_left else ():
        lost = changed(world, lose_left=world.lose_left - 1)
        after = apply(lost, program, step(world.state, phases.NodeLost(node, "is gone", life), program))
        assert (node, life) not in after.preparing | after.ready, f"newcomer {node} was not lost"
        assert node in after.lost and after.end is None, "the loss of a newcomer costs nothing else"
        yield after


def ends_of_act(world: World, act: phases.Act, step: Step, program: Program) -> Iterator[World]:
    if program is SPLIT and act.phase is Phase.ROLLOUT:
        yield from ends_of_rollout(world, act, step)
        return
    may_lack = world.again_left and act.phase is Phase.SCORE and program.trains
    for again in (False, True) if may_lack else (False,):
        done = changed(world, acting=None, again_left=world.again_left - again)
        if act.phase is Phase.VALIDATE:
            unscored = () if program.trains else tuple(range(program.num_scorings))
            done = changed(done, validated=(*world.validated, act.iteration), unscored=unscored)
        if act.phase is Phase.SAVE:
            done = changed(done, in_flight=act.iteration, taken=(*world.taken, act.iteration))
        if act.phase is Phase.EXPORT:
            done = changed(done, exported=True)
        for at_s in range(world.now_s, 1 + min(LATEST_S, world.now_s + 1)) if program.save_every_s else (0,):
            event = phases.Acted(act.seq, again=again, at_s=at_s)
            after = apply(in_time(done, act, at_s), program, step(world.state, event, program))
            if program.save_every_s and act.phase is Phase.TRAIN and not after.state.stop:
                check_save_by_time(after, program)
            yield after


def ends_of_rollout(world: World, act: phases.Act, step: Step) -> Iterator[World]:
    """The batch is scored already, or in turns; the leader says the same for all of a batch."""
    for takes_turns in (False, True) if world.again_left else (world.has_turned,):
        for again in (False, True) if world.again_left and not takes_turns else (False,):
            done = changed(
                world, acting=None, again_left=world.again_left - again, has_turned=takes_turns,
                unscored=(0, 1) if takes_turns else (),
            )  # fmt: skip
            event = phases.Acted(act.seq, again=again, takes_turns=takes_turns)
            yield apply(done, SPLIT, step(world.state, event, SPLIT))


def in_time(world: World, act: phases.Act, at_s: int) -> World:
    """Counts the time since the last host copy, apart from the rules."""
    if act.phase in (Phase.BUILD, Phase.SAVE):
        return changed(world, now_s=at_s, taken_s=at_s, is_save_due=False)
    is_due = act.phase is Phase.TRAIN and at_s - world.taken_s >= TIMED.save_every_s
    return changed(world, now_s=at_s, is_save_due=world.is_save_due or is_due)


def check_save_by_time(world: World, program: Program) -> None:
    """After an iteration: it is saved if a save is due and none is in flight, and only then."""
    is_last = world.trained[-1] == program.total_iterations
    saves = world.state.phase is Phase.SAVE
    assert saves == ((world.is_save_due or is_last) and not world.in_flight), f"a save by time: {world}"


def ends_of_upload(world: World, step: Step, program: Program) -> Iterator[World]:
    """The save in flight is committed, or fails, at any moment; each may be reported again."""
    for iteration in {world.in_flight} - {0}:
        done = changed(world, in_flight=0, committed=(*world.committed, iteration))
        yield heard(done, phases.Committed(iteration), step, program)
        if world.fail_left:
            is_late = int(bool(world.state.stop))
            failed = changed(
                world, in_flight=0, fail_left=world.fail_left - 1, is_save_due=True,
                fails_after_stop=world.fails_after_stop + is_late,
            )  # fmt: skip
            yield heard(failed, phases.SaveFailed(iteration, "the disk is full"), step, program)


def late_ends(world: World, step: Step, program: Program) -> Iterator[World]:
    """After a request to stop the save in flight is given up, or is kept on the nodes' disks."""
    if not (world.state.stop and world.give_left and world.in_flight):
        return
    given_up = changed(
        world, in_flight=0, give_left=world.give_left - 1, fails_after_stop=world.fails_after_stop + 1
    )
    yield heard(given_up, phases.SaveGivenUp(world.in_flight, is_kept=False), step, program)
    kept = changed(world, in_flight=0, kept=(*world.kept, world.in_flight))
    yield heard(kept, phases.SaveGivenUp(world.in_flight, is_kept=True), step, program)


def heard(world: World, event: phases.Event, step: Step, program: Program) -> World:
    """After this event came twice."""
    once = apply(world, program, step(world.state, event, program))
    again, actions = step(once.state, event, program)
    assert (again, actions) == (once.state, ()), f"{event} counts twice"
    return once


def moves(world: World, step: Step, program: Program) -> Iterator[World]:
    if world.end is not None:
        return
    for order in world.orders:
        yield carry_out(world, order, program)
    is_once = program in (JOINING, STAYING, EVALUATED) or bool(program.blocks)  # else that walk takes hours
    for letter in world.mail:
        for kept in (world.mail, world.mail - {letter})[is_once:]:
            yield apply(changed(world, mail=kept), program, step(world.state, letter, program))
    if world.acting is not None:
        yield from ends_of_act(world, world.acting, step, program)
    yield from ends_of_upload(world, step, program)
    yield from late_ends(world, step, program)
    if world.stop_left:
        stopped = changed(world, stop_left=0)
        yield apply(stopped, program, step(world.state, phases.StopWanted("preempted"), program))
    yield from losses(world, step, program)
    yield from returns(world, step, program)


def walk(
    step: Step,
    program: Program = PROGRAM,
    *,
    lose_left: int = 0,
    join_left: int = 0,
    stop_left: int = 1,
    fail_left: int = 0,
    give_left: int = 0,
) -> list[World]:
    step = Remembered(step)
    nothing = step.one(RunState(phase=Phase.ENDED, part=PhasePart.ACT, seq=0, owed=NodeSet()))
    first = World(
        nothing, holder=("",) * len(program.nodes), lives=(1,) * len(program.nodes),
        lose_left=lose_left, stop_left=stop_left,
        join_left=join_left, fail_left=fail_left, give_left=give_left,
    )  # fmt: skip
    todo = [apply(first, program, step.result(phases.start_phases(program)))]
    seen, ends = {key_of_world(todo[0])}, []
    kept_turns = 2 if len(program.nodes) == 2 else 1
    while todo:
        world = todo.pop()
        if world.end is not None:
            ends.append(world)
            check_end(world, program)
        assert world.end or moves_on(world), f"stuck: {world}"
        for made in moves(world, step, program):
            after = without_old_mail(made, kept_turns)
            key = key_of_world(after)
            if key not in seen:
                seen.add(key)
                todo.append(after)
    return ends


def key_of_world(world: World) -> tuple[object, ...]:
    """Equal for equal worlds of one walk: its `Remembered` makes equal states one object."""
    return (id(world.state), *list(vars(world).values())[1:])


def moves_on(world: World) -> bool:
    """Whether something may happen that moves the run on, and is not a disturbance."""
    is_busy = world.acting is not None or world.in_flight > 0
    return is_busy or bool(world.orders or world.mail or world.preparing)


def without_old_mail(world: World, turns: int) -> World:
    """Old mail is kept for a turn or two only, so that the walk ends."""
    oldest = world.state.seq - turns
    mail, done = [m for m in world.mail if m.seq < oldest], [d for d in world.done if d[1] < oldest]
    if not (mail or done):
        return world
    return changed(world, mail=world.mail.difference(mail), done=world.done.difference(done))


def check_end(world: World, program: Program) -> None:
    assert world.end is not None
    if world.end.exit_code == 1:
        has_given_up = world.state.saving.failures == MAX_FAILURES
        useless = frozenset().union(*(program.block_of(node) for node in world.lost))
        assert program.cause_without(useless) or has_given_up, "a run that can go on does"
        return
    if world.end.exit_code == 0:
        assert len(world.trained) == program.total_iterations, (
            "a run that says it is finished trained everything"
        )
        assert not program.validates or world.validated[-1:] == (program.total_iterations,), (
            "a run that says it is finished validated what it ends with"
        )
        assert world.exported == program.exports, "a run that says it is finished wrote its model"
        assert world.trained[-1:] == world.committed[-1:], "a run that says it is finished is in the store"
    saved = (world.committed[-1:], world.kept[-1:])
    assert world.trained[-1:] in saved, f"the end of the run is not saved: {world}"
    assert not world.in_flight, "the run ends during an upload"


def test_no_order_of_events_breaks_a_run() -> None:
    ends = walk(phases.step)
    codes = {world.end.exit_code for world in ends if world.end}
    assert codes == {0, 75}, "both ways to end were reached"
    assert any(world.again_left == 0 for world in ends), "resampling was reached"


def test_no_order_of_events_breaks_a_run_whose_batches_may_be_in_turns() -> None:
    ends = walk(phases.step, SPLIT, stop_left=0)
    assert {world.end.exit_code for world in ends if world.end} == {0}
    assert {(world.again_left, world.has_turned) for world in ends} == set(
        itertools.product((0, 1), (True, False))
    )


def scores_every_batch(state, event, program):
    if isinstance(event, phases.Acted):
        event = replace(event, takes_turns=True)
    return phases.step(state, event, program)


def scores_in_one_phase(state, event, program):
    if isinstance(event, phases.Acted) and state.phase is Phase.SCORE:
        program = replace(program, num_scorings=1)
    return phases.step(state, event, program)


def trains_unscored(state, event, program):
    if isinstance(event, phases.Acted):
        event = replace(event, takes_turns=False)
    return phases.step(state, event, program)


@pytest.mark.parametrize("wrong", [scores_every_batch, scores_in_one_phase, trains_unscored])
def test_a_planted_mistake_about_turns_is_caught(wrong: Step) -> None:
    with pytest.raises(AssertionError):
        walk(wrong, SPLIT, stop_left=0)


def enters_before_all_prepared(state, event, program):
    if isinstance(event, phases.OrderAnswered) and event.seq == state.seq and state.part is PhasePart.PREPARE:
        state = replace(state, owed=NodeSet({event.node}))
    return phases.step(state, event, program)


def counts_late_answers(state, event, program):
    if isinstance(event, phases.OrderAnswered):
        event = phases.OrderAnswered(event.node, state.seq)
    return phases.step(state, event, program)


def stops_without_saving(state, event, program):
    after, actions = phases.step(state, event, program)
    if isinstance(event, phases.StopWanted) and after.phase is Phase.SAVE:
        return replace(after, phase=Phase.ENDED), (phases.End(75, "preempted"),)
    return after, actions


def acts_before_it_stops(state, event, program):
    """As the first version of the rules did: a request in PREPARE or ENTER waited for the whole act."""
    after, actions = phases.step(replace(state, stop=""), event, program)
    stop = state.stop or getattr(event, "reason", "")
    if (
        state.phase is Phase.SCORE
        and state.part is not PhasePart.ACT
        and isinstance(event, phases.OrderAnswered)
    ):
        return replace(after, stop=stop), actions
    return phases.step(state, event, program)


def finishes_without_validation(state, event, program):
    after, actions = phases.step(state, event, program)
    if after.phase is Phase.ENDED and after.trained == program.total_iterations:
        return after, (*actions[:-1], phases.End(0, "finished"))
    return after, actions


def acts_twice(state, event, program):
    after, actions = phases.step(state, event, program)
    trains = [a for a in actions if isinstance(a, phases.Act) and a.phase is Phase.TRAIN]
    return after, (*actions, *trains)


@pytest.mark.parametrize(
    "wrong",
    [
        enters_before_all_prepared, counts_late_answers, stops_without_saving, acts_before_it_stops,
        acts_twice, finishes_without_validation,
    ],
)  # fmt: skip
def test_a_planted_mistake_is_caught(wrong: Step) -> None:
    with pytest.raises(AssertionError):
        walk(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(("lose_left", "stop_left"), [(2, 0), (1, 1)])
def test_no_order_of_losses_breaks_a_run(lose_left: int, stop_left: int) -> None:
    ends = walk(phases.step, ELASTIC, lose_left=lose_left, stop_left=stop_left)
    reached = {(world.end.exit_code, world.lost) for world in ends if world.end}
    survived = {frozenset(), frozenset({1})}
    fatal = {frozenset({0}), frozenset({2})}
    fatal |= {frozenset({1, 2}), frozenset({0, 1})} if lose_left == 2 else set()
    saved = survived | ({frozenset({2})} if stop_left else set())  # a run that stops needs no engines
    assert {lost for code, lost in reached if code == 0} == saved
    assert {lost for code, lost in reached if code == 75} == (saved if stop_left else set())
    assert {lost for code, lost in reached if code == 1} == fatal


@pytest.mark.parametrize(("lose_left", "stop_left"), [(2, 0), (1, 1)])
def test_no_order_of_losses_breaks_a_run_whose_slabs_stay(lose_left: int, stop_left: int) -> None:
    ends = walk(phases.step, STATIC, lose_left=lose_left, stop_left=stop_left)
    reached = {(world.end.exit_code, world.lost) for world in ends if world.end}
    assert (0, frozenset({1})) in reached, "a run goes on without an engine node"
    assert {code for code, _ in reached} == ({0, 1, 75} if stop_left else {0, 1})


@pytest.mark.parametrize(("lose_left", "fail_left", "give_left"), [(1, 0, 0), (0, 2, 1)])
def test_no_order_of_events_breaks_a_run_without_engines(
    lose_left: int, fail_left: int, give_left: int
) -> None:
    ends = walk(phases.step, GIVEN, lose_left=lose_left, fail_left=fail_left, give_left=give_left)
    codes = {world.end.exit_code for world in ends if world.end}
    assert codes == {0, 75} | ({1} if lose_left else set())
    finished = [world for world in ends if world.end and not world.end.exit_code]
    assert all(world.validated == (0, 1, 2) for world in finished)
    assert any(world.taken == (1, 2) for world in finished), "each iteration may be saved"


def publishes_all_the_same(state, event, program):
    return phases.step(state, event, replace(program, has_engines=True))


def validates_engines_only(state, event, program):
    return phases.step(state, event, replace(program, validates=False))


@pytest.mark.parametrize("wrong", [publishes_all_the_same, validates_engines_only])
def test_a_planted_mistake_without_engines_is_caught(wrong: Step) -> None:
    with pytest.raises(AssertionError):
        walk(wrong, GIVEN)


@pytest.mark.parametrize(("lose_left", "join_left", "stop_left"), [(2, 0, 0), (1, 1, 0), (1, 0, 1)])
def test_no_order_of_events_breaks_an_evaluation(lose_left: int, join_left: int, stop_left: int) -> None:
    ends = walk(phases.step, EVALUATED, lose_left=lose_left, join_left=join_left, stop_left=stop_left)
    reached = {(world.end.exit_code, world.lost) for world in ends if world.end}
    assert {lost for code, lost in reached if code == 0} == {frozenset(), frozenset({1}), frozenset({2})}
    assert (1, frozenset({0})) in reached, "nobody else has its prompts"
    assert ((75, frozenset()) in reached) == bool(stop_left)
    finished = [world for world in ends if world.end and not world.end.exit_code]
    assert not join_left or any(world.lives != (1, 1, 1) and not world.lost for world in finished)
    assert not any(world.trained or world.taken for world in ends)


def trains_all_the_same(state, event, program):
    return phases.step(state, event, replace(program, trains=True))


def leaves_judges_out(state, event, program):
    return phases.step(state, event, replace(program, num_scorings=0))


def keeps_result(state, event, program):
    return phases.step(state, event, replace(program, exports=False))


def admits_with_what_it_prepared(state, event, program):
    """A newcomer that gets ready while GenRMs score holds what it would sample with."""
    if isinstance(event, phases.NodeReady) and state.phase is Phase.SCORE:
        after, actions = phases.step(replace(state, phase=Phase.VALIDATE), event, program)
        return replace(after, phase=state.phase), actions
    return phases.step(state, event, program)


@pytest.mark.parametrize("wrong", [trains_all_the_same, leaves_judges_out, keeps_result])
def test_a_planted_mistake_in_an_evaluation_is_caught(wrong: Step) -> None:
    with pytest.raises(AssertionError):
        walk(wrong, EVALUATED, stop_left=0)


def test_a_newcomer_that_is_admitted_with_what_it_prepared_is_caught() -> None:
    with pytest.raises(AssertionError):
        walk(admits_with_what_it_prepared, EVALUATED, lose_left=0, join_left=1, stop_left=0)


def enters_never(state, event, program):
    """Takes the first phase for one of those without orders."""
    after, actions = phases.step(state, event, program)
    if after.phase is Phase.BUILD and after.part is PhasePart.PREPARE:
        after = replace(after, part=PhasePart.ACT, owed=NodeSet())
        return after, (phases.Act(Phase.BUILD, 0, 0, after.seq),)
    return after, actions


def test_a_planted_mistake_about_slabs_that_stay_is_caught() -> None:
    with pytest.raises(AssertionError):
        walk(enters_never, STATIC, lose_left=1, stop_left=0)


@pytest.mark.parametrize(
    ("program", "lose_left", "join_left", "stop_left"),
    [
        pytest.param(JOINING, 2, 1, 0, marks=pytest.mark.slow),
        pytest.param(JOINING, 1, 1, 1, marks=pytest.mark.slow),
        (STAYING, 1, 2, 0),
        (STAYING, 2, 1, 0),
        (STAYING, 1, 1, 1),
    ],
)
def test_no_order_of_returns_breaks_a_run(
    program: Program, lose_left: int, join_left: int, stop_left: int
) -> None:
    ends = walk(phases.step, program, lose_left=lose_left, join_left=join_left, stop_left=stop_left)
    finished = [world for world in ends if world.end and world.end.exit_code == 0]
    assert any(max(world.lives) > 1 and not world.lost for world in finished), "a newcomer was admitted"
    assert any(world.lost and world.ready for world in finished), "one came too late for the last weights"


def admits_when_it_knocks(state, event, program):
    after, actions = phases.step(state, event, program)
    if isinstance(event, phases.NodeKnocked) and after.newcomers:
        after = replace(after, lost=after.lost - {event.node}, newcomers=frozenset())
        return after, (*actions, phases.Admit(event.node, event.life))
    return after, actions


def admits_at_any_act(state, event, program):
    after, actions = phases.step(state, event, program)
    acts = [a for a in actions if isinstance(a, phases.Act)]
    ready = [n for n in after.newcomers if n.is_ready]
    if acts and ready:
        new = replace(after, lost=after.lost - {n.node for n in ready}, newcomers=frozenset())
        return new, (*(phases.Admit(n.node, n.life) for n in ready), *actions)
    return after, actions


def admits_once_only(state, event, program):
    if isinstance(event, phases.NodeKnocked) and state.lives:
        return state, ()
    return phases.step(state, event, program)


def takes_a_former_loss_for_the_newcomers(state, event, program):
    if isinstance(event, phases.NodeLost):
        event = replace(event, life=state.life_of(event.node))
    return phases.step(state, event, program)


def keeps_a_newcomer_that_is_lost(state, event, program):
    after, actions = phases.step(state, event, program)
    if isinstance(event, phases.NodeLost) and state.newcomer(event.node):
        return replace(after, newcomers=state.newcomers), actions
    return after, actions


def loses_no_former_process(state, event, program):
    after, actions = phases.step(state, event, program)
    if isinstance(event, phases.NodeKnocked) and event.node not in state.lost:
        return after, tuple(a for a in actions if not isinstance(a, phases.Exclude))
    return after, actions


def never_admits(state, event, program):
    if isinstance(event, phases.NodeReady):
        return state, ()
    return phases.step(state, event, program)


def ends_with_a_newcomer(state, event, program):
    after, actions = phases.step(state, event, program)
    if isinstance(event, phases.NodeLost) and state.newcomer(event.node):
        return replace(after, phase=Phase.ENDED), (*actions, phases.End(1, "is gone"))
    return after, actions


@pytest.mark.parametrize(
    "wrong",
    [
        admits_when_it_knocks, admits_at_any_act, admits_once_only, takes_a_former_loss_for_the_newcomers,
        keeps_a_newcomer_that_is_lost, loses_no_former_process, never_admits, ends_with_a_newcomer,
    ],
)  # fmt: skip
def test_a_planted_mistake_about_returns_is_caught(wrong: Step) -> None:
    program = STAYING if wrong is never_admits else JOINING
    with pytest.raises(AssertionError):
        ends = walk(wrong, program, lose_left=2, join_left=2, stop_left=0)
        assert any(max(w.lives) > 1 and not w.lost for w in ends if w.end and not w.end.exit_code)


def waits_for_the_lost(state, event, program):
    after, actions = phases.step(state, event, program)
    if isinstance(event, phases.NodeLost) and event.node in state.owed and after.phase is not Phase.ENDED:
        return replace(state, lost=after.lost), actions[:1]
    return after, actions


def counts_answers_of_the_lost(state, event, program):
    if isinstance(event, phases.OrderAnswered) and event.node in state.lost and state.owed:
        event = phases.OrderAnswered(min(state.owed), event.seq)
    return phases.step(state, event, program)


def goes_on_without_a_role(state, event, program):
    return phases.step(state, event, replace(program, pools={"rollout": program.pools["rollout"]}))


def goes_on_without_the_trainer(state, event, program):
    return phases.step(state, event, replace(program, trainer_nodes=frozenset()))


def gives_up_for_any_loss(state, event, program):
    return phases.step(state, event, replace(program, trainer_nodes=program.nodes))


def orders_the_lost(state, event, program):
    after, actions = phases.step(state, event, program)
    return replace(after, lost=frozenset()), actions


def enters_without_asking_who_is_left(state, event, program):
    if isinstance(event, phases.NodeLost) and state.part is PhasePart.PREPARE:
        state = replace(state, owed=NodeSet({event.node}))
    return phases.step(state, event, program)


@pytest.mark.parametrize(
    "wrong",
    [
        waits_for_the_lost, counts_answers_of_the_lost, goes_on_without_a_role, goes_on_without_the_trainer,
        gives_up_for_any_loss, orders_the_lost, enters_without_asking_who_is_left,
    ],
)  # fmt: skip
def test_a_planted_mistake_about_losses_is_caught(wrong: Step) -> None:
    with pytest.raises(AssertionError):
        walk(wrong, ELASTIC, lose_left=2, stop_left=0)


def test_who_is_absent_from_the_start_is_asked_nothing() -> None:
    program = replace(ELASTIC, absent=frozenset({1}))
    state, _ = phases.start_phases(program)
    after, actions = phases.step(state, phases.Acted(state.seq), program)
    assert [order.node for order in actions if isinstance(order, phases.PhaseOrder)] == [0, 2]
    assert after.owed == {0, 2}


def test_a_failure_ends_the_run_with_its_exit_code() -> None:
    state, _ = phases.start_phases(PROGRAM)
    _, actions = phases.step(state, phases.Failure("trainer-n0r0 ended", 1), PROGRAM)
    assert actions == (phases.End(1, "trainer-n0r0 ended"),)


def test_a_resumed_run_goes_on_after_its_checkpoint() -> None:
    state = RunState(phase=Phase.BUILD, part=PhasePart.ACT, seq=3, owed=NodeSet())
    after, _ = phases.step(state, phases.Acted(3, resumed=1), PROGRAM)
    assert (after.trained, after.saving.committed, after.phase) == (1, 1, Phase.PUBLISH)


def test_no_end_of_an_upload_breaks_a_run() -> None:
    ends = walk(phases.step, SAVING, fail_left=MAX_FAILURES)
    assert {world.end.exit_code for world in ends if world.end} == {0, 1, 75}
    finished = {(world.taken, world.committed) for world in ends if world.end and world.end.exit_code == 0}
    assert ((1, 2, 3), (1, 2, 3)) in finished, "each iteration is saved when uploads are quick"
    assert ((1, 3), (1, 3)) in finished, "a slow upload postpones the next save"
    assert any(taken.count(3) > 1 for taken, _ in finished), "a failed last save is taken again"


def test_no_end_of_an_upload_after_a_request_to_stop_breaks_a_run() -> None:
    ends = walk(phases.step, SAVING, fail_left=1, give_left=2)
    ends += walk(phases.step, PLAIN, fail_left=1, give_left=1)
    codes = {(world.end.exit_code, bool(world.kept)) for world in ends if world.end}
    assert codes >= {(0, False), (75, False), (75, True)}, "each end was reached"
    last = {world.kept[-1] for world in ends if world.kept and world.trained[-1:] == world.kept[-1:]}
    assert last == {1, 2, 3}, "each iteration was the one that was kept"


def takes_what_is_kept_for_a_commit(state, event, program):
    if isinstance(event, phases.SaveGivenUp) and event.is_kept:
        event = phases.Committed(event.iteration)
    return phases.step(state, event, program)


def takes_what_was_given_up_for_saved(state, event, program):
    if isinstance(event, phases.SaveGivenUp):
        event = replace(event, is_kept=True)
    return phases.step(state, event, program)


def saves_what_is_kept_again(state, event, program):
    if isinstance(event, phases.SaveGivenUp):
        event = replace(event, is_kept=False)
    return phases.step(state, event, program)


@pytest.mark.parametrize(
    "wrong", [takes_what_is_kept_for_a_commit, takes_what_was_given_up_for_saved, saves_what_is_kept_again]
)
def test_a_planted_mistake_about_given_up_saves_is_caught(wrong: Step) -> None:
    with pytest.raises(AssertionError):
        walk(wrong, PLAIN, fail_left=1, give_left=1)


def test_a_run_that_resumed_from_a_local_commit_saves_it_first() -> None:
    state = RunState(phase=Phase.BUILD, part=PhasePart.ACT, seq=3, owed=NodeSet())
    after, _ = phases.step(state, phases.Acted(3, resumed=2, is_local=True), SAVING)
    assert (after.trained, after.saving.committed, after.phase) == (2, 0, Phase.SAVE)
    saved = replace(after, part=PhasePart.ACT, owed=NodeSet())
    after, _ = phases.step(saved, phases.Acted(saved.seq), SAVING)
    assert (after.saving.in_flight, after.phase) == (2, Phase.PUBLISH)
    stopped, _ = phases.step(
        replace(state, stop="preempted"), phases.Acted(3, resumed=2, is_local=True), SAVING
    )
    assert stopped.phase is Phase.SAVE, "it is not in the store yet"


def ends_without_the_commit(state, event, program):
    after, actions = phases.step(state, event, program)
    if after.phase is Phase.COMMIT and state.phase is not Phase.COMMIT:
        return phases.step(replace(after, saving=replace(after.saving, in_flight=0)), event, program)
    return after, actions


def counts_any_commit(state, event, program):
    if isinstance(event, phases.Committed):
        state = replace(state, saving=replace(state.saving, in_flight=event.iteration))
    return phases.step(state, event, program)


def forgets_what_was_postponed(state, event, program):
    after, actions = phases.step(state, event, program)
    return replace(after, saving=replace(after.saving, is_due=False, failures=0)), actions


def takes_two_at_once(state, event, program):
    if isinstance(event, phases.Acted) and state.phase is Phase.TRAIN:
        state = replace(state, saving=replace(state.saving, in_flight=0))
    return phases.step(state, event, program)


def calls_a_taken_save_a_commit(state, event, program):
    after, actions = phases.step(state, event, program)
    if isinstance(event, phases.Acted) and state.phase is Phase.SAVE:
        return replace(after, saving=replace(NO_SAVES, committed=after.trained)), actions
    return after, actions


def exports_before_the_commit(state, event, program):
    after, actions = phases.step(state, event, program)
    if after.phase is Phase.COMMIT and after.trained == program.total_iterations and not after.stop:
        return after, (*actions, phases.Act(Phase.EXPORT, 0, after.trained, after.seq))
    return after, actions


@pytest.mark.parametrize(
    "wrong",
    [
        ends_without_the_commit, counts_any_commit, takes_two_at_once, calls_a_taken_save_a_commit,
        exports_before_the_commit, forgets_what_was_postponed,
    ],
)  # fmt: skip
def test_a_planted_mistake_about_saves_is_caught(wrong: Step) -> None:
    with pytest.raises(AssertionError):
        ends = walk(wrong, SAVING, fail_left=MAX_FAILURES)
        assert 1 in {world.end.exit_code for world in ends if world.end}


def test_no_order_of_events_breaks_saves_by_time() -> None:
    ends = walk(phases.step, TIMED, fail_left=1)
    finished = {world.taken for world in ends if world.end and world.end.exit_code == 0}
    assert {(3,), (1, 3), (2, 3), (1, 2, 3)} <= finished, "iterations are saved when their time has come"


def never_saves_by_time(state, event, program):
    return phases.step(state, event, replace(program, save_every_s=0.0))


def saves_by_time_always(state, event, program):
    return phases.step(state, event, replace(program, save_every=1))


def counts_from_the_commit(state, event, program):
    after, actions = phases.step(state, event, program)
    if isinstance(event, phases.Acted) and state.phase is Phase.SAVE:
        return replace(after, saving=replace(after.saving, taken_s=state.saving.taken_s)), actions
    return after, actions


def counts_from_the_start_of_the_clock(state, event, program):
    after, actions = phases.step(state, event, program)
    if isinstance(event, phases.Acted) and state.phase is Phase.BUILD:
        return replace(after, saving=replace(after.saving, taken_s=0.0)), actions
    return after, actions


@pytest.mark.parametrize(
    "wrong",
    [
        never_saves_by_time, saves_by_time_always, counts_from_the_commit, forgets_what_was_postponed,
        counts_from_the_start_of_the_clock,
    ],
)  # fmt: skip
def test_a_planted_mistake_about_saves_by_time_is_caught(wrong: Step) -> None:
    with pytest.raises(AssertionError):
        walk(wrong, TIMED, fail_left=1)


SYMPTOM = phases.Failure("trainer-n0r0: connection closed by peer", 1, is_symptom=True)
DEATH = phases.NodeLost(1, "was not heard of for 10 s")


def states_reached() -> list[RunState]:
    """Every state of a run of two trainer nodes that is under way."""
    seen: set[RunState] = set()

    def noted(state: RunState, event: phases.Event, program: Program) -> phases.Result:
        seen.add(state)
        return phases.step(state, event, program)

    walk(noted)
    return [state for state in seen if state.phase is not Phase.ENDED]


def end_of(state: RunState, events: list[phases.Event]) -> phases.End | None:
    """How the run ends when these events come, in this order."""
    for event in events:
        state, actions = phases.step(state, event, PROGRAM)
        for action in actions:
            if isinstance(action, phases.End):
                return action
    return None


def test_a_dead_node_is_named_in_every_order_of_its_death_and_what_followed_from_it() -> None:
    states = states_reached()
    assert len(states) > 50
    for state in states:
        others = [phases.OrderAnswered(node, state.seq) for node in state.owed] + [phases.Acted(state.seq)]
        cause = "node1 has trainer ranks, and the run cannot do without them"
        named = phases.End(1, f"node1 was not heard of for 10 s; {cause}")
        assert end_of(state, [DEATH, SYMPTOM, phases.PatienceOver()]) == named
        assert end_of(state, [SYMPTOM, *others, SYMPTOM, DEATH, phases.PatienceOver()]) == named
        assert end_of(state, [SYMPTOM, *others, phases.StopWanted("preempted")]) is None, "it waits"
        alone = end_of(state, [SYMPTOM, *others, phases.PatienceOver()])
        assert alone == phases.End(1, SYMPTOM.error), "no cause came"
        mistake = phases.Failure("mend the reward", 2)
        assert end_of(state, [SYMPTOM, mistake]) == phases.End(2, "mend the reward")
        like_one = replace(mistake, is_symptom=True)  # a rank refused what the run file says
        assert end_of(state, [like_one]) == phases.End(2, "mend the reward")
        assert end_of(state, [phases.PatienceOver()]) is None


def test_an_engine_node_that_dies_is_no_cause() -> None:
    state, _ = phases.start_phases(ELASTIC)
    state, _ = phases.step(state, SYMPTOM, ELASTIC)
    state, actions = phases.step(state, phases.NodeLost(1, "is gone"), ELASTIC)
    assert [type(action) for action in actions] == [phases.Exclude]
    _, actions = phases.step(state, phases.PatienceOver(), ELASTIC)
    assert actions == (phases.End(1, SYMPTOM.error),)
