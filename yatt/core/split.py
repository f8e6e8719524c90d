"""How many slabs rollout and each GenRM have: the policy. Pure.

Two decisions, each from what was measured:

- *Between batches* (`choose`): the split whose predicted time for a batch is least. The prediction runs one
  engine of each role with the lengths that were seen. The split changes only if that gains more than a dead
  band, because lengths differ from batch to batch.
- *Within a batch* (`tail_moves`): a rollout slab goes to a GenRM when the last completions fit on the others
  without being slower, and the GenRM's backlog is worth more than the switch. The tail of long completions
  keeps engines that can hardly use more company, while judging waits for capacity.

A signal of utilisation is no input: the tail lowers it, and a slab that the tail needs would be taken away.

A *unit* is one engine's worth; a slab holds `engines` of them, which differs between roles.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from yatt.core.engine_model import EngineSpeed, finish_times

DEAD_BAND = 0.03
"""Fraction of the predicted time that another split must gain."""

UNDO_BAND, UNDO_BATCHES = 0.1, 3
"""The same for a split that takes back a change of so many batches before: lengths differ by chance."""

TAIL_SLOWDOWN = 1.2
"""In the tail, a token takes at most this multiple of what it takes alone."""

WORTH_SWITCHES, WORTH_S = 1.5, 2.0
"""A backlog is worth a move if it takes longer than so many switches and seconds."""

MOST_PREDICTED = 2048
"""Number of requests of one engine that a prediction looks at, at most."""

Split = Mapping[str, int]
"""Number of slabs by role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpeed:
    """One role's engines: measured speed, sequences that one runs at once, engines on a slab, and the fewest
    and most slabs that the role may have."""

    speed: EngineSpeed
    room: int
    engines: int = 1
    least: int = 1
    most: int = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDemand:
    """What a batch asks for.

    Attributes:
        completions: tokens of each completion that was seen.
        verdicts: tokens of each GenRM's verdicts on the same completions, by role.
        num_samples: completions that a batch needs, those that are dropped later included.
    """

    completions: Sequence[float]
    verdicts: Mapping[str, Sequence[float]]
    num_samples: int


def predict(
    split: Split, demand: BatchDemand, roles: Mapping[str, RoleSpeed], rollout: str, switch_s: float
) -> float:
    """Seconds from the first request of a batch to its last verdict, with the moves of `tail_moves` in it.

    Looks at one rollout engine that has as many requests as the fullest, the longest among them; GenRMs are
    streams of tokens. Long completions end last, and their verdicts are the longest.
    """
    num, speed = max(demand.num_samples, 1), roles[rollout]
    mine, scale = _share(num, split[rollout] * speed.engines)
    begun = [(0.0, tokens) for tokens in _mixed(_spread(sorted(demand.completions), mine))]
    ends = [end_s * scale for end_s in finish_times(begun, speed.speed, speed.room)]
    judges = {role: _Judge(roles[role], split[role]) for role in demand.verdicts}
    verdicts = {role: _spread(sorted(tokens), mine) for role, tokens in demand.verdicts.items()}
    free = split[rollout]
    for index, end_s in enumerate(ends):
        left = mine - index - 1
        for role, judge in judges.items():
            judge.receive(end_s, verdicts[role][index] * num / mine)
        if left > speed.room:
            continue
        alive = left * split[rollout] * speed.engines
        while free > speed.least and (able := [each for each in judges.values() if each.may_gain]):
            judge = max(able, key=lambda each: each.backlog_s)
            if not _is_worth(judge.backlog_s, switch_s) or not _fits(
                alive, (free - 1) * speed.engines, speed.speed
            ):
                break
            free -= 1
            judge.gain(end_s + switch_s)
    return max([ends[-1], *(each.over(verdicts[role][-1]) for role, each in judges.items())])


