"""What the whole run does next: a pure state machine over all nodes, stepped by the leader.

A phase has three parts. PREPARE: every node takes its slabs back from whoever is not wanted in
the phase and measures that they are free. ENTER: every node grants its slabs to whom the phase
wants. ACT: the phase's own work. No node enters before all have prepared, and nothing acts before
all have entered, so no role of one node ever works beside a role of another phase on another.

An answer counts once and only with the seq it was asked under, so every message may be repeated
or come late. A wait that ends without its answers is a `Failure` like any other. An early stop is a request
(`StopWanted`): the act under way is broken off where it can be, only a save is still begun, what is not saved
is saved, and the run ends so that it can be continued.

A failure may only be what followed from another one (`Failure.is_symptom`): when a trainer node dies, the
ranks on the others fail as well, and may be heard of first. Such a failure waits a while for its cause.

A node that only runs engines may be lost (`NodeLost`): nothing is owed by it or ordered from it any more,
and the run goes on as long as every role has a node left. The loss of any other is a failure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from yatt.core.nodeset import NodeSet
from yatt.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_USER_MISTAKE, EXIT_WILL_CONTINUE


class Phase(Enum):
    """What the run is at."""

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
    """Which part of a phase."""

    PREPARE = "prepare"
    ENTER = "enter"
    ACT = "act"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What is the same all through an attempt. Iterations count from 1; 0 is before the first.

    `trainer_nodes` may not be lost; `pools` are the nodes that can run each engine role; `absent` nodes take
    no part from the start.
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
        """Whether the state after `iteration` is to be saved."""
        last = iteration == self.total_iterations
        return last or (self.save_every > 0 and iteration % self.save_every == 0)

    def is_validation_due(self, iteration: int) -> bool:
        """Whether the policy after `iteration` is to be validated."""
        edge = iteration in (0, self.total_iterations)
        regular = self.validate_every > 0 and iteration % self.validate_every == 0
        return self.validates and (edge or regular)

    def cause_without(self, lost: frozenset[int]) -> str:
        """Why the run cannot do without these nodes, or ''."""
        for node in sorted(lost & self.trainer_nodes):
            return f"node{node} has trainer ranks, and the run cannot do without them"
        for role, pool in self.pools.items():
            if pool <= lost:
                return f"no node is left that can run {role}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where the run is. `trained` iterations are done, `saved` of them are committed; the policy after
    `validated` of them was the last that this attempt validated."""

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
    """A failure that waits for its cause; until then nothing else goes on."""

    def is_finished(self, program: Program) -> bool:
        """Whether nothing is left to do, a due validation included."""
        is_owed = program.is_validation_due(self.trained) and self.validated < self.trained
        return self.trained >= program.total_iterations and not is_owed

    @property
    def iteration(self) -> int:
        """The iteration being worked on while sampling, scoring and training; else the last trained."""
        return self.trained + (self.phase in (Phase.ROLLOUT, Phase.SCORE, Phase.TRAIN))


# ---- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OrderAnswered:
    """`node` did what it was asked under `seq`."""

    node: int
    seq: int


@dataclass(frozen=True, slots=True)
class Acted:
    """The act under `seq` is done. `again`: more must be sampled before training.

    `resumed` is the iteration a BUILD resumed from.
    """

    seq: int
    again: bool = False
    resumed: int = 0


@dataclass(frozen=True, slots=True)
class StopWanted:
    """End early, to be continued."""

    reason: str


@dataclass(frozen=True, slots=True)
class Failure:
    """This attempt cannot go on; `exit_code` says whether another one could.

    `is_symptom`: it may only follow from something that is not known yet.
    """

    error: str
    exit_code: int
    is_symptom: bool = False


@dataclass(frozen=True, slots=True)
class PatienceOver:
    """No cause of the symptom came to light in time."""


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node is gone; `why` is the end of a sentence about it."""

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
    """Abandon the act under `seq`."""

    seq: int


@dataclass(frozen=True, slots=True)
class Exclude:
    """Ask nothing of this node any more; `goes_on` says whether the run does without it."""

    node: int
    why: str
    goes_on: bool


@dataclass(frozen=True, slots=True)
class AwaitCause:
    """Give the symptom's cause some time, then say `PatienceOver`."""


@dataclass(frozen=True, slots=True)
class End:
    """Nothing more to do."""

    exit_code: int
    reason: str


Action = PhaseOrder | Act | BreakOff | Exclude | AwaitCause | End
Result = tuple[RunState, tuple[Action, ...]]

_INTERRUPTIBLE = (Phase.ROLLOUT, Phase.SCORE, Phase.VALIDATE)


def start(program: Program) -> Result:
    """The state before anything, and its first actions."""
    nothing = RunState(phase=Phase.ENDED, part=PhasePart.ACT, seq=0, owed=NodeSet(), lost=program.absent)
    return _begin(nothing, Phase.JOIN, program)


def step(state: RunState, event: Event, program: Program) -> Result:
    """One event: the next state, and what to do, in order. Unexpected events change nothing."""
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
    """Of several symptoms the first is kept: those after it are further from the cause. What the user wrote
    follows from nothing else."""
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
    # JOIN has no slabs to hand over: its act is the meeting itself.
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
    """An answer less is owed: go on if it was the last."""
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
    """Where a run goes that is to stop."""
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
