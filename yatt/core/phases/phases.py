"""The phases of the whole run: a pure state machine over all nodes, stepped by the leader.

A phase has three parts. PREPARE: every node takes its slabs back from roles that are not wanted in the phase
and checks that their memory is free. ENTER: every node grants its slabs to the roles that the phase wants.
ACT: the phase's own work. No node enters before all have prepared, and no work begins before all have
entered, so roles of two different phases never work at the same time. Where no slab ever changes hands and
sampling overlaps with training (`yatt.core.phases.sampling_track`), only BUILD has the first two parts:
training never waits for an engine that is started again.

An answer counts once and only with the seq of its order, so messages may be repeated or late. A wait
that ends without all answers is a `Failure`. A request for an early stop is `StopWanted`: the current
act is cancelled where this is possible, only a save may still begin, unsaved iterations are saved, and
the run ends so that it can be continued.

SAVE takes the host copy of an iteration; it is uploaded in the background while the run continues, and
`Committed` or `SaveFailed` comes at any time (`yatt.core.phases.saving`). COMMIT waits for the save in
flight: at the end of the run, at an early stop, and before the last iteration is saved. It transfers no
slabs. At an early stop the upload may be given up instead (`SaveGivenUp`). A run that resumed from a local
commit saves first.

A failure may be a symptom of another one (`Failure.is_symptom`): when a trainer node dies, ranks on the other
nodes fail too, and may be reported first. A symptom waits for its cause for a limited time.

An evaluation (`Program.trains` is false) has neither weights to publish nor anything to save: BUILD, SYNC,
VALIDATE, SCORE with each GenRM that takes turns, EXPORT of the result.

A node that only runs engines may be lost (`NodeLost`): it gets no more orders and its answers are not
awaited, and the run continues while every role has a node left. The loss of a trainer node is a failure.
A later process of its controller may take its place (`NodeKnocked`). It starts its workers beside everything
else, and is admitted when PUBLISH begins to act: it takes these weights, and takes part in all that follows.
In an evaluation it is admitted while VALIDATE acts, or else before the next barrier.
"""

from dataclasses import replace

from yatt.core.phases.nodeset import NodeSet
from yatt.core.phases.phase_types import (
    Act as Act,
    Acted as Acted,
    Action as Action,
    Admit as Admit,
    AwaitCause as AwaitCause,
    BreakOff as BreakOff,
    Committed as Committed,
    End as End,
    Event as Event,
    Exclude as Exclude,
    Failure as Failure,
    Newcomer as Newcomer,
    NodeKnocked as NodeKnocked,
    NodeLost as NodeLost,
    NodeReady as NodeReady,
    OrderAnswered as OrderAnswered,
    PatienceOver as PatienceOver,
    Phase as Phase,
    PhaseOrder as PhaseOrder,
    PhasePart as PhasePart,
    PostponeSave as PostponeSave,
    Prepare as Prepare,
    Program as Program,
    Result as Result,
    RunState as RunState,
    SaveFailed as SaveFailed,
    SaveGivenUp as SaveGivenUp,
    StopWanted as StopWanted,
)
from yatt.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_USER_MISTAKE, EXIT_WILL_CONTINUE

_FOLLOWING = {
    Phase.JOIN: Phase.BUILD,
    Phase.BUILD: Phase.PUBLISH,
    Phase.SAVE: Phase.PUBLISH,
    Phase.PUBLISH: Phase.SYNC,
}
"""What always comes after these phases, unless the run has to stop."""

_INTERRUPTIBLE = (Phase.ROLLOUT, Phase.SCORE, Phase.VALIDATE)


def start_phases(program: Program) -> Result:
    """Returns the initial state and its first actions."""
    nothing = RunState(phase=Phase.ENDED, part=PhasePart.ACT, seq=0, owed=NodeSet(), lost=program.absent)
    return _begin(nothing, Phase.JOIN, program)


def step(state: RunState, event: Event, program: Program) -> Result:
    """Handles an event: returns the next state and the actions, in order. Ignores unexpected events."""
    if state.phase is Phase.ENDED:
        return state, ()
    match event:
        case Failure() | PatienceOver():
            return _failing(state, event)
        case NodeLost():
            return _lost(state, event, program)
        case _ if state.symptom:
            return state, ()
        case _:
            return _undisturbed(state, event, program)


