"""Which slabs go from rollout to a GenRM near the end of a batch: the policy's decision within a batch. Pure.

A rollout slab goes to a GenRM when the last completions fit on the others without being slower, and the
GenRM's backlog is worth more than the switch. The tail of long completions keeps engines that can hardly use
more company, while judging waits for capacity.

A signal of utilisation is no input: the tail lowers it, and a slab that the tail needs would be taken away.
"""

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from yatt.core.gpus.engine_model import EngineSpeed

TAIL_SLOWDOWN = 1.2
"""In the tail, a token takes at most this multiple of what it takes alone."""

WORTH_SWITCHES, WORTH_S = 1.5, 2.0
"""Verdicts that another engine could take are worth a move if they take longer than so many switches and
seconds."""

WELL_FILLED = 0.5
"""Share of its room that an engine keeps busy with: more verdicts would better be at another engine."""

Split = Mapping[str, int]
"""Number of slabs by role while completions are sampled. Where rollout has all of them, GenRMs take turns
with it: each then has all of them for the verdicts on the whole batch."""


def takes_turns(split: Split, rollout: str) -> bool:
    """Whether rollout has all slabs, and other roles have their turns afterwards."""
    return len(split) > 1 and split[rollout] == sum(split.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpeed:
    """One role's engines: measured speed, sequences that one runs at once, engines on a slab, the fewest and
    most slabs that the role may have, and its requests about each completion, which run side by side."""

    speed: EngineSpeed
    room: int
    engines: int = 1
    least: int = 1
    most: int = 1 << 30
    questions: int = 1

    @property
    def peak(self) -> float:
        """Tokens per second of one slab whose engines are full."""
        return self.speed.tokens_per_s(self.room) * self.engines


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTail:
    """A batch at one moment.

    Attributes:
        running: rollout requests under way, by slab; slabs that are about to move are left out.
        num_waiting: rollout requests that no engine has yet, those of prompts not yet opened included.
        backlog: tokens of the verdicts that each GenRM was asked for and has not answered, by role.
        num_asked: number of these verdicts.
        split: slabs of each GenRM that work or are on their way.
        switch_s: measured seconds of a move.
        num_late: rollout requests that may still come for groups that replace dropped ones (`late_samples`).
        build_s: the same where the GenRM's engine is not built yet.
        unbuilt: slabs without a GenRM's engine, by role.
    """

    running: Mapping[str, int]
    num_waiting: int
    backlog: Mapping[str, float]
    num_asked: Mapping[str, float]
    split: Split
    switch_s: float
    num_late: float = 0.0
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
    alive, split, moves = sum(tail.running.values()) + tail.num_late, dict(tail.split), list[TailMove]()
    given, queues = set[str](), dict[str, list[tuple[bool, int, str]]]()
    while can_spare(alive, len(tail.running) - len(given), speed):
        role, backlog_s = longest_queue(tail.backlog, tail.num_asked, split, roles)
        if not role:
            break
        if role not in queues:
            queues[role] = [(tail.is_unbuilt(name, role), num, name) for name, num in tail.running.items()]
            heapq.heapify(queues[role])
        is_unbuilt, _, name = _next_slab(queues[role], given)
        if not is_worth(backlog_s, tail.build_s if is_unbuilt else tail.switch_s):
            break
        given.add(name)
        split[role] += 1
        moves.append(TailMove(name, role, backlog_s, backlog_s * (split[role] - 1) / split[role]))
    return moves


def late_samples(num_samples: float, group_size: int, kept: float) -> float:
    """Returns by how many samples a batch may need more than expected, because more groups are dropped: one
    standard deviation.

    Args:
        num_samples: expected number.
        kept: share of the groups that are not dropped.
    """
    groups = num_samples / group_size
    return group_size * math.sqrt(groups * kept * (1 - kept)) / kept


def can_spare(alive: float, slabs: int, speed: RoleSpeed) -> bool:
    """Whether the last `alive` completions are hardly slower on one slab less than alone."""
    if slabs <= speed.least:
        return False
    engines = (slabs - 1) * speed.engines
    per_engine = max(alive / engines, 1.0) if engines else alive
    return speed.speed.token_s(per_engine) <= TAIL_SLOWDOWN * speed.speed.token_s(1)


def is_worth(queue_s: float, switch_s: float) -> bool:
    """Whether verdicts wait for an engine so long that a move pays."""
    return queue_s > WORTH_SWITCHES * switch_s + WORTH_S


def longest_queue(
    backlog: Mapping[str, float], num_asked: Mapping[str, float], split: Split, roles: Mapping[str, RoleSpeed]
) -> tuple[str, float]:
    """Returns the GenRM with the longest queue, and its seconds; '' if none may have more slabs. The queue is
    what its engines have beyond half of their room. The rest is no reason for a move: another engine takes
    only verdicts that wait or come, because those that run stay where they are.

    Args:
        backlog: tokens of the verdicts that each GenRM was asked for and has not answered, by role.
        num_asked: number of these verdicts.
        split: slabs that each has or will have.
    """
    found = [("", 0.0)]
    for role, tokens in backlog.items():
        speed, slabs = roles[role], split[role]
        if slabs < speed.most and num_asked[role] > 0:
            filled = WELL_FILLED * slabs * speed.engines * speed.room
            waiting = max(1 - filled / num_asked[role], 0.0)
            found.append((role, waiting * tokens / (max(slabs, 1) * speed.peak)))
    return max(found, key=lambda each: each[1])


def _next_slab(queue: list[tuple[bool, int, str]], given: set[str]) -> tuple[bool, int, str]:
    """Takes the first slab from a heap that is not given away yet."""
    while queue[0][2] in given:
        heapq.heappop(queue)
    return heapq.heappop(queue)
