"""Events of attempts, phases, batches and nodes."""

from collections.abc import Sequence

from yatt.records.events.event import Code, Count, Event, Index, Seconds


class AttemptStarted(Event, tag="attempt.start", frozen=True, kw_only=True):
    """A controller began; `nodes`: of the attempt."""

    nodes: Count


class AttemptResumed(Event, tag="attempt.resume", frozen=True, kw_only=True):
    """State was restored, or there was none (`iteration` 0).

    Attributes:
        is_local: only the nodes' disks have this checkpoint.
        changed: inputs that are others than in the checkpoint.
        lost: the newest iteration that an earlier attempt had run.
    """

    iteration: Count
    seconds: Seconds = 0.0
    local_bytes: Count = 0
    is_local: bool = False
    changed: Sequence[str] = ()
    lost: Count = 0


class AttemptEnded(Event, tag="attempt.end", frozen=True, kw_only=True):
    """The leader ends the attempt, with the exit code of its controllers."""

    exit_code: Code
    reason: str


class PhaseBegan(Event, tag="phase.begin", frozen=True, kw_only=True):
    """The leader is in a phase; `part` is `prepare`, `enter` or `act`."""

    phase: str
    iteration: Count
    part: str = ""


class PhasePartBegan(Event, tag="phase.part", frozen=True, kw_only=True):
    """The next part of the phase."""

    phase: str
    iteration: Count
    part: str


class PhaseEnded(Event, tag="phase.end", frozen=True, kw_only=True):
    """The phase is over, after this time."""

    phase: str = ""
    iteration: Count = 0
    seconds: Seconds = 0.0


class BatchBegan(Event, tag="batch.begin", frozen=True, kw_only=True):
    """The sampling track begins a batch with these weights (`rollout.ahead`)."""

    iteration: Count
    policy_version: Count


class BatchEnded(Event, tag="batch.end", frozen=True, kw_only=True):
    """The batch is complete."""

    iteration: Count
    seconds: Seconds = 0.0


class SignalSeen(Event, tag="signal", frozen=True, kw_only=True):
    """An early end was requested, by this signal or command."""

    name: str


class FailureReported(Event, tag="failure.report", frozen=True, kw_only=True):
    """A node reports a failure that ends the attempt."""

    error: str
    exit_code: Code


class JobRequeued(Event, tag="requeue", frozen=True, kw_only=True):
    """A node asked Slurm to requeue the job, in the place of its leader."""

    by: str
    reason: str
    code: Code


class NodeExcluded(Event, tag="node.lost", frozen=True, kw_only=True):
    """A node is taken to be dead; `silence_s`: since its last sign of life."""

    node: Index
    life: Count = 0
    silence_s: Seconds = 0.0
    why: str
    goes_on: bool


class NodeReturned(Event, tag="node.joined", frozen=True, kw_only=True):
    """A node that was excluded takes part again."""

    node: Index
    life: Count


class TelemetryLate(Event, tag="telemetry.late", frozen=True, kw_only=True):
    """Events and metrics could not be written for a while."""

    seconds: Seconds
    lost: Count