def _undisturbed(state: RunState, event: Event, program: Program) -> Result:
    """Handles the events of a run without failures."""
    match event:
        case StopWanted(reason):
            return _stop(state, reason, program)
        case Committed() | SaveFailed() | SaveGivenUp():
            return _save_ended(state, event, program)
        case OrderAnswered(node, seq):
            return _answered(state, node, seq, program)
        case NodeKnocked():
            return _knocked(state, event, program)
        case NodeReady(node, life):
            after = _ready(state, Newcomer(node, life))
            samples = state.phase is Phase.VALIDATE and state.part is PhasePart.ACT
            return _admitting(after, program) if samples and not program.trains else (after, ())
        case Acted() if event.seq == state.seq and state.part is PhasePart.ACT:
            return _acted(state, event, program)
        case _:
            return state, ()


def _failing(state: RunState, event: Failure | PatienceOver) -> Result:
    """Handles failures. Of several symptoms it keeps the first one, which is nearest to the cause. A user's
    mistake is never a symptom."""
    if isinstance(event, Failure) and event.is_symptom and event.exit_code != EXIT_USER_MISTAKE:
        return (state, ()) if state.symptom else (replace(state, symptom=event), (AwaitCause(),))
    failure = event if isinstance(event, Failure) else state.symptom
    if failure is None:
        return state, ()
    ended = replace(state, phase=Phase.ENDED, failure=failure.error)
    return ended, (End(failure.exit_code, failure.error),)


def _begin(state: RunState, phase: Phase, program: Program, scoring: int = 0) -> Result:
    if phase is Phase.ENDED:
        is_finished = state.is_finished(program)
        end = End(EXIT_FINISHED, "finished") if is_finished else End(EXIT_WILL_CONTINUE, state.stop)
        return replace(state, phase=Phase.ENDED), (end,)
    now = replace(state, phase=phase, seq=state.seq + 1, scoring=scoring)
    is_static = program.is_static or (phase is Phase.EXPORT and not program.trains)
    if phase in (Phase.JOIN, Phase.COMMIT) or (is_static and phase is not Phase.BUILD):
        now = replace(now, part=PhasePart.ACT, owed=NodeSet())  # no slab is transferred
        return (now, ()) if phase is Phase.COMMIT else _acting(now, program)
    now, admits = (now, ()) if program.trains else _admitting(now, program)
    now = replace(now, part=PhasePart.PREPARE, owed=NodeSet(program.nodes - now.lost))
    return now, (*admits, *_orders(now))


def _orders(state: RunState) -> tuple[Action, ...]:
    return tuple(PhaseOrder(node, state.part, state.phase, state.scoring, state.seq) for node in state.owed)


def _acting(state: RunState, program: Program) -> Result:
    """Begins the act of the phase. PUBLISH admits the newcomers that are ready, before its work."""
    act = Act(state.phase, state.scoring, state.iteration, state.seq)
    admitted, admits = _admitting(state, program) if state.phase is Phase.PUBLISH else (state, ())
    return admitted, (*admits, act)


def _admitting(state: RunState, program: Program) -> Result:
    """Admits the newcomers that are ready."""
    ready = _admissible(state, program)
    lost = state.lost - {each.node for each in ready}
    admitted = replace(state, lost=lost, newcomers=state.newcomers - set(ready))
    return admitted, tuple(Admit(each.node, each.life) for each in ready)


def _admissible(state: RunState, program: Program) -> list[Newcomer]:
    """Returns the newcomers that are ready, but not those that are of no use without a node that is not."""
    ready = {each.node: each for each in state.newcomers if each.is_ready}
    away = state.lost - ready.keys()
    return [ready[node] for node in sorted(ready) if not program.block_of(node) & away]


def _answered(state: RunState, node: int, seq: int, program: Program) -> Result:
    if seq != state.seq or node not in state.owed:
        return state, ()
    return _owing(replace(state, owed=state.owed.without(node)), program)


