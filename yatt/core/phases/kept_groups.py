"""Rules for prompt groups that are kept in the run folder while an iteration's rollout runs. Pure.

A kept group may be used again only in the iteration for which it was sampled, and only under exactly the same
weights. Weights are identified by the commit that contains them, or would contain them: the one that an
attempt has restored, and later the attempt's own of the iteration before. An attempt finds groups to use only
if the commit was made and is the one that it has restored.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from yatt.core.attempts.checkpoint_names import manifest_name
from yatt.core.attempts.claims import Commit

BEGINNING = "beginning"
"""Identifies the weights that a run starts with."""

_NAME = re.compile(r"(\d{8})\.(\d{6})\.(\d{5})-of-(\d{5})\.groups")


@dataclass(frozen=True, slots=True, order=True)
class KeptFile:
    """The groups that one controller of one attempt kept in one iteration; the fields are in its name."""

    iteration: int
    attempt: int
    shard: int
    num_shards: int

    @property
    def name(self) -> str:
        """The file's name."""
        place = f"{self.shard:05d}-of-{self.num_shards:05d}"
        return f"{self.iteration:08d}.{self.attempt:06d}.{place}.groups"


def kept_file(name: str) -> KeptFile | None:
    """Returns the file of this name, None if it is no name of one."""
    found = _NAME.fullmatch(name)
    return KeptFile(*map(int, found.groups())) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Everything that decides what the groups of an iteration are: the first record of a file.

    `settings` is a hash of the config's sections about samples and scores, `files` of the files that they
    name, `data` of the training files.
    """

    run_id: str
    settings: str
    files: str
    data: str
    weights: str
    iteration: int


def weights_of(iteration: int, *, attempt: int, first: int, restored: str) -> str:
    """Returns the identity of the weights that sample in an iteration.

    Args:
        first: the attempt's first iteration.
        restored: name of the commit from which the attempt resumed; `BEGINNING` if from none.
    """
    return restored if iteration == first else manifest_name(Commit(iteration - 1, attempt))


def origin_fault(found: Origin, wanted: Origin) -> str:
    """Returns why the groups of `found` cannot be used; empty if they can."""
    differing = [name for name in Origin.__slots__ if getattr(found, name) != getattr(wanted, name)]
    return f"it is of other {' and '.join(differing)}" if differing else ""


def may_hold_mine(file: KeptFile, *, iteration: int, attempt: int, shard: int, num_shards: int) -> bool:
    """Whether a file of an earlier attempt may have groups that this attempt's data shard can use.

    With the same number of data shards each one has the prompts that it had.
    """
    is_mine = file.num_shards != num_shards or file.shard == shard
    return file.iteration == iteration and file.attempt < attempt and is_mine


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The prompt numbers that one data shard has in an iteration: the next `most` ones of its own, and
    others: those of its unfinished groups, and those that were left over."""

    shard: int
    num_shards: int
    next_number: int
    most: int
    others: frozenset[int] = frozenset()

    def has(self, number: int) -> bool:
        """Whether this shard has the prompt number."""
        if number in self.others:
            return True
        is_in_reach = self.next_number <= number < self.next_number + self.most * self.num_shards
        return is_in_reach and number % self.num_shards == self.shard


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRecord:
    """One group in a file: its prompt number, the number of scores that it has, and its place."""

    number: int
    num_scores: int
    file: KeptFile
    begin: int


def by_preference(records: Iterable[KeptRecord], share: Share) -> dict[int, list[KeptRecord]]:
    """Returns the records of each prompt number of the share, the one to use first: the one with the most
    scores, of these the newest. The others are for the case that it cannot be read."""
    found: dict[int, list[KeptRecord]] = {}
    for record in records:
        if share.has(record.number):
            found.setdefault(record.number, []).append(record)
    for same in found.values():
        same.sort(key=lambda each: (each.num_scores, each.file, each.begin), reverse=True)
    return found


def covered_files(files: Iterable[KeptFile], *, attempt: int, committed: int) -> list[KeptFile]:
    """Returns the files that no attempt needs when `attempt` has committed this iteration. Files of newer
    attempts are theirs: the commit may be that of a stale attempt."""
    return [file for file in files if file.attempt <= attempt and file.iteration <= committed]


def useless_files(files: Iterable[KeptFile], *, attempt: int, first: int) -> list[KeptFile]:
    """Returns the files of earlier attempts that no attempt can use, when `attempt` has adopted the commit
    before its iteration `first`: commits of later iterations are not valid any more."""
    return [file for file in files if file.attempt < attempt and file.iteration != first]


def is_for_nobody(iteration: int, *, first: int, saved: Collection[int]) -> bool:
    """Whether an attempt can drop its groups of an iteration that is over: the weights that sampled them are
    in no checkpoint, and will be in none.

    Args:
        saved: the iterations of which the attempt has taken a snapshot.
    """
    return iteration != first and iteration - 1 not in saved
