"""Retention, over random histories of attempts: what it may never delete, and what a policy promises."""

import dataclasses

import pytest
from hypothesis import Phase, given, settings, strategies as st

from yatt.config.sections.operation import CheckpointSection
from yatt.core.attempts.claims import BEGINNING, Commit, refused_commits, valid_commits
from yatt.core.phases import retention
from yatt.core.phases.retention import StoredCommits, superseded_commits


@st.composite
def histories(draw):
    """Commits of several attempts, each of which went on from a valid commit of the ones before."""
    commits, adopted = set(), {}
    for attempt in range(1, draw(st.integers(1, 4)) + 1):
        line = valid_commits(commits, adopted)
        parent = draw(st.sampled_from([*line, BEGINNING]))
        adopted[attempt] = parent
        steps = draw(st.lists(st.integers(1, 7), max_size=8))
        iteration = parent.iteration
        for step in steps:
            iteration += step
            commits.add(Commit(iteration, attempt))
    line = tuple(valid_commits(commits, adopted))
    whole = draw(st.sampled_from([*line, None]))
    needed = draw(st.sets(st.sampled_from(sorted(commits) or [BEGINNING]), max_size=3))
    values = {c.iteration: float(draw(st.integers(-3, 3))) for c in line if draw(st.booleans())}
    return StoredCommits(
        line=line, stale=tuple(refused_commits(commits, adopted)),
        attempt=max(adopted) + draw(st.integers(0, 1)),
        newest_whole=whole, needed=frozenset(needed), values=values,
    )  # fmt: skip


policies = st.builds(
    CheckpointSection, keep=st.integers(1, 4), keep_every=st.integers(0, 12),
    keep_best=st.integers(1, 3), best_metric=st.just("m"), best_mode=st.sampled_from(["max", "min"]),
)  # fmt: skip


def check(stored: StoredCommits, policy: CheckpointSection, gone: list[Commit]) -> None:
    """Says every promise in other words than the code."""
    left = [c for c in stored.line if c not in gone]
    assert len(set(gone)) == len(gone)
    assert set(gone) <= {*stored.line, *stored.stale}
    assert not set(gone) & stored.needed, "what is needed stays"
    if stored.newest_whole is None:
        assert not gone, "nothing is known to be whole"
        return
    assert stored.newest_whole in left
    assert all(c not in gone for c in stored.line if c.iteration > stored.newest_whole.iteration)
    assert left[: policy.keep] == list(stored.line[: policy.keep])
    for multiple in range(policy.keep_every, 60, policy.keep_every) if policy.keep_every else ():
        due = [c for c in stored.line if multiple <= c.iteration < multiple + policy.keep_every]
        assert not due or min(due) in left, "the first of every interval stays"
    rated = [c for c in stored.line if c.iteration in stored.values]
    lost = [stored.values[c.iteration] for c in rated if c in gone]
    held = sorted((stored.values[c.iteration] for c in rated if c in left), reverse=policy.best_mode == "max")
    for value in lost:
        enough = held[: policy.keep_best]
        assert len(enough) == policy.keep_best
        assert all(value <= v if policy.best_mode == "max" else value >= v for v in enough)
    for commit in gone:
        if commit in stored.stale:
            assert commit.attempt < stored.attempt
            assert len(stored.line) >= policy.keep
            assert commit.iteration < stored.line[policy.keep - 1].iteration
    extra = policy.keep + policy.keep_best + len(stored.needed) + stored.line.index(stored.newest_whole) + 1
    spaced = len({c.iteration // policy.keep_every for c in left}) if policy.keep_every else 0
    assert len(left) <= extra + spaced, "nothing is kept without a reason"
    assert gone == sorted(gone), "oldest first, so that a kill leaves the newest"


@settings(max_examples=120, deadline=None)
@given(stored=histories(), policy=policies)
def test_nothing_needed_is_deleted_and_nothing_superfluous_kept(stored, policy):
    check(stored, policy, superseded_commits(stored, policy))


@settings(max_examples=60, deadline=None)
@given(stored=histories(), policy=policies)
def test_deciding_again_after_the_deletion_deletes_nothing_more(stored, policy):
    """Also of a deletion that was interrupted anywhere: the rest is the same."""
    gone = superseded_commits(stored, policy)
    for done in range(len(gone) + 1):
        rest = dataclasses.replace(
            stored,
            line=tuple(c for c in stored.line if c not in gone[:done]),
            stale=tuple(c for c in stored.stale if c not in gone[:done]),
        )
        assert superseded_commits(rest, policy) == gone[done:]


def no_best(stored, policy):
    return superseded_commits(dataclasses.replace(stored, values={}), policy)


def wrong_mode(stored, policy):
    other = "min" if policy.best_mode == "max" else "max"
    return superseded_commits(stored, dataclasses.replace(policy, best_mode=other))


def newest_of_each_interval(stored, policy):
    def spaced(line, every):
        return {c.iteration // every: c for c in reversed(line)}.values() if every else ()

    before, retention._spaced = retention._spaced, spaced
    try:
        return superseded_commits(stored, policy)
    finally:
        retention._spaced = before


def only_exact_multiples(stored, policy):
    gone = superseded_commits(stored, dataclasses.replace(policy, keep_every=0))
    return [c for c in gone if not policy.keep_every or c.iteration % policy.keep_every]


def takes_what_is_needed(stored, policy):
    return superseded_commits(dataclasses.replace(stored, needed=frozenset()), policy)


def trusts_the_newest(stored, policy):
    return superseded_commits(dataclasses.replace(stored, newest_whole=next(iter(stored.line), None)), policy)


def one_too_few(stored, policy):
    return superseded_commits(stored, dataclasses.replace(policy, keep=policy.keep - 1 or 1))


def all_that_is_stale(stored, policy):
    return sorted({*superseded_commits(stored, policy), *set(stored.stale).difference(stored.needed)})


def newest_first(stored, policy):
    return superseded_commits(stored, policy)[::-1]


def keeps_everything(stored, policy):
    return []


MISTAKES = [
    no_best, wrong_mode, newest_of_each_interval, only_exact_multiples, takes_what_is_needed,
    trusts_the_newest, one_too_few, all_that_is_stale, newest_first, keeps_everything,
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_planted_mistakes_are_found(mistake):
    @settings(
        max_examples=300,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        phases=[Phase.generate],
    )
    @given(stored=histories(), policy=policies)
    def search(stored, policy):
        check(stored, policy, mistake(stored, policy))

    with pytest.raises(AssertionError):
        search()
