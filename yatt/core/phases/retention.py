"""Which checkpoints are deleted after a commit, and by `yatt ckpt prune`. Pure.

Kept are the newest `keep` of the lineage, the first at or after every multiple of `keep_every` iterations,
and the `keep_best` with the best value of a metric. More rules keep checkpoints that no policy names: the
newest whole checkpoint and all that is newer, and what is needed elsewhere (a save in flight, a commit that
another start or another run begins from). If no checkpoint is known to be whole, nothing is deleted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from yatt.config.sections.operation import CheckpointSection
from yatt.core.attempts.claims import Commit


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCommits:
    """The commits in a store.

    Args:
        line: the lineage, newest first.
        stale: commits outside of the lineage.
        attempt: the attempt that deletes; only stale commits of earlier attempts are deleted.
        newest_whole: the newest commit of the lineage whose files are there; None if none is known.
        needed: commits that must stay.
        values: the metric of `checkpoint.best_metric`, by iteration; iterations without a value are left out.
    """

    line: tuple[Commit, ...]
    stale: tuple[Commit, ...] = ()
    attempt: int
    newest_whole: Commit | None
    needed: frozenset[Commit] = frozenset()
    values: Mapping[int, float] = field(default_factory=dict)


def superseded_commits(stored: StoredCommits, policy: CheckpointSection) -> list[Commit]:
    """Returns the commits to delete, oldest first."""
    if stored.newest_whole not in stored.line:
        return []
    gone = set(stored.line) - kept_commits(stored, policy)
    if len(stored.line) >= policy.keep:
        floor = stored.line[policy.keep - 1].iteration
        gone |= {c for c in stored.stale if c.iteration < floor and c.attempt < stored.attempt}
    return sorted(gone - stored.needed)


def kept_commits(stored: StoredCommits, policy: CheckpointSection) -> set[Commit]:
    """Returns the commits of the lineage that stay."""
    found = {*stored.line[: policy.keep], *stored.needed.intersection(stored.line)}
    if stored.newest_whole in stored.line:
        found.update(stored.line[: stored.line.index(stored.newest_whole) + 1])
    found.update(_spaced(stored.line, policy.keep_every))
    found.update(_best(stored, policy))
    return found


def _spaced(line: tuple[Commit, ...], every: int) -> Iterable[Commit]:
    """The oldest commit at or after each multiple of `every`: a save may come later than it was due, and a
    later commit never changes the choice."""
    oldest = {commit.iteration // every: commit for commit in line} if every else {}
    return (commit for interval, commit in oldest.items() if interval > 0)


def _best(stored: StoredCommits, policy: CheckpointSection) -> list[Commit]:
    """The commits with the best values; of equal values the newest. A commit without a value is not among
    them."""
    sign = 1.0 if policy.best_mode == "max" else -1.0
    rated = [commit for commit in stored.line if commit.iteration in stored.values]
    rated.sort(key=lambda commit: (sign * stored.values[commit.iteration], commit), reverse=True)
    return rated[: policy.keep_best]
