"""Deletes checkpoints that are not kept, and files that no manifest names. No torch.

A checkpoint is deleted in this order: its manifest, then its files. So a reader finds it whole or not at all,
whenever the deletion is interrupted; files without a manifest are removed by the next retention of the same
process, of a later attempt, or of `yatt ckpt prune`. The decision is pure (`yatt.core.phases.retention`).
"""

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from yatt.adapters.files.lines import is_number
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.config.sections.operation import CheckpointSection
from yatt.core.attempts.checkpoint_names import manifest_name, step_folder
from yatt.core.attempts.claims import Commit, refused_commits, valid_commits
from yatt.core.figures.alarms import MOST_FAILED, VALIDATION_SHARES
from yatt.core.phases.retention import StoredCommits, superseded_commits
from yatt.errors import CheckpointError
from yatt.obs.metrics import STEP

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Removed:
    """Result of a retention.

    Args:
        commits: deleted checkpoints, oldest first; in a dry run those that would be deleted.
        note: why fewer checkpoints are kept, or were deleted, than configured; empty if there is no reason.
    """

    commits: tuple[Commit, ...]
    note: str = ""

    @property
    def iterations(self) -> list[int]:
        """Iterations of the deleted checkpoints."""
        return [commit.iteration for commit in self.commits]


def apply_retention(
    checkpoints: Checkpoints,
    policy: CheckpointSection,
    rows: Iterable[Row] = (),
    *,
    in_flight: int = 0,
    needed: frozenset[Commit] = frozenset(),
    dry_run: bool = False,
) -> Removed:
    """Deletes all committed checkpoints that the policy does not keep, and files of interrupted saves.

    Args:
        checkpoints: those of the attempt that deletes.
        rows: rows of metrics, for `keep_best`; a later row of an iteration replaces an earlier one.
        in_flight: the iteration that this attempt is saving; 0: none.
        needed: more commits that must stay.
        dry_run: only decide.

    Raises:
        StoreUnreachable, OSError: the store failed; what was not deleted is deleted at the next time.
    """
    with checkpoints.leftovers.lock:
        own = Commit(in_flight, checkpoints.attempt)
        stored = _look(checkpoints, metric_values(rows, policy.best_metric), needed | {own})
        gone = superseded_commits(stored, policy)
        is_unrated = policy.keep_best > 0 and not any(c.iteration in stored.values for c in stored.line)
        note = f"no checkpoint's iteration has the metric {policy.best_metric}" if gone and is_unrated else ""
        if not dry_run and stored.newest_whole is not None:
            note = "; ".join(filter(None, (note, _delete(checkpoints, gone, stored))))
        return Removed(tuple(gone), note)


def metric_values(rows: Iterable[Row], metric: str) -> dict[int, float]:
    """Returns the finite values of a metric by iteration; a later row of an iteration replaces an earlier. A
    validation in which too many completions have no score has no value
    (`yatt.core.figures.alarms.MOST_FAILED`)."""
    found: dict[int, float] = {}
    for row in rows:
        value: Any = row.get(metric)
        iteration = row.get(STEP)
        if type(iteration) is int:
            found.pop(iteration, None)
            if is_number(value) and math.isfinite(value) and not _is_doubtful(row, metric):
                found[iteration] = float(value)
    return found


def _is_doubtful(row: Row, metric: str) -> bool:
    """Whether it is a mean of held-out completions of which too many have no score."""
    begin, end = VALIDATION_SHARES
    kind, _, rest = metric.partition("/")
    return kind in ("val-core", "val-aux") and any(
        is_number(share) and share > MOST_FAILED and rest.startswith(f"{key[len(begin) : -len(end)]}/")
        for key, share in row.items()
        if key.startswith(begin) and key.endswith(end)
    )


def _look(checkpoints: Checkpoints, values: dict[int, float], needed: frozenset[Commit]) -> StoredCommits:
    commits = checkpoints.commits()
    adopted = checkpoints.adopted(commits)
    line = tuple(valid_commits(commits, adopted))
    by_others = {commit for attempt, commit in adopted.items() if attempt > checkpoints.attempt}
    return StoredCommits(
        line=line,
        stale=tuple(refused_commits(commits, adopted)),
        attempt=checkpoints.attempt,
        newest_whole=_newest_whole(checkpoints, line),
        needed=needed | by_others,
        values=values,
    )


def _newest_whole(checkpoints: Checkpoints, line: tuple[Commit, ...]) -> Commit | None:
    """Returns the newest commit whose files are there. Commits of this attempt were checked before."""
    for commit in line:
        if commit.attempt == checkpoints.attempt:
            return commit
        try:
            checkpoints.whole(manifest_name(commit))
        except CheckpointError:
            continue
        return commit
    return None


def _delete(checkpoints: Checkpoints, gone: list[Commit], stored: StoredCommits) -> str:
    """Deletes these commits, then files without a manifest; returns what could not be deleted."""
    left = checkpoints.leftovers
    for commit in gone:
        left.commits.add(commit)
        checkpoints.store.delete(manifest_name(commit))
        _clear(checkpoints, commit.iteration, stored, gone)
    iterations = {commit.iteration for commit in left.commits}
    if not left.is_searched:
        iterations |= checkpoints.iterations()
    for iteration in sorted(iterations):
        _clear(checkpoints, iteration, stored, gone)
    left.is_searched = True
    some = ", ".join(str(commit.iteration) for commit in sorted(left.commits))
    return f"files of the deleted checkpoints {some} are still there" if some else ""


def _clear(checkpoints: Checkpoints, iteration: int, stored: StoredCommits, gone: list[Commit]) -> None:
    """Deletes the files of one iteration that belong to no checkpoint. If its folder is a link, all stays."""
    with contextlib.suppress(CheckpointError):
        _clear_folder(checkpoints, iteration, stored, gone)


def _clear_folder(
    checkpoints: Checkpoints, iteration: int, stored: StoredCommits, gone: list[Commit]
) -> None:
    store, folder = checkpoints.store, step_folder(iteration)
    alive = {*stored.line, *stored.stale}.difference(gone)
    before = {name.rpartition("/")[2]: commit for commit, name in checkpoints.saves(iteration)}
    for name, commit in before.items():
        if commit not in alive and _is_over(checkpoints, commit, stored):
            store.delete_folder(f"{folder}/{name}")
    names = store.names(folder)
    if not names:
        store.delete_folder(folder)
    there = {commit for name, commit in before.items() if name in names}
    pending = checkpoints.leftovers.commits
    pending -= {commit for commit in pending if commit.iteration == iteration and commit not in there}


def _is_over(checkpoints: Checkpoints, commit: Commit, stored: StoredCommits) -> bool:
    """Whether a save that has no manifest will never have one: it is of an earlier attempt, was deleted, or
    this attempt has committed a later iteration."""
    if commit in stored.needed:
        return False
    own = max((c.iteration for c in stored.line if c.attempt == checkpoints.attempt), default=0)
    is_passed = commit.attempt == checkpoints.attempt and commit.iteration < own
    return commit.attempt < checkpoints.attempt or is_passed or commit in checkpoints.leftovers.commits
