"""Rules for claiming an attempt number and for choosing the valid checkpoints. Pure.

A claimant tries the number after the highest one that it sees, by creating a file exclusively. It ignores the
result of that call, which NFS may lose or repeat, and reads the file instead.

Checkpoints are fenced when they are read. Before an attempt begins its work it *adopts* the commit that it
resumes from, in a record of its own. The newest record is the head of the lineage. All commits outside the
lineage were written by stale attempts and are refused, at whatever time they were written.
"""

from dataclasses import dataclass
from enum import Enum

# ---- claiming -----------------------------------------------------------------------------------


class ClaimStage(Enum):
    """Stages of a claim."""

    LOOK = "look"
    LINK = "link"
    CHECK = "check"
    WON = "won"


@dataclass(frozen=True, slots=True)
class Claim:
    """State of a claimant; `attempt` is the number that it tries to claim."""

    stage: ClaimStage = ClaimStage.LOOK
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Looked:
    """The highest attempt number that this host sees; on a shared filesystem it may be out of date."""

    newest: int


@dataclass(frozen=True, slots=True)
class Linked:
    """The exclusive creation returned. Its result is left out, because it may be wrong."""


class FileOwner(Enum):
    """Who created the file of an attempt number."""

    MINE = "mine"
    OTHERS = "others"
    NOBODYS = "nobody's"


@dataclass(frozen=True, slots=True)
class Checked:
    """The claimant read the file of the number that it tries."""

    found: FileOwner


ClaimEvent = Looked | Linked | Checked


def claim_step(claim: Claim, event: ClaimEvent) -> Claim:
    """Returns the next state of the claimant; an event of another stage changes nothing."""
    match claim.stage, event:
        case ClaimStage.LOOK, Looked(newest):
            return Claim(ClaimStage.LINK, newest + 1)
        case ClaimStage.LINK, Linked():
            return Claim(ClaimStage.CHECK, claim.attempt)
        case ClaimStage.CHECK, Checked(FileOwner.MINE):
            return Claim(ClaimStage.WON, claim.attempt)
        case ClaimStage.CHECK, Checked(FileOwner.OTHERS):
            return Claim(ClaimStage.LINK, claim.attempt + 1)
        case ClaimStage.CHECK, Checked(FileOwner.NOBODYS):  # skip no number: a later start could claim it
            return Claim(ClaimStage.LINK, claim.attempt)
        case _:
            return claim


# ---- lineage ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class Commit:
    """A committed checkpoint. Iteration 0 of attempt 0 is the beginning of the run."""

    iteration: int
    attempt: int


BEGINNING = Commit(0, 0)


def valid_commits(commits: set[Commit], adopted: dict[int, Commit]) -> list[Commit]:
    """Returns the valid commits, newest first. A start that resumed from a local commit commits the same
    iteration again.

    Args:
        commits: all commits in the store, also those of stale attempts.
        adopted: maps each attempt to the commit that it resumed from, recorded before its work begins.
    """
    found: list[Commit] = []
    attempt, limit = max(adopted, default=0), None
    while attempt:
        parent = adopted.get(attempt, BEGINNING)
        own = sorted(
            (
                commit
                for commit in commits
                if commit.attempt == attempt
                and commit.iteration >= parent.iteration
                and (limit is None or commit.iteration <= limit)
            ),
            reverse=True,
        )
        found += own
        assert parent.attempt < attempt, "a start adopts only what is older than itself"
        attempt, limit = parent.attempt, parent.iteration
    return found


def refused_commits(commits: set[Commit], adopted: dict[int, Commit]) -> list[Commit]:
    """Returns the commits that are not valid, because a newer attempt resumed from an older commit."""
    return sorted(commits - set(valid_commits(commits, adopted)))


def is_finished(finished_attempt: int | None, newest: int) -> bool:
    """Whether a run is finished: the record of its end is from the newest attempt, not from a stale one."""
    return finished_attempt is not None and finished_attempt >= newest