def _owing(state: RunState, program: Program) -> Result:
    """Begins the next part if no answer is missing."""
    owed = state.owed
    if owed:
        return state, ()
    if state.part is PhasePart.PREPARE:
        if state.stop and state.phase is not Phase.SAVE:
            return _begin(state, _stopping(state), program)
        entering = replace(
            state, part=PhasePart.ENTER, seq=state.seq + 1, owed=NodeSet(program.nodes - state.lost)
        )
        return entering, _orders(entering)
    if state.stop and state.phase is not Phase.SAVE:
        return _begin(state, _stopping(state), program)
    return _acting(replace(state, part=PhasePart.ACT, seq=state.seq + 1, owed=owed), program)


def _knocked(state: RunState, event: NodeKnocked, program: Program) -> Result:
    """Handles a newcomer: the former process of its node is over, noticed or not."""
    is_engine_node = event.node in program.nodes - program.trainer_nodes
    former = state.life_of(event.node)
    if not is_engine_node or event.life <= former or state.stop:
        return state, ()
    after, actions = _lost(state, NodeLost(event.node, "ended, and was started again", former), program)
    if after.phase is Phase.ENDED:
        return after, actions
    lives = frozenset(each for each in after.lives if each[0] != event.node) | {(event.node, event.life)}
    newcomers = after.newcomers | {Newcomer(event.node, event.life)}
    return replace(after, lives=lives, newcomers=newcomers), (
        *actions,
        Prepare(event.node, event.life),
    )


def _ready(state: RunState, newcomer: Newcomer) -> RunState:
    if newcomer not in state.newcomers:
        return state
    ready = replace(newcomer, is_ready=True)
    return replace(state, newcomers=state.newcomers - {newcomer} | {ready})


def _lost(state: RunState, event: NodeLost, program: Program) -> Result:
    if event.node not in program.nodes or event.life != state.life_of(event.node):
        return state, ()
    newcomer = state.newcomer(event.node)
    if newcomer is not None:
        exclude = Exclude(event.node, event.why, goes_on=True, life=event.life)
        return replace(state, newcomers=state.newcomers - {newcomer}), (exclude,)
    if event.node in state.lost:
        return state, ()
    gone = program.block_of(event.node) - state.lost
    without = replace(state, lost=state.lost | gone)
    cause = program.cause_without(without.lost, is_stopping=bool(state.stop))
    exclude = Exclude(event.node, event.why, goes_on=not cause, life=event.life)
    if cause:  # the next start must not take the rest of the block for lost
        error = f"node{event.node} {event.why}; {cause}"
        return replace(without, phase=Phase.ENDED, failure=error), (exclude, End(EXIT_FAILED, error))
    why = f"runs an engine together with node{event.node}, which {event.why}"
    rest = sorted(gone - {event.node})
    excludes = exclude, *(Exclude(node, why, goes_on=True, life=state.life_of(node)) for node in rest)
    without = replace(without, owed=NodeSet(node for node in state.owed if node not in gone))
    if without.owed == state.owed or state.symptom:
        return without, excludes
    after, actions = _owing(without, program)
    return after, (*excludes, *actions)


def _acted(state: RunState, event: Acted, program: Program) -> Result:
    match state.phase:
        case Phase.BUILD:
            committed = 0 if event.is_local else event.resumed
            after = replace(state, trained=event.resumed, saving=state.saving.resumed(committed, event.at_s))
        case Phase.TRAIN:
            saving = state.saving.trained(event.at_s, program.save_every_s)
            after = replace(state, trained=state.trained + 1, saving=saving)
        case Phase.SAVE:
            after = replace(state, saving=state.saving.taken(state.trained, event.at_s))
        case Phase.VALIDATE:
            after = replace(state, validated=state.trained)
        case Phase.EXPORT:
            after = replace(state, exported=True)
        case _:
            after = state
    phase, scoring = _next(state, event, after, program)
    is_postponed = state.phase is Phase.TRAIN and phase is Phase.PUBLISH and _wants_save(after, program)
    if phase is Phase.PUBLISH and not program.has_engines:
        phase = _after_sync(after, program)
    if is_postponed:
        postponed = replace(after, saving=after.saving.postponed())
        now, actions = _begin(postponed, phase, program, scoring)
        return now, (PostponeSave(after.trained, after.saving.in_flight), *actions)
    return _begin(after, phase, program, scoring)


