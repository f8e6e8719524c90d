"""What was measured of the last batches: the engines' speeds, lengths, the cost of a move, and for how long
roles have held slabs; and a batch at one moment, as the policy of the split sees it."""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from yatt import clock
from yatt.config.check import engine_roles, engines_per_slab, max_num_seqs, slab_limits
from yatt.config.schema import RunConfig
from yatt.control.leader.slabs.node_loads import NodeLoads
from yatt.control.leader.slabs.slab_table import SlabTable
from yatt.core.gpus.engine_model import EngineSpeed, fitted_speed
from yatt.core.gpus.moves import MoveRules
from yatt.core.gpus.placement import ROLLOUT, genrm_role
from yatt.core.gpus.prediction import BatchDemand, modelled_questions
from yatt.core.gpus.tail import BatchTail, RoleSpeed
from yatt.records.load import StepSums, SwitchCost

QUANTILES = 20
"""Number of equal parts into which the lengths in an event are cut."""

REMEMBERED = 2
"""Number of batches from which the next one is expected."""

MOST_LENGTHS = 4096
"""Number of lengths that the policy looks at, at most."""


class HeldTime:
    """Time for which roles have held slabs while batches were sampled."""

    def __init__(self) -> None:
        self._counts: Mapping[str, int] = {}
        self._since_s = clock.monotonic_s()
        self._held_s: dict[str, float] = {}

    def count(self, counts: Mapping[str, int]) -> None:
        """Begins a time in which roles hold so many slabs."""
        now_s = clock.monotonic_s()
        for role, num in self._counts.items():
            self._held_s[role] = self._held_s.get(role, 0.0) + num * (now_s - self._since_s)
        self._counts, self._since_s = counts, now_s

    def take(self) -> dict[str, float]:
        """Returns slab-seconds by role since the last call."""
        self.count(self._counts)
        held, self._held_s = self._held_s, {}
        return held


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLengths:
    """A batch's completions.

    Attributes:
        lengths: the policy's tokens of each completion of the groups that were kept.
        num_samples: number of all completions, those of dropped groups included.
    """

    lengths: tuple[int, ...]
    num_samples: int

    def quantiles(self) -> list[int]:
        """Returns the shortest and longest length, and those between `QUANTILES` equal parts."""
        ordered = sorted(self.lengths)
        return [ordered[(len(ordered) - 1) * part // QUANTILES] for part in range(QUANTILES + 1)]


@dataclass(slots=True)
class Measurements:
    """Speeds and lengths, from the loads that nodes report."""

    config: RunConfig
    loads: NodeLoads
    speeds: dict[str, EngineSpeed] = field(default_factory=dict)
    last: dict[str, StepSums] = field(default_factory=dict)
    """Sums over the engines' steps in the last batch, by role."""

    batches: deque[BatchLengths] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """The last ones, oldest first."""

    overhead_s: float = 0.0
    """Seconds of the last move in which no engine slept or woke."""

    _demand: BatchDemand | None = None
    _before: Mapping[str, StepSums] = field(default_factory=dict)

    def begin(self) -> None:
        """Begins to measure: a validation before the batch does not count."""
        self._before = self.loads.steps()

    def batch_over(self, batch: BatchLengths) -> None:
        """Measures since `begin`, or since the batch before."""
        now = self.loads.steps()
        for role, sums in now.items():
            new = sums - self._before.get(role, StepSums())
            self.last[role] = new
            if (speed := fitted_speed(new)) is not None:
                self.speeds[role] = speed
        self.batches.append(batch)
        self._demand = None
        self._before = now

    @property
    def tokens(self) -> dict[str, float]:
        """Mean tokens of verdicts per completion, by role, in the last batch."""
        return {role: sums.running / self._num_samples for role, sums in self._judges()}

    @property
    def questions(self) -> dict[str, float]:
        """Mean number of a GenRM's answers per completion, by role, in the last batch. A thought and the
        verdict after it are one."""
        thinking = {genrm_role(genrm.name) for genrm in self.config.engine_genrms if genrm.think.budget}
        return {
            role: sums.texts / (2 if role in thinking else 1) / self._num_samples
            for role, sums in self._judges()
        }

    @property
    def _num_samples(self) -> int:
        return max(1, self.batches[-1].num_samples)

    def _judges(self) -> list[tuple[str, StepSums]]:
        return [(role, sums) for role, sums in self.last.items() if role != ROLLOUT]

    @property
    def is_known(self) -> bool:
        """Whether every role was measured."""
        roles = engine_roles(self.config)
        has_speeds = all(role in self.speeds for role in roles)
        return bool(self.batches) and has_speeds and all(role in self.tokens for role in roles[1:])

    def roles(self) -> dict[str, RoleSpeed]:
        """Returns the roles of the policy."""
        return {role: self._role(role) for role in engine_roles(self.config)}

    def _role(self, role: str) -> RoleSpeed:
        least, most = slab_limits(self.config, role)
        room = max_num_seqs(self.config, role)
        engines = engines_per_slab(self.config, role)
        return RoleSpeed(
            speed=self.speeds[role],
            room=room,
            engines=engines,
            least=least,
            most=most,
            questions=modelled_questions(self.questions.get(role, 1.0)),
        )

    def demand(self) -> BatchDemand:
        """Returns what the next batch is expected to ask for: the same as the mean of the last ones."""
        if self._demand is None:
            self._demand = self._expected()
        return self._demand

    def _expected(self) -> BatchDemand:
        assert self.batches, "asked for once it is known"
        every = sorted(length for batch in self.batches for length in batch.lengths)
        step = -(-len(every) // MOST_LENGTHS)
        seen = [float(length) for length in every[::-1][::step]][::-1]
        verdicts = {role: [mean] * len(seen) for role, mean in self.tokens.items()}
        num_samples = sum(batch.num_samples for batch in self.batches)
        return BatchDemand(
            completions=seen,
            verdicts=verdicts,
            num_samples=round(num_samples / len(self.batches)),
            group_size=self.config.rollout.n,
            kept=len(every) / max(num_samples, 1),
        )

    def switch_s(self) -> tuple[float, float]:
        """Returns the seconds of a move from rollout to a GenRM: with an engine that sleeps, and with one
        that has to be built. What was not measured counts as the other one."""
        costs = [load.costs for load in self.loads.now().values()]
        sleep_s = _median(each.get(ROLLOUT, SwitchCost()).sleep_s for each in costs)
        judges = [cost for each in costs for role, cost in each.items() if role != ROLLOUT]
        wake_s, build_s = _median(c.wake_s for c in judges), _median(c.build_s for c in judges)
        fixed_s = sleep_s + self.overhead_s
        return fixed_s + (wake_s or build_s), fixed_s + (build_s or wake_s)

    def num_asked(self) -> dict[str, int]:
        """Returns the number of questions that each GenRM has and has not answered, by role."""
        asked = dict.fromkeys(engine_roles(self.config)[1:], 0)
        for load in self.loads.now().values():
            for role, num in load.num_asked.items():
                asked[role] = asked.get(role, 0) + num
        return asked

    def backlog(self) -> dict[str, float]:
        """Returns the tokens of the answers to these questions."""
        tokens, answers = self.tokens, self.questions
        return {
            role: num * tokens.get(role, 0.0) / (answers.get(role) or 1.0)
            for role, num in self.num_asked().items()
        }


def slab_move_rules(config: RunConfig) -> MoveRules:
    """Returns the fewest and the most slabs of each engine role."""
    limits = {role: slab_limits(config, role) for role in engine_roles(config)}
    return MoveRules(
        least={role: least for role, (least, _) in limits.items()},
        most={role: most for role, (_, most) in limits.items()},
    )


def _median(values: Iterable[float]) -> float:
    """The median of what was measured; 0 if nothing was."""
    known = [value for value in values if value > 0]
    return statistics.median(known) if known else 0.0


def tail_of(table: SlabTable, measured: Measurements) -> BatchTail:
    """Returns what nodes have reported last, for the slabs that rollout holds now."""
    loads, moves = measured.loads.now(), table.moves
    # Pairs of node and index, because hashing a Slab is several times slower and there may be thousands.
    there = {(slab.node, slab.index): slab.name for slab in moves.there(ROLLOUT)}
    built = {index: frozenset(load.built) for index, load in loads.items()}
    running = {
        there[index, each.slab]: each.num_requests
        for index, load in loads.items()
        for each in load.slabs
        if each.role == ROLLOUT and (index, each.slab) in there
    }
    judges = [role for role in table.placement.engine_roles if role != ROLLOUT]
    unbuilt = {
        role: frozenset(
            name for (node, index), name in there.items() if (index, role) not in built.get(node, ())
        )
        for role in judges
    }
    num_of, (switch_s, build_s) = moves.num_of(), measured.switch_s()
    return BatchTail(
        running=running,
        num_waiting=sum(load.num_waiting for load in loads.values()),
        backlog=measured.backlog(),
        num_asked=measured.num_asked(),
        split={role: num_of[role] for role in judges},
        switch_s=switch_s,
        num_late=measured.demand().num_late,
        build_s=build_s,
        unbuilt=unbuilt,
    )
