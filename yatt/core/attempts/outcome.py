"""Decides what follows from the end of an attempt, from what its launcher observed. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from yatt.core.attempts.exits import describe_exit
from yatt.errors import EXIT_DO_NOT_RESTART, EXIT_FAILED, EXIT_FINISHED, EXIT_USER_MISTAKE, EXIT_WILL_CONTINUE


class Verdict(Enum):
    """The launcher's next action."""

    FINISHED = "finished"
    AGAIN = "again"
    """Another attempt in this start, on the nodes that are left."""

    SUCCEED = "succeed"
    """The run continues in another start: of the job, requested from Slurm, or by the user."""

    CANCELLED = "cancelled"
    KILLED = "killed"
    """Slurm is ending this start by itself: write nothing, request nothing."""

    GIVE_UP = "give up"


CANCEL = "cancelled by its user"
BY_HAND = "a signal was sent by hand"
"""Reason for saving and continuing in the next start, besides preemption and the time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFacts:
    """The launcher's observations of an attempt.

    Attributes:
        is_killed: the launcher itself received SIGTERM.
        stop: reason of a stop request; empty if there was none.
        is_preempted: Slurm has set a time for the job's preemption.
        ended: exit codes of the controllers whose end was observed, by node.
        dead: nodes whose machine is lost: lost to the leader, and the controller's end was not observed.
        unfit: nodes that failed the check before the attempt, with the reason.
        is_unfit_everywhere: every node failed it, or the only node failed it as another one did before.
        trainer_nodes: nodes that train.
        can_shrink: whether the run could continue without `dead`, `unfit` and the nodes lost before.
        cause: the reason that the leader reported.
    """

    is_killed: bool = False
    stop: str = ""
    is_preempted: bool = False
    ended: dict[int, int] = field(default_factory=dict)
    dead: frozenset[int] = frozenset()
    unfit: Mapping[int, str] = field(default_factory=dict)
    is_unfit_everywhere: bool = False
    trainer_nodes: frozenset[int] = frozenset()
    can_shrink: bool = True
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The verdict, the exit code of a job that gives up, and the nodes to leave out.

    `unfit` are the nodes of `gone` whose machines are good ones to Slurm.
    """

    verdict: Verdict
    reason: str
    exit_code: int | None = None
    gone: frozenset[int] = frozenset()
    unfit: frozenset[int] = frozenset()


def outcome_of(seen: AttemptFacts) -> Outcome:
    """Returns the outcome of an attempt that has ended."""
    leader = seen.ended.get(0)
    if leader == EXIT_FINISHED:
        return Outcome(verdict=Verdict.FINISHED, reason="finished", exit_code=EXIT_FINISHED)
    if seen.is_killed:
        return Outcome(verdict=Verdict.KILLED, reason="Slurm is ending this start of the job")
    if seen.stop == CANCEL:
        return Outcome(verdict=Verdict.CANCELLED, reason=CANCEL, exit_code=EXIT_WILL_CONTINUE)
    unfit = frozenset(seen.unfit)
    if seen.stop or seen.is_preempted:
        reason = seen.stop or "preempted"
        return Outcome(
            verdict=Verdict.SUCCEED,
            reason=reason,
            exit_code=EXIT_WILL_CONTINUE,
            gone=seen.dead | unfit,
            unfit=unfit,
        )
    if unfit:
        return _without_the_unfit(seen, leader)
    if leader in (EXIT_USER_MISTAKE, EXIT_DO_NOT_RESTART):
        return Outcome(verdict=Verdict.GIVE_UP, reason=seen.cause or "see the logs", exit_code=leader)
    return _after_a_failure(seen)


def _without_the_unfit(seen: AttemptFacts, leader: int | None) -> Outcome:
    """The outcome with unfit nodes. If all nodes are unfit, the cause is elsewhere: none is left out."""
    unfit = frozenset(seen.unfit)
    reason = "; ".join(f"node{index} is unfit: {why}" for index, why in sorted(seen.unfit.items()))
    if seen.is_unfit_everywhere and leader == EXIT_USER_MISTAKE:
        return Outcome(verdict=Verdict.GIVE_UP, reason=reason, exit_code=leader)
    if seen.is_unfit_everywhere:
        return Outcome(verdict=Verdict.AGAIN, reason=f"no node is fit: {reason}", exit_code=EXIT_FAILED)
    is_needed = unfit & seen.trainer_nodes or not seen.can_shrink
    verdict = Verdict.SUCCEED if is_needed else Verdict.AGAIN
    return Outcome(verdict=verdict, reason=reason, gone=seen.dead | unfit, unfit=unfit)


def _after_a_failure(seen: AttemptFacts) -> Outcome:
    names = ", ".join(f"node{index}" for index in sorted(seen.dead))
    if seen.dead and (seen.dead & seen.trainer_nodes or not seen.can_shrink):
        reason = f"{names} is gone, and the run cannot do without"
        # A lost machine is not the run's fault, so it does not count as a failed attempt.
        return Outcome(verdict=Verdict.SUCCEED, reason=reason, gone=seen.dead)
    failed = {index: code for index, code in sorted(seen.ended.items()) if code}
    killed = {index: code for index, code in failed.items() if code < 0 and index in seen.trainer_nodes}
    # The leader's reason may be a symptom (a peer's broken connection); report the killed process first.
    said = killed if seen.cause else failed
    ends = [f"node{index} {_end(code)}" for index, code in said.items()]
    reason = "; ".join([*ends, seen.cause] if seen.cause else ends)
    code = next(iter(failed.values()), EXIT_FAILED)
    return Outcome(
        verdict=Verdict.AGAIN,
        reason=reason or (f"{names} is gone" if names else "no controller came up"),
        gone=seen.dead,
        exit_code=EXIT_FAILED if code < 0 or code == EXIT_WILL_CONTINUE else code,
    )


def _end(code: int) -> str:
    return f"was {describe_exit(code)}" if code < 0 else f"ended with {describe_exit(code)}"
