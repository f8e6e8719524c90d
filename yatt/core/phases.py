"""The phases of the whole run: a pure state machine over all nodes, stepped by the leader.

A phase has three parts. PREPARE: every node takes its slabs back from roles that are not wanted in
the phase and checks that their memory is free. ENTER: every node grants its slabs to the roles that
the phase wants. ACT: the phase's own work. No node enters before all have prepared, and no work
begins before all have entered, so roles of two different phases never work at the same time.

An answer counts once and only with the seq of its order, so messages may be repeated or late. A wait
that ends without all answers is a `Failure`. A request for an early stop is `StopWanted`: the current
act is cancelled where this is possible, only a save may still begin, unsaved iterations are saved, and
the run ends so that it can be continued.

A failure may be a symptom of another one (`Failure.is_symptom`): when a trainer node dies, ranks on the other
nodes fail too, and may be reported first. A symptom waits for its cause for a limited time.

A node that only runs engines may be lost (`NodeLost`): it gets no more orders and its answers are not
awaited, and the run continues while every role has a node left. The loss of a trainer node is a failure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from yatt.core.nodeset import NodeSet
from yatt.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_USER_MISTAKE, EXIT_WILL_CONTINUE


class Phase(Enum):
    """The current phase of the run."""

    JOIN = "join"
    BUILD = "build"
    ROLLOUT = "rollout"
    SCORE = "score"
    TRAIN = "train"
    SAVE = "save"
    PUBLISH = "publish"
    SYNC = "sync"
    VALIDATE = "validate"
    ENDED = "ended"


class PhasePart(Enum):
    """The parts of a phase."""

    PREPARE = "prepare"
    ENTER = "enter"
    ACT = "act"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Constants of an attempt. Iterations count from 1; 0 is before the first.

    The run cannot continue without its `trainer_nodes`. `pools` maps each engine role to the nodes that can
    run it. `absent` nodes take no part from the start.
    """

    nodes: frozenset[int]
    trainer_nodes: frozenset[int]
    pools: Mapping[str, frozenset[int]] = field(default_factory=dict)
    absent: frozenset[int] = frozenset()
    total_iterations: int
    save_every: int
    validate_every: int
    validates: bool
    num_scorings: int

    def is_save_due(self, iteration: int) -> bool:
        """Whether the state after `iteration` has to be saved."""
        last = iteration == self.total_iterations
        return last or (self.save_every > 0 and iteration % self.save_every == 0)

    def is_validation_due(self, iteration: int) -> bool:
        """Whether the policy after `iteration` has to be validated."""
        edge = iteration in (0, self.total_iterations)
        regular = self.validate_every > 0 and iteration % self.validate_every == 0
        return self.validates and (edge or regular)

    def cause_without(self, lost: frozenset[int]) -> str:
        """Returns why the run cannot continue without these nodes; '' if it can."""
        for node in sorted(lost & self.trainer_nodes):
            return f"node{node} has trainer ranks, and the run cannot do without them"
        for role, pool in self.pools.items():
            if pool <= lost:
                return f"no node is left that can run {role}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of the run. `trained` iterations are done, `saved` of them are committed. `validated`: the number
    of iterations of the policy that this attempt validated last. `owed`: nodes whose answer is awaited."""

    phase: Phase
    part: PhasePart
    seq: int
    owed: NodeSet
    trained: int = 0
    saved: int = 0
    validated: int = -1
    scoring: int = 0
    stop: str = ""
    failure: str = ""
    lost: frozenset[int] = frozenset()
    symptom: "Failure | None" = None
    """A failure that waits for its cause; until then other events are ignored."""

    def is_finished(self, program: Program) -> bool:
        """Whether all iterations and a due validation are done."""
        is_owed = program.is_validation_due(self.trained) and self.validated < self.trained
        return self.trained >= program.total_iterations and not is_owed

    @property
    def iteration(self) -> int:
        """The current iteration in the phases of rollout, scoring and training; else the last trained one."""
        return self.trained + (self.phase in (Phase.ROLLOUT, Phase.SCORE, Phase.TRAIN))


# ---- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OrderAnswered:
    """`node` carried out its order with this `seq`."""

    node: int
    seq: int


@dataclass(frozen=True, slots=True)
class Acted:
    """The act with this `seq` is done. `again`: more must be sampled before training.

    `resumed` is the iteration that BUILD resumed from.
    """

    seq: int
    again: bool = False
    resumed: int = 0


@dataclass(frozen=True, slots=True)
class StopWanted:
    """A request to end early; the run can be continued."""

    reason: str


@dataclass(frozen=True, slots=True)
class Failure:
    """This attempt cannot continue; `exit_code` shows whether another one could.

    `is_symptom`: the failure may follow from a cause that is not known yet.
    """

    error: str
    exit_code: int
    is_symptom: bool = False


@dataclass(frozen=True, slots=True)
class PatienceOver:
    """No cause of the symptom was reported within its time limit."""


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node is lost; `why` is the end of a sentence about it."""

    node: int
    why: str


Event = OrderAnswered | Acted | StopWanted | Failure | NodeLost | PatienceOver

