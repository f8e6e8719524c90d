"""Claims: every schedule of three starts on a bad filesystem. Lineage: 1000 schedules with stale attempts.

The filesystem may show an old listing, drop a creation, or create and lose the reply. A stale attempt may be
paused between any two steps and go on at any time later.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from yatt.core.attempts import claims as rules
from yatt.core.attempts.claims import BEGINNING, Checked, Claim, ClaimStage, Commit, FileOwner, Linked, Looked

Step = Callable[[Claim, rules.ClaimEvent], Claim]

# ---- claiming -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """`names`: owner by attempt. `bars`: what had been won when the start came to life."""

    claims: tuple[Claim, ...] = (Claim(), Claim(), Claim())
    names: tuple[tuple[int, int], ...] = ()
    bars: tuple[int, ...] = (-1, -1, -1)
    dead: frozenset[int] = frozenset()
    drops_left: int = 2


def moves(world: World, step: Step) -> Iterator[World]:
    for who, claim in enumerate(world.claims):
        if who in world.dead or claim.stage is ClaimStage.WON:
            continue
        yield replace(world, dead=world.dead | {who})
        for changed, event in happenings(world, who, claim):
            after = step(claim, event)
            claims = (*world.claims[:who], after, *world.claims[who + 1 :])
            yield checked(replace(changed, claims=claims), who)


def happenings(world: World, who: int, claim: Claim) -> Iterator[tuple[World, rules.ClaimEvent]]:
    names = dict(world.names)
    newest = max(names, default=0)
    if claim.stage is ClaimStage.LOOK:
        won = max((c.attempt for c in world.claims if c.stage is ClaimStage.WON), default=0)
        bars = (*world.bars[:who], won, *world.bars[who + 1 :])
        for seen in {newest, max(0, newest - 1), 0}:
            yield replace(world, bars=bars), Looked(seen)
    elif claim.stage is ClaimStage.LINK:
        made = tuple(sorted({claim.attempt: who, **names}.items()))
        yield replace(world, names=made), Linked()
        if world.drops_left:
            yield replace(world, drops_left=world.drops_left - 1), Linked()
    elif claim.attempt not in names:
        yield world, Checked(FileOwner.NOBODYS)
    else:
        yield world, Checked(FileOwner.MINE if names[claim.attempt] == who else FileOwner.OTHERS)


def checked(world: World, who: int) -> World:
    claim = world.claims[who]
    if claim.stage is ClaimStage.WON:
        others = [c.attempt for i, c in enumerate(world.claims) if i != who and c.stage is ClaimStage.WON]
        assert claim.attempt not in others, f"attempt {claim.attempt} has two trainer_nodes: {world}"
        assert claim.attempt > world.bars[who], f"start {who} is not above what had been won before: {world}"
        assert dict(world.names).get(claim.attempt) == who, f"start {who} holds what is not its own: {world}"
    return world


def walk(step: Step) -> tuple[int, set[int]]:
    """All reachable worlds, and the attempts that were won."""
    todo, seen, won = [World()], {World()}, set()
    while todo:
        world = todo.pop()
        won |= {claim.attempt for claim in world.claims if claim.stage is ClaimStage.WON}
        for after in moves(world, step):
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return len(seen), won


def test_no_schedule_gives_an_attempt_to_two_or_a_lower_one_to_a_later_start() -> None:
    worlds, won = walk(rules.claim_step)
    assert worlds > 1000
    assert won == {1, 2, 3}


def believes_the_reply(claim, event):
    return (
        Claim(ClaimStage.WON, claim.attempt) if isinstance(event, Linked) else rules.claim_step(claim, event)
    )


def takes_what_it_saw(claim, event):
    if isinstance(event, Looked):
        return Claim(ClaimStage.LINK, max(1, event.newest))
    if isinstance(event, Checked):
        return Claim(ClaimStage.WON, claim.attempt)
    return rules.claim_step(claim, event)


def leaves_a_gap(claim, event):
    if event == Checked(FileOwner.NOBODYS):
        return Claim(ClaimStage.LINK, claim.attempt + 1)
    return rules.claim_step(claim, event)


def takes_nobodys_for_its_own(claim, event):
    if event == Checked(FileOwner.NOBODYS):
        return Claim(ClaimStage.WON, claim.attempt)
    return rules.claim_step(claim, event)


@pytest.mark.parametrize(
    "wrong", [believes_the_reply, takes_what_it_saw, leaves_a_gap, takes_nobodys_for_its_own]
)
def test_a_planted_mistake_in_claiming_is_caught(wrong: Step) -> None:
    with pytest.raises(AssertionError, match=r"two trainer_nodes|not above|not its own"):
        walk(wrong)


# ---- lineage ------------------------------------------------------------------------------------

Lineage = Callable[[set[Commit], dict[int, Commit]], list[Commit]]


@dataclass
class Start:
    """One start's life: read commits, read adoptions, adopt, then check and commit in turn."""

    attempt: int
    stage: str = "read commits"
    commits: set[Commit] = field(default_factory=set)
    at: Commit = BEGINNING


