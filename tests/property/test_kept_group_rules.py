"""Kept prompt groups over any sequence of attempts, kills and numbers of nodes; planted mistakes are found.

The model: attempts of a run resume from a commit or from the beginning, and keep groups of the iterations
that they sample. Some commits are lost, and some attempts are stale: what they write last appears after the
next attempt has begun. A group is marked with the weights that sampled it. An attempt must use exactly the
groups of the same weights, data and iteration, each on one shard.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings, strategies as st

from yatt.core.attempts.checkpoint_names import manifest_name
from yatt.core.attempts.claims import Commit
from yatt.core.phases import kept_groups as rules
from yatt.core.phases.kept_groups import BEGINNING, KeptFile, KeptRecord, Origin, Share, kept_file

BATCH = 6


@dataclass(frozen=True)
class Rules:
    """The rules under test; a planted mistake replaces one."""

    weights_of: Callable[..., str] = rules.weights_of
    fault: Callable[..., str] = rules.origin_fault
    may_hold_mine: Callable[..., bool] = rules.may_hold_mine
    has: Callable[[Share, int], bool] = Share.has
    by_preference: Callable[..., dict[int, list[KeptRecord]]] = rules.by_preference
    covered: Callable[..., list[KeptFile]] = rules.covered_files
    useless: Callable[..., list[KeptFile]] = rules.useless_files
    is_for_nobody: Callable[..., bool] = rules.is_for_nobody


@dataclass
class World:
    """The folder: of each file its origin, and by prompt number the real weights that sampled the group."""

    rules: Rules
    draw: random.Random
    files: dict[KeptFile, tuple[Origin, dict[int, str]]] = field(default_factory=dict)
    commits: dict[Commit, str] = field(default_factory=dict)
    lineage: list[Commit] = field(default_factory=list)
    truth: list[tuple[KeptFile, Origin, int, str]] = field(default_factory=list)
    late: dict[KeptFile, tuple[Origin, dict[int, str]]] = field(default_factory=dict)
    """Files of stale attempts that are not there yet."""

    came_late: set[KeptFile] = field(default_factory=set)
    num_reused: int = 0

    def remove(self, files: list[KeptFile]) -> None:
        for file in files:
            self.files.pop(file, None)

    def attempt(self, attempt: int) -> None:
        """Resumes from the newest commit, trains a few iterations, and is killed in a rollout."""
        draw, made = self.draw, self.rules
        parent = self.lineage[-1] if self.lineage else None
        restored = manifest_name(parent) if parent else BEGINNING
        real = self.commits[parent] if parent else "the first weights"
        first = (parent.iteration if parent else 0) + 1
        num_shards, saved = draw.randint(1, 3), set[int]()
        data = draw.choice(["data", "data", "other data"])
        for iteration in range(first, first + draw.randint(1, 4)):
            weights = made.weights_of(iteration, attempt=attempt, first=first, restored=restored)
            origin = Origin(
                run_id="r", settings="s", files="f", data=data, weights=weights, iteration=iteration
            )
            used = self.begin(origin, attempt, num_shards, real) if iteration == first else set()
            if iteration == first:
                self.remove(made.useless(self.files, attempt=attempt, first=first))
            self.sample(origin, attempt, num_shards, real, used)
            if draw.random() < 0.4:
                break
            if made.is_for_nobody(iteration, first=first, saved=saved):
                self.remove([f for f in self.files if (f.attempt, f.iteration) == (attempt, iteration)])
            real = f"trained by {attempt} to {iteration}"
            if draw.random() < 0.6:
                saved.add(iteration)
            if iteration in saved and draw.random() < 0.7:
                self.commits[Commit(iteration, attempt)] = real
                self.lineage.append(Commit(iteration, attempt))
                self.remove(made.covered(self.files, attempt=attempt, committed=iteration))
        late = {
            f: self.files.pop(f) for f in list(self.files) if f.attempt == attempt and draw.random() < 0.3
        }
        self.files.update(self.late)
        self.came_late |= set(self.late)
        self.late = late

    def begin(self, origin: Origin, attempt: int, num_shards: int, real: str) -> set[int]:
        """Gives the numbers of the groups that are used again."""
        begin, used = (origin.iteration - 1) * BATCH, list[int]()
        for shard in range(num_shards):
            share = Share(shard=shard, num_shards=num_shards, next_number=begin, most=BATCH)
            has = replace_has(share, self.rules.has)
            records = []
            for file, (found, groups) in self.files.items():
                is_candidate = self.rules.may_hold_mine(
                    file, iteration=origin.iteration, attempt=attempt, shard=shard, num_shards=num_shards
                )
                if is_candidate and not self.rules.fault(found, origin):
                    records += [KeptRecord(number=n, num_scores=1, file=file, begin=0) for n in groups]
            for number, same in self.rules.by_preference(records, has).items():
                found, groups = self.files[same[0].file]
                assert groups[number] == real, "sampled by other weights"
                assert (found.iteration, found.data) == (origin.iteration, origin.data)
                used.append(number)
        assert len(used) == len(set(used)), "a prompt on two shards"
        expected = {
            number
            for file, found, number, weights in self.truth
            if (found.iteration, found.data, weights) == (origin.iteration, origin.data, real)
            if file not in self.late
        }
        assert set(used) == expected, "all that can be used is used"
        self.num_reused += len(used)
        return set(used)

    def sample(self, origin: Origin, attempt: int, num_shards: int, real: str, used: set[int]) -> None:
        begin = (origin.iteration - 1) * BATCH
        for shard in range(num_shards):
            mine = [n for n in range(begin, begin + BATCH) if n % num_shards == shard and n not in used]
            finished = self.draw.sample(mine, self.draw.randint(0, len(mine)))
            if finished:
                file = KeptFile(origin.iteration, attempt, shard, num_shards)
                self.files[file] = origin, dict.fromkeys(finished, real)
                self.truth += [(file, origin, number, real) for number in finished]


class _Share:
    def __init__(self, has: Callable[[int], bool]) -> None:
        self.has = has


def replace_has(share: Share, has: Callable[[Share, int], bool]) -> "_Share":
    return _Share(lambda number: has(share, number))


def walk(seed: int, made: Rules, num_attempts: int = 12) -> World:
    world = World(made, random.Random(seed))
    for attempt in range(1, num_attempts + 1):
        world.attempt(attempt)
        own = {f.iteration for f in world.files if f.attempt == attempt}
        assert len(own) <= 4, "the disk fills up"
        older = {f.iteration for f in world.files if f.attempt < attempt - 1}
        assert len(older) <= 1 + num_stale(world), "the disk fills up"
    world.remove(made.covered(world.files, attempt=num_attempts, committed=10**6))
    assert not world.files, "a finished run keeps nothing"
    return world


def num_stale(world: World) -> int:
    """Iterations of files that appeared after a newer attempt had begun."""
    return len({f.iteration for f in world.files if f in world.came_late})


@given(st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_only_groups_of_the_same_weights_are_used_and_all_of_them(seed: int) -> None:
    walk(seed, Rules())


def test_groups_are_used_often_in_these_walks() -> None:
    assert sum(walk(seed, Rules()).num_reused for seed in range(50)) > 100


def ignoring(*names: str) -> Callable[[Origin, Origin], str]:
    def fault(found: Origin, wanted: Origin) -> str:
        return rules.origin_fault(replace(found, **{name: getattr(wanted, name) for name in names}), wanted)

    return fault


def version_alone(iteration: int, *, attempt: int, first: int, restored: str) -> str:
    return str(iteration - 1)


def never_restored(iteration: int, *, attempt: int, first: int, restored: str) -> str:
    return manifest_name(Commit(iteration - 1, attempt))


def any_shard(share: Share, number: int) -> bool:
    return share.next_number <= number < share.next_number + share.most * share.num_shards


def own_file_only(file: KeptFile, *, iteration: int, attempt: int, shard: int, num_shards: int) -> bool:
    return (file.iteration, file.shard) == (iteration, shard) and file.attempt < attempt


MISTAKES = {
    "the version identifies the weights": Rules(weights_of=version_alone),
    "a restored commit is not what sampled": Rules(weights_of=never_restored),
    "weights are not compared": Rules(fault=ignoring("weights")),
    "data is not compared": Rules(fault=ignoring("data")),
    "every shard takes every prompt": Rules(has=any_shard, may_hold_mine=lambda file, **_: True),
    "only the own file is read": Rules(may_hold_mine=own_file_only),
    "nothing is covered": Rules(covered=lambda files, **_: []),
    "the next iteration is covered too": Rules(
        covered=lambda files, *, attempt, committed: [f for f in files if f.iteration <= committed + 1],
        useless=lambda files, **_: list(files),
    ),
    "the files of the restored iteration are useless": Rules(
        useless=lambda files, *, attempt, first: [f for f in files if f.attempt < attempt]
    ),
    "nothing is removed before it is covered": Rules(
        is_for_nobody=lambda iteration, **_: False, useless=lambda files, **_: []
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found(name: str) -> None:
    with pytest.raises(AssertionError):
        for seed in range(400):
            walk(seed, MISTAKES[name])


def test_a_name_has_all_fields_and_foreign_names_are_none() -> None:
    file = KeptFile(12, 3, 1, 4)
    assert kept_file(file.name) == file
    for name in ("", ".x", file.name + "~", file.name[1:], "00000012.000003.00001-of-00004.tmp"):
        assert kept_file(name) is None


def test_a_fault_names_what_differs() -> None:
    one = Origin(run_id="a", settings="b", files="c", data="d", weights="e", iteration=1)
    assert rules.origin_fault(one, one) == ""
    assert rules.origin_fault(replace(one, data="x", iteration=2), one) == "it is of other data and iteration"


def test_the_record_with_the_most_scores_is_preferred_and_of_these_the_newest() -> None:
    def record(attempt: int, num_scores: int, begin: int = 0) -> KeptRecord:
        return KeptRecord(number=4, num_scores=num_scores, file=KeptFile(1, attempt, 0, 1), begin=begin)

    share = Share(shard=0, num_shards=1, next_number=0, most=9)
    records = [record(1, 2), record(3, 0), record(2, 2, 9), record(2, 2, 5)]
    assert rules.by_preference(records, share) == {
        4: [record(2, 2, 9), record(2, 2, 5), record(1, 2), record(3, 0)]
    }


def test_a_stale_attempt_removes_no_files_of_a_newer_one() -> None:
    files = [KeptFile(1, 1, 0, 1), KeptFile(1, 2, 0, 1), KeptFile(2, 1, 0, 1)]
    assert rules.covered_files(files, attempt=1, committed=1) == [KeptFile(1, 1, 0, 1)]


def test_carried_over_prompts_are_on_the_shard_that_has_them() -> None:
    share = Share(shard=1, num_shards=2, next_number=11, most=2, others=frozenset({4}))
    assert [n for n in range(20) if share.has(n)] == [4, 11, 13]