def _save_ended(state: RunState, event: Committed | SaveFailed | SaveGivenUp, program: Program) -> Result:
    """Handles the end of an upload: only COMMIT waits for it."""
    if isinstance(event, SaveGivenUp):
        saving = state.saving.given_up(event.iteration, is_kept=event.is_kept)
    else:
        saving = state.saving.ended(event.iteration, is_committed=isinstance(event, Committed))
    if saving == state.saving:
        return state, ()
    after = replace(state, saving=saving)
    if isinstance(event, SaveFailed) and saving.has_given_up:
        error = f"{saving.failures} saves in a row have failed; the last one: {event.error}"
        return replace(after, phase=Phase.ENDED, failure=error), (End(EXIT_FAILED, error),)
    if state.phase is not Phase.COMMIT:
        return after, ()
    return _begin(after, _stopping(after) if after.stop else _closing(after, program), program)


def _stopping(state: RunState) -> Phase:
    """Returns the next phase of a run that has to stop."""
    if state.saving.in_flight:
        return Phase.COMMIT
    saved = max(state.saving.committed, state.saving.kept)
    return Phase.SAVE if state.trained > saved else Phase.ENDED


def _closing(state: RunState, program: Program) -> Phase:
    """Returns the next phase after the last iteration."""
    waiting = _stopping(state)
    if waiting is not Phase.ENDED:
        return waiting
    return Phase.EXPORT if program.exports and not state.exported else Phase.ENDED


def _wants_save(state: RunState, program: Program) -> bool:
    """Whether the state after the last training has to be saved."""
    return program.is_save_due(state.trained) or state.saving.is_due


def _after_training(state: RunState, program: Program) -> Phase:
    if not _wants_save(state, program):
        return Phase.PUBLISH
    if not state.saving.in_flight:
        return Phase.SAVE
    return Phase.COMMIT if state.trained >= program.total_iterations else Phase.PUBLISH


def _next(state: RunState, event: Acted, after: RunState, program: Program) -> tuple[Phase, int]:
    if after.stop:
        return _stopping(after), 0
    match state.phase:
        case Phase.BUILD if event.is_local:
            return Phase.SAVE, 0
        case Phase.BUILD if not program.trains:
            return Phase.SYNC, 0
        case phase if phase in _FOLLOWING:
            return _FOLLOWING[phase], 0
        case Phase.TRAIN:
            return _after_training(after, program), 0
        case Phase.SYNC | Phase.VALIDATE if program.trains or state.phase is Phase.SYNC:
            return _after_sync(after, program), 0
        case Phase.EXPORT:
            return _closing(after, program), 0
        case _:
            return _after_sampling(after, event, program)


def _after_sync(state: RunState, program: Program) -> Phase:
    """Returns the next phase of engines, or of a run without any, that have the newest weights."""
    if program.is_validation_due(state.trained) and state.validated < state.trained:
        return Phase.VALIDATE
    return Phase.ROLLOUT if state.trained < program.total_iterations else _closing(state, program)


def _after_sampling(state: RunState, event: Acted, program: Program) -> tuple[Phase, int]:
    done = state.scoring + 1 if state.phase is Phase.SCORE else 0
    if done < program.num_scorings and (event.takes_turns or state.phase is Phase.SCORE):
        return Phase.SCORE, done
    if not program.trains:
        return _closing(state, program), 0
    return (Phase.ROLLOUT if event.again else Phase.TRAIN), 0


def _stop(state: RunState, reason: str, program: Program) -> Result:
    if state.stop:
        return state, ()
    requested = replace(state, stop=reason)
    if state.phase not in _INTERRUPTIBLE or state.part is not PhasePart.ACT:
        return requested, ()
    after, actions = _begin(requested, _stopping(requested), program)
    return after, (BreakOff(state.seq), *actions)