@dataclass
class StaleAttempts:
    """A store, and every start that ever was: none of them is told to die."""

    draw: random.Random
    lineage: Lineage = rules.valid_commits
    adopts_first: bool = False
    starts: list[Start] = field(default_factory=list)
    commits: dict[Commit, int] = field(default_factory=dict)
    adopted: dict[int, Commit] = field(default_factory=dict)
    adopted_at: dict[int, int] = field(default_factory=dict)
    parents: dict[Commit, Commit] = field(default_factory=dict)
    now: int = 0

    def run(self, steps: int) -> None:
        for self.now in range(steps):
            if not self.starts or self.draw.random() < 0.06:
                self.starts.append(Start(len(self.starts) + 1))
            self.go_on(self.draw.choice(self.starts))
            self.check()

    def go_on(self, start: Start) -> None:
        match start.stage:
            case "read commits":
                start.commits, start.stage = set(self.commits), "read adoptions"
                if self.adopts_first:
                    start.at, start.stage = self.newest(start), "read commits late"
            case "read commits late":
                late = [c for c in self.commits if c.attempt == start.at.attempt]
                start.at, start.stage = max([start.at, *late]), "adopt"
            case "read adoptions":
                start.at, start.stage = self.newest(start), "adopt"
            case "adopt":
                self.adopted[start.attempt], self.adopted_at[start.attempt] = start.at, self.now
                start.stage = "check"
            case "check":  # whoever sees a newer attempt ends; a stale attempt was paused after it had looked
                start.stage = "ended" if start.attempt < len(self.starts) else "commit"
            case "commit":
                made = Commit(start.at.iteration + 1, start.attempt)
                self.parents[made], self.commits[made] = start.at, self.now
                start.at, start.stage = made, "check"

    def newest(self, start: Start) -> Commit:
        older = {attempt: commit for attempt, commit in self.adopted.items() if attempt < start.attempt}
        return next(iter(self.lineage(start.commits, older)), BEGINNING)

    def check(self) -> None:
        line = self.lineage(set(self.commits), self.adopted)
        for newer, older in zip(line, [*line, BEGINNING][1:], strict=True):
            assert self.parents[newer] == older, f"{newer} does not go on from {older}"
        for commit in line:
            later = [
                e for e, when in self.adopted_at.items() if e > commit.attempt and when < self.commits[commit]
            ]
            assert not later, (
                f"{commit} is a stale attempt's: attempt {later[0]} had adopted before it was written"
            )


def test_a_thousand_schedules_of_stale_attempts_write_nothing_that_counts() -> None:
    refused = 0
    for seed in range(1000):
        stale = StaleAttempts(random.Random(seed))
        stale.run(120)
        refused += len(rules.refused_commits(set(stale.commits), stale.adopted))
    assert refused > 200, "the schedules must make stale attempts write, or nothing was tested"


def newest_iteration_wins(commits, adopted):
    best: dict[int, Commit] = {}
    for commit in sorted(commits):
        best[commit.iteration] = commit
    return sorted(best.values(), reverse=True)


def newest_attempt_wins(commits, adopted):
    best: dict[int, Commit] = {}
    for commit in sorted(commits, key=lambda c: c.attempt):
        best[commit.iteration] = commit
    return sorted(best.values(), reverse=True)


def forgets_the_limit(commits, adopted):
    path: list[Commit] = []
    attempt = max(adopted, default=0)
    while attempt:
        parent = adopted.get(attempt, BEGINNING)
        path += sorted((c for c in commits if c.attempt == attempt), reverse=True)
        attempt = parent.attempt
    return path


@pytest.mark.parametrize("wrong", [newest_iteration_wins, newest_attempt_wins, forgets_the_limit])
def test_a_planted_mistake_in_the_lineage_is_caught(wrong: Lineage) -> None:
    with pytest.raises(AssertionError, match=r"stale attempt's|does not go on"):
        for seed in range(200):
            StaleAttempts(random.Random(seed), lineage=wrong).run(120)


def test_reading_adoptions_before_commits_is_caught() -> None:
    with pytest.raises(AssertionError, match=r"stale attempt's|does not go on"):
        for seed in range(1000):
            StaleAttempts(random.Random(seed), adopts_first=True).run(120)


def test_the_note_of_a_stale_attempts_end_does_not_end_the_run() -> None:
    assert rules.is_finished(3, newest=3)
    assert not rules.is_finished(3, newest=4)
    assert not rules.is_finished(None, newest=0)