class _Judge:
    """A GenRM as a stream of tokens, at a moment that moves forward."""

    def __init__(self, speed: RoleSpeed, slabs: int) -> None:
        self._speed, self._slabs, self._coming = speed, slabs, deque[float]()
        self._tokens, self._now_s = 0.0, 0.0

    @property
    def _peak(self) -> float:
        return self._speed.speed.tokens_per_s(self._speed.room) * self._speed.engines

    @property
    def may_gain(self) -> bool:
        """Whether it may have one more slab."""
        return self._slabs + len(self._coming) < self._speed.most

    @property
    def backlog_s(self) -> float:
        """Seconds that its tokens take, with all slabs that it has or will have."""
        return self._tokens / ((self._slabs + len(self._coming)) * self._peak)

    def receive(self, now_s: float, tokens: float) -> None:
        """Works until `now_s`, then has more to do."""
        while self._coming and self._coming[0] <= now_s:
            self._work(self._coming.popleft())
            self._slabs += 1
        self._work(now_s)
        self._tokens += tokens

    def gain(self, ready_s: float) -> None:
        """Gets one more slab, later."""
        self._coming.append(ready_s)

    def over(self, last: float) -> float:
        """When it has nothing left to do; the `last` verdict has this many tokens."""
        while self._coming and self._now_s + self._tokens / (self._slabs * self._peak) > self._coming[0]:
            self._work(self._coming.popleft())
            self._slabs += 1
        return self._now_s + self._tokens / (self._slabs * self._peak) + last * self._speed.speed.token_s(1)

    def _work(self, now_s: float) -> None:
        self._tokens = max(self._tokens - (now_s - self._now_s) * self._slabs * self._peak, 0.0)
        self._now_s = now_s


def _is_worth(backlog_s: float, switch_s: float) -> bool:
    """Whether a backlog takes so long that a move pays."""
    return backlog_s > WORTH_SWITCHES * switch_s + WORTH_S


def _fits(alive: float, engines: int, speed: EngineSpeed) -> bool:
    """Whether so many sequences are hardly slower on these engines than alone."""
    per_engine = max(alive / engines, 1.0) if engines else alive
    return speed.token_s(per_engine) <= TAIL_SLOWDOWN * speed.token_s(1)


