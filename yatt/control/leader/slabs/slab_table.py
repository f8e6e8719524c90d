"""The leader's table: which role has which slab, in each phase and now."""

from collections import Counter
from collections.abc import Iterable, Mapping

from yatt.core.gpus import moves as core
from yatt.core.gpus.moves import MoveRules, Moves, OrderMove
from yatt.core.gpus.placement import TRAINER, Holders, Placement, Slab
from yatt.core.phases.phases import Phase

NodeHolders = tuple[tuple[int, str], ...]
"""(slab, role) of one node's slabs."""


class SlabTable:
    """The placement's table, and the present roles of slabs that change between rollout and GenRMs.

    Barriers ask for each node twice per phase, and hashing thousands of slabs for each answer took a tenth of
    a leader's time. So answers are kept until a slab moves.

    Attributes:
        moves: the state of the rules of moves.
        sampling: phase, and number of the scoring, in which engines sample or score now; None: in none.
    """

    def __init__(self, placement: Placement, rules: MoveRules, absent: Iterable[int] = ()) -> None:
        self.placement, self.rules = placement, rules
        table = {slab: placement.sampling[slab] for slab in placement.slabs if slab in placement.shared}
        self._unshared = {slab: role for slab, role in placement.sampling.items() if slab not in table}
        self.moves = Moves(table=table)
        self.sampling: tuple[Phase, int] | None = None
        self._answered = self.moves.table  # the table of the answers that are kept
        self._answers: dict[tuple[int, int], NodeHolders] = {}
        for index in sorted(absent):
            self.step(core.NodeGone(index))

    def step(self, event: core.MoveEvent) -> tuple[OrderMove, ...]:
        """Handles an event; returns the orders."""
        self.moves, orders = core.step(self.moves, event, self.rules)
        return orders

    def holders(self, phase: Phase, scoring: int) -> Holders:
        """Returns the roles that hold the slabs in a phase."""
        fixed, table = self._fixed(phase, scoring), self._moved_in(phase)
        return {slab: _role(slab, role, table) for slab, role in fixed.items()}

    def holders_on(self, index: int, phase: Phase, scoring: int = 0) -> NodeHolders:
        """Returns (slab, role) of one node's slabs in a phase. Answers are kept: a changed table of moves
        must be another object."""
        if self.moves.table is not self._answered:
            self._answered, self._answers = self.moves.table, {}
        fixed, table = self._fixed(phase, scoring), self._moved_in(phase)
        key = index, id(fixed)  # the placement keeps it; phases that share one share their answers
        if (found := self._answers.get(key)) is None:
            slabs = self.placement.slabs_by_node[index]
            found = tuple((slab.index, _role(slab, fixed[slab], table)) for slab in slabs if slab in fixed)
            self._answers[key] = found
        return found

    def _fixed(self, phase: Phase, scoring: int) -> Holders:
        if phase is Phase.SCORE:
            return self.placement.turns[scoring]
        is_sampling = phase in (Phase.SYNC, Phase.VALIDATE, Phase.ROLLOUT)
        return self.placement.sampling if is_sampling else self.placement.training

    def _moved_in(self, phase: Phase) -> Mapping[Slab, str]:
        """Returns the table as far as the phase has it: where roles take turns, the phase decides."""
        return {} if phase is Phase.SCORE else self.moves.table

    def split(self) -> dict[str, int]:
        """Returns the number of shared slabs of each role, on nodes that take part."""
        num_of = self.moves.num_of()
        return {role: num_of[role] for role in self.rules.least}

    def num_held(self) -> dict[str, int]:
        """Returns the number of slabs that engines of each role hold; none if nothing is sampled."""
        if self.sampling is None:
            return {}
        phase, scoring = self.sampling
        takes_turns = phase is Phase.SCORE
        found = Counter[str]() if takes_turns else self.moves.num_there()
        fixed = self.placement.turns[scoring] if takes_turns else self._unshared
        found.update(role for slab, role in fixed.items() if slab.node not in self.moves.lost)
        return {role: num for role, num in found.items() if role != TRAINER and num}


def _role(slab: Slab, role: str, table: Mapping[Slab, str]) -> str:
    return role if role == TRAINER else table.get(slab, role)