# ---- actions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PhaseOrder:
    """Send PREPARE or ENTER of `phase` to `node`."""

    node: int
    part: PhasePart
    phase: Phase
    scoring: int
    seq: int


@dataclass(frozen=True, slots=True)
class Act:
    """Carry out the phase's own work."""

    phase: Phase
    scoring: int
    iteration: int
    seq: int


@dataclass(frozen=True, slots=True)
class BreakOff:
    """Cancel the act with this `seq`."""

    seq: int


@dataclass(frozen=True, slots=True)
class Exclude:
    """Send no more orders to this node; `goes_on`: whether the run continues without it."""

    node: int
    why: str
    goes_on: bool


@dataclass(frozen=True, slots=True)
class AwaitCause:
    """Wait for the symptom's cause for a limited time, then put `PatienceOver`."""


@dataclass(frozen=True, slots=True)
class End:
    """End the attempt."""

    exit_code: int
    reason: str


Action = PhaseOrder | Act | BreakOff | Exclude | AwaitCause | End
Result = tuple[RunState, tuple[Action, ...]]

_INTERRUPTIBLE = (Phase.ROLLOUT, Phase.SCORE, Phase.VALIDATE)


def start(program: Program) -> Result:
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
        case StopWanted(reason):
            return _stop(state, reason, program)
        case OrderAnswered(node, seq):
            return _answered(state, node, seq, program)
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
    # JOIN transfers no slabs, so it has only the part ACT: all nodes join.
    there = NodeSet(program.nodes - state.lost)
    part, owed = (PhasePart.ACT, NodeSet()) if phase is Phase.JOIN else (PhasePart.PREPARE, there)
    now = replace(state, phase=phase, part=part, seq=state.seq + 1, owed=owed, scoring=scoring)
    if part is PhasePart.ACT:
        return now, (_act(now),)
    return now, _orders(now)


def _orders(state: RunState) -> tuple[Action, ...]:
    return tuple(PhaseOrder(node, state.part, state.phase, state.scoring, state.seq) for node in state.owed)


def _act(state: RunState) -> Act:
    return Act(state.phase, state.scoring, state.iteration, state.seq)


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
    acting = replace(state, part=PhasePart.ACT, seq=state.seq + 1, owed=owed)
    return acting, (_act(acting),)


def _lost(state: RunState, event: NodeLost, program: Program) -> Result:
    if event.node in state.lost or event.node not in program.nodes:
        return state, ()
    without = replace(state, lost=state.lost | {event.node})
    cause = program.cause_without(without.lost)
    exclude = Exclude(event.node, event.why, goes_on=not cause)
    if cause:
        error = f"node{event.node} {event.why}; {cause}"
        return replace(without, phase=Phase.ENDED, failure=error), (exclude, End(EXIT_FAILED, error))
    if event.node not in state.owed or state.symptom:
        return replace(without, owed=state.owed.without(event.node)), (exclude,)
    after, actions = _owing(replace(without, owed=state.owed.without(event.node)), program)
    return after, (exclude, *actions)


def _acted(state: RunState, event: Acted, program: Program) -> Result:
    match state.phase:
        case Phase.BUILD:
            after = replace(state, trained=event.resumed, saved=event.resumed)
        case Phase.TRAIN:
            after = replace(state, trained=state.trained + 1)
        case Phase.SAVE:
            after = replace(state, saved=state.trained)
        case Phase.VALIDATE:
            after = replace(state, validated=state.trained)
        case _:
            after = state
    phase, scoring = _next(state, event, after, program)
    return _begin(after, phase, program, scoring)


def _stopping(state: RunState) -> Phase:
    """Returns the next phase of a run that has to stop."""
    return Phase.SAVE if state.trained > state.saved else Phase.ENDED


def _next(state: RunState, event: Acted, after: RunState, program: Program) -> tuple[Phase, int]:
    if after.stop:
        return _stopping(after), 0
    match state.phase:
        case Phase.JOIN:
            return Phase.BUILD, 0
        case Phase.TRAIN if program.is_save_due(after.trained):
            return Phase.SAVE, 0
        case Phase.BUILD | Phase.TRAIN | Phase.SAVE:
            return Phase.PUBLISH, 0
        case Phase.PUBLISH:
            return Phase.SYNC, 0
        case Phase.SYNC if program.is_validation_due(after.trained):
            return Phase.VALIDATE, 0
        case Phase.SYNC | Phase.VALIDATE:
            return (Phase.ENDED if after.trained >= program.total_iterations else Phase.ROLLOUT), 0
        case _:
            return _after_sampling(state, event, program)


def _after_sampling(state: RunState, event: Acted, program: Program) -> tuple[Phase, int]:
    done = state.scoring + 1 if state.phase is Phase.SCORE else 0
    if done < program.num_scorings:
        return Phase.SCORE, done
    return (Phase.ROLLOUT if event.again else Phase.TRAIN), 0


def _stop(state: RunState, reason: str, program: Program) -> Result:
    if state.stop:
        return state, ()
    requested = replace(state, stop=reason)
    if state.phase not in _INTERRUPTIBLE or state.part is not PhasePart.ACT:
        return requested, ()
    after, actions = _begin(requested, _stopping(requested), program)
    return after, (BreakOff(state.seq), *actions)
