"""Attempts as pure rules: how a start claims its number, and whose checkpoints count.

Every start of a run claims its number, one above all it can see, by creating a name exclusively. The reply
of that creation is never believed (on NFS it may be lost or repeated): the claimant looks at what is there.

Checkpoints are fenced where they are read. Before it works, a start *adopts* the commit it resumes from, by
a record of its own. The newest record is the head of the lineage; commits that are not on the path from
there are a stale attempt's, whenever they were written, and are refused.
"""

from dataclasses import dataclass
from enum import Enum

# ---- claiming -----------------------------------------------------------------------------------


class ClaimStage(Enum):
    """Where a claimant is."""

    LOOK = "look"
    LINK = "link"
    CHECK = "check"
    WON = "won"


@dataclass(frozen=True, slots=True)
class Claim:
    """One start's way to an attempt; `attempt` is the one it tries."""

    stage: ClaimStage = ClaimStage.LOOK
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Looked:
    """The highest attempt this host can see; it may be behind the truth."""

    newest: int


@dataclass(frozen=True, slots=True)
class Linked:
    """The exclusive creation returned; what it said is not told, since it may be wrong."""


class FileOwner(Enum):
    """Whose file the name is."""

    MINE = "mine"
    OTHERS = "others"
    NOBODYS = "nobody's"


@dataclass(frozen=True, slots=True)
class Checked:
    """What is there under the name."""

    found: FileOwner


ClaimEvent = Looked | Linked | Checked


def claim_step(claim: Claim, event: ClaimEvent) -> Claim:
    """What the claimant does next; an event of another stage changes nothing."""
    match claim.stage, event:
        case ClaimStage.LOOK, Looked(newest):
            return Claim(ClaimStage.LINK, newest + 1)
        case ClaimStage.LINK, Linked():
            return Claim(ClaimStage.CHECK, claim.attempt)
        case ClaimStage.CHECK, Checked(FileOwner.MINE):
            return Claim(ClaimStage.WON, claim.attempt)
        case ClaimStage.CHECK, Checked(FileOwner.OTHERS):
            return Claim(ClaimStage.LINK, claim.attempt + 1)
        case ClaimStage.CHECK, Checked(FileOwner.NOBODYS):  # a gap would be a lower number for a later start
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


def lineage(commits: set[Commit], adopted: dict[int, Commit]) -> list[Commit]:
    """The commits that count, newest first.

    Args:
        commits: all that are there, whoever wrote them.
        adopted: by attempt, the commit that start resumed from. A start records it before it works.
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
                and commit.iteration > parent.iteration
                and (limit is None or commit.iteration <= limit)
            ),
            reverse=True,
        )
        found += own
        assert parent.attempt < attempt, "a start adopts only what is older than itself"
        attempt, limit = parent.attempt, parent.iteration
    return found


def refused(commits: set[Commit], adopted: dict[int, Commit]) -> list[Commit]:
    """Commits that do not count, since a later start went on without them."""
    return sorted(commits - set(lineage(commits, adopted)))


def is_finished(finished_attempt: int | None, newest: int) -> bool:
    """Whether a run is over: the note of its end is the newest start's own, not a stale attempt's."""
    return finished_attempt is not None and finished_attempt >= newest
