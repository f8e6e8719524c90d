"""States, events and actions of the phases of the run (`yatt.core.phases.phases`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from yatt.core.phases.nodeset import NodeSet
from yatt.core.phases.saving import NO_SAVES, Saving


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
    COMMIT = "commit"
    EXPORT = "export"
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
    run it. `absent` nodes take no part from the start. Nodes of one of the `blocks` are of use only together,
    because an engine spans them: they are lost and admitted together.
    """

    nodes: frozenset[int]
    trainer_nodes: frozenset[int]
    pools: Mapping[str, frozenset[int]] = field(default_factory=dict)
    absent: frozenset[int] = frozenset()
    blocks: tuple[frozenset[int], ...] = ()
    total_iterations: int
    save_every: int
    validate_every: int
    validates: bool
    num_scorings: int
    save_every_s: float = 0.0
    """Seconds between saves, in addition to `save_every`; 0: none."""

    is_static: bool = False
    """Whether no slab ever changes hands, and phases need no orders to nodes after the first one."""

    has_engines: bool = True
    """Whether weights are published to engines; else a batch is there when training asks for it."""

    exports: bool = False
    """Whether the policy is written as a Hugging Face folder after the last iteration."""

    trains: bool = True
    """Whether there are trainer ranks. Else it is an evaluation of 0 iterations, whose weights stay: VALIDATE
    samples all prompts, SCORE scores them with GenRMs that take turns, EXPORT writes the result."""

    def is_save_due(self, iteration: int) -> bool:
        """Whether the state after `iteration` has to be saved, whatever time has passed."""
        last = iteration == self.total_iterations
        return last or (self.save_every > 0 and iteration % self.save_every == 0)

    def is_validation_due(self, iteration: int) -> bool:
        """Whether the policy after `iteration` has to be validated."""
        edge = iteration in (0, self.total_iterations)
        regular = self.validate_every > 0 and iteration % self.validate_every == 0
        return self.validates and (edge or regular)

    def block_of(self, node: int) -> frozenset[int]:
        """Returns the nodes that are of use only together with this one, and it."""
        return next((block for block in self.blocks if node in block), frozenset({node}))

    def cause_without(self, lost: frozenset[int], *, is_stopping: bool = False) -> str:
        """Returns why the run cannot continue without these nodes; '' if it can. A run that stops only saves,
        and needs no engines."""
        for node in sorted(lost & self.trainer_nodes):
            what, them = ("trainer ranks", "them") if self.trains else ("prompts", "their samples")
            return f"node{node} has {what}, and the run cannot do without {them}"
        for role, pool in () if is_stopping else self.pools.items():
            if pool <= lost:
                return f"no node is left that can run {role}"
        return ""


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A later process of an engine node's controller, which does not take part yet.

    `life` counts the node's processes in this attempt; those that the attempt began with are 1.
    """

    node: int
    life: int
    is_ready: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of the run. `trained` iterations are done. `validated`: the number of iterations of the policy
    that this attempt validated last. `owed`: nodes whose answer is awaited. `lives`: (node, life) of the
    newest process of each node that was started again."""

    phase: Phase
    part: PhasePart
    seq: int
    owed: NodeSet
    trained: int = 0
    saving: Saving = NO_SAVES
    exported: bool = False
    validated: int = -1
    scoring: int = 0
    stop: str = ""
    failure: str = ""
    lost: frozenset[int] = frozenset()
    lives: frozenset[tuple[int, int]] = frozenset()
    newcomers: frozenset[Newcomer] = frozenset()
    symptom: "Failure | None" = None
    """A failure that waits for its cause; until then other events are ignored."""

    def is_finished(self, program: Program) -> bool:
        """Whether all iterations are done and committed, and a due validation and export."""
        is_owed = self.saving.committed < self.trained
        is_owed |= program.is_validation_due(self.trained) and self.validated < self.trained
        is_owed |= program.exports and not self.exported
        return self.trained >= program.total_iterations and not is_owed

    def life_of(self, node: int) -> int:
        """Returns the life of the node's newest process that is known."""
        return next((life for index, life in self.lives if index == node), 1)

    def newcomer(self, node: int) -> Newcomer | None:
        """Returns the node's newcomer."""
        return next((newcomer for newcomer in self.newcomers if newcomer.node == node), None)

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
    """The act with this `seq` is done. `again`: more must be sampled before training. `takes_turns`: what was
    sampled is scored in phases of its own, if the program has some.

    `resumed` is the iteration that BUILD resumed from; `is_local`: it is committed on the nodes' disks only.
    `at_s`: when it was done, in monotonic seconds.
    """

    seq: int
    again: bool = False
    resumed: int = 0
    at_s: float = 0.0
    is_local: bool = False
    takes_turns: bool = True


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
    """A process of a node's controller is lost; `why` is the end of a sentence about the node."""

    node: int
    why: str
    life: int = 1


@dataclass(frozen=True, slots=True)
class NodeKnocked:
    """A later process of an engine node's controller asks to take part; the former one is over."""

    node: int
    life: int


@dataclass(frozen=True, slots=True)
class NodeReady:
    """A newcomer has started its workers."""

    node: int
    life: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The save of this iteration is committed."""

    iteration: int


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """The save of this iteration could not be uploaded or committed; training is not affected."""

    iteration: int
    error: str


@dataclass(frozen=True, slots=True)
class SaveGivenUp:
    """After a request to stop: the upload of this iteration would come too late and was given up. `is_kept`:
    the iteration has a local commit instead."""

    iteration: int
    is_kept: bool


Event = (
    OrderAnswered
    | Acted
    | StopWanted
    | Failure
    | NodeLost
    | NodeKnocked
    | NodeReady
    | PatienceOver
    | Committed
    | SaveFailed
    | SaveGivenUp
)

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
    """Send no more orders to this process of a node; `goes_on`: whether the run continues without it."""

    node: int
    why: str
    goes_on: bool
    life: int = 1


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make a newcomer start its workers, beside everything else; then put `NodeReady`."""

    node: int
    life: int


@dataclass(frozen=True, slots=True)
class Admit:
    """From now on this newcomer is the node's controller."""

    node: int
    life: int


@dataclass(frozen=True, slots=True)
class AwaitCause:
    """Wait for the symptom's cause for a limited time, then put `PatienceOver`."""


@dataclass(frozen=True, slots=True)
class End:
    """End the attempt."""

    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True)
class PostponeSave:
    """Report that this iteration is not saved, because an earlier save is still in flight."""

    iteration: int
    in_flight: int


Action = PhaseOrder | Act | BreakOff | Exclude | Prepare | Admit | AwaitCause | End | PostponeSave
Result = tuple[RunState, tuple[Action, ...]]
