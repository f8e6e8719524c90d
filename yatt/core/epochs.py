"""Epochs as pure rules: how a start claims its number, and whose checkpoints count.

Every start of a run claims an epoch, one above all it can see, by creating a name exclusively. The reply
of that creation is never believed (on NFS it may be lost or repeated): the claimant looks at what is there.

Checkpoints are fenced where they are read. Before it works, a start *adopts* the commit it resumes from, by
a record of its own. The newest record is the head of the lineage; commits that are not on the path from
there are a ghost's, whenever they were written, and are refused.
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
    """One start's way to an epoch; `epoch` is the one it tries."""

    stage: ClaimStage = ClaimStage.LOOK
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Looked:
    """The highest epoch this host can see; it may be behind the truth."""

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
            return Claim(ClaimStage.CHECK, claim.epoch)
        case ClaimStage.CHECK, Checked(FileOwner.MINE):
            return Claim(ClaimStage.WON, claim.epoch)
        case ClaimStage.CHECK, Checked(FileOwner.OTHERS):
            return Claim(ClaimStage.LINK, claim.epoch + 1)
        case ClaimStage.CHECK, Checked(FileOwner.NOBODYS):  # a gap would be a lower number for a later start
            return Claim(ClaimStage.LINK, claim.epoch)
        case _:
            return claim


# ---- lineage ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class Commit:
    """A committed checkpoint. Iteration 0 of epoch 0 is the beginning of the run."""

    iteration: int
    epoch: int


BEGINNING = Commit(0, 0)


def lineage(commits: set[Commit], adopted: dict[int, Commit]) -> list[Commit]:
    """The commits that count, newest first.

    Args:
        commits: all that are there, whoever wrote them.
        adopted: by epoch, the commit that start resumed from. A start records it before it works.
    """
    found: list[Commit] = []
    epoch, limit = max(adopted, default=0), None
    while epoch:
        parent = adopted.get(epoch, BEGINNING)
        own = sorted(
            (
                commit
                for commit in commits
                if commit.epoch == epoch
                and commit.iteration > parent.iteration
                and (limit is None or commit.iteration <= limit)
            ),
            reverse=True,
        )
        found += own
        assert parent.epoch < epoch, "a start adopts only what is older than itself"
        epoch, limit = parent.epoch, parent.iteration
    return found


def refused(commits: set[Commit], adopted: dict[int, Commit]) -> list[Commit]:
    """Commits that do not count, since a later start went on without them."""
    return sorted(commits - set(lineage(commits, adopted)))


def is_finished(finished_epoch: int | None, newest: int) -> bool:
    """Whether a run is over: the note of its end is the newest start's own, not a ghost's."""
    return finished_epoch is not None and finished_epoch >= newest