def choose(
    before: Sequence[Split],
    demand: BatchDemand,
    roles: Mapping[str, RoleSpeed],
    rollout: str,
    switch_s: float,
) -> dict[str, int]:
    """Returns the split for the next batch: the last one, or a better one by more than the dead band.

    Args:
        before: splits of the batches before, oldest first; at least the last one.
    """
    now = before[-1]

    def seconds(split: Split) -> float:
        return predict(split, demand, roles, rollout, switch_s)

    now_s = best_s = seconds(now)
    best, step = dict(now), max(sum(now.values()) // 4, 1)
    while step:
        tried = [(seconds(each), sorted(each.items())) for each in _near(best, step, roles)]
        least_s, split = min(tried, default=(best_s, []))
        if least_s < best_s:
            best_s, best = least_s, dict(split)
        else:
            step //= 2
    band = UNDO_BAND if _undoes(best, before[-UNDO_BATCHES - 1 :]) else DEAD_BAND
    return best if best_s < now_s * (1 - band) else dict(now)


def _undoes(split: Split, before: Sequence[Split]) -> bool:
    """Whether a split takes back, for any role, some of a change among these splits."""
    changes = [*itertools.pairwise(before)]
    return any(
        (new[role] - old[role]) * (split[role] - before[-1][role]) < 0
        for old, new in changes
        for role in split
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTail:
    """A batch at one moment.

    Attributes:
        running: rollout requests under way, by slab; slabs that are about to move are left out.
        num_waiting: rollout requests that no engine has yet, those of prompts not yet opened included.
        backlog: tokens that each GenRM still has to make for completions it has, by role.
        split: slabs of each GenRM that work or are on their way.
        switch_s: measured seconds of a move.
        build_s: the same where the GenRM's engine is not built yet.
        unbuilt: slabs without a GenRM's engine, by role.
    """

    running: Mapping[str, int]
    num_waiting: int
    backlog: Mapping[str, float]
    split: Split
    switch_s: float
    build_s: float = 0.0
    unbuilt: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def is_unbuilt(self, slab: str, role: str) -> bool:
        """Whether the role has no engine on this slab yet."""
        return slab in self.unbuilt.get(role, ())


@dataclass(frozen=True, slots=True)
class TailMove:
    """A slab that goes to a GenRM whose backlog takes `backlog_s` with the slabs that it has, and `after_s`
    with this one."""

    slab: str
    role: str
    backlog_s: float
    after_s: float


def tail_moves(tail: BatchTail, roles: Mapping[str, RoleSpeed], rollout: str) -> list[TailMove]:
    """Returns moves to GenRMs, slabs with a built engine first, then the emptiest; none before the tail of
    the batch."""
    speed = roles[rollout]
    if tail.num_waiting:
        return []
    alive, split, moves = sum(tail.running.values()), dict(tail.split), list[TailMove]()
    given, queues = set[str](), dict[str, list[tuple[bool, int, str]]]()
    while (num_left := len(tail.running) - len(given)) > speed.least:
        is_tail = _fits(alive, (num_left - 1) * speed.engines, speed.speed)
        role, backlog_s = _worst(tail, split, roles)
        if not is_tail or not role:
            break
        if role not in queues:
            queues[role] = [(tail.is_unbuilt(name, role), num, name) for name, num in tail.running.items()]
            heapq.heapify(queues[role])
        is_unbuilt, _, name = _next_slab(queues[role], given)
        if not _is_worth(backlog_s, tail.build_s if is_unbuilt else tail.switch_s):
            break
        given.add(name)
        split[role] += 1
        moves.append(TailMove(name, role, backlog_s, backlog_s * (split[role] - 1) / split[role]))
    return moves


def _next_slab(queue: list[tuple[bool, int, str]], given: set[str]) -> tuple[bool, int, str]:
    """Takes the first slab from a heap that is not given away yet."""
    while queue[0][2] in given:
        heapq.heappop(queue)
    return heapq.heappop(queue)


def _worst(tail: BatchTail, split: Split, roles: Mapping[str, RoleSpeed]) -> tuple[str, float]:
    """The GenRM whose backlog takes longest, and its seconds; '' if none may have more slabs."""
    found = [("", 0.0)]
    for role, tokens in tail.backlog.items():
        judge = roles[role]
        if split[role] < judge.most:
            peak = judge.speed.tokens_per_s(judge.room) * judge.engines
            found.append((role, tokens / (max(split[role], 1) * peak)))
    return max(found, key=lambda each: each[1])


def _near(split: Split, step: int, roles: Mapping[str, RoleSpeed]) -> list[dict[str, int]]:
    """Splits with `step` slabs moved from one role to another, from all others to one, or from one to all.

    The last two, because two GenRMs that have just enough must give together: if one alone does, the batch
    waits for it.
    """
    found = []
    for one in split:
        others = [role for role in split if role != one]
        for given in (*((role,) for role in others), tuple(others)):
            for change in (step, -step):
                moved = {role: split[role] - change for role in given}
                near = {**split, **moved, one: split[one] + change * len(given)}
                if all(roles[role].least <= num <= roles[role].most for role, num in near.items()):
                    found.append(near)
    return found


def _share(num: int, engines: int) -> tuple[int, float]:
    """Requests of the fullest of so many engines, cut to `MOST_PREDICTED`; and by what factor."""
    share = max(-(-num // engines), 1)
    looked_at = min(share, MOST_PREDICTED)
    return looked_at, share / looked_at


def _spread(items: Sequence[float], num: int) -> list[float]:
    """Takes `num` of sorted items at even distances, the last one included; repeats them if there are few."""
    return [items[-1 - i * len(items) // num] for i in reversed(range(num))]


def _mixed(items: list[float]) -> list[float]:
    """The same items in an order in which long and short ones take turns; the same order each time."""
    half = len(items) // 2
    short, long = items[:half], items[half:][::-1]
    return [item for pair in itertools.zip_longest(long, short) for item in pair if item is not None]
