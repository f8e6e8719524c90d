"""Roles of slabs by phase: the placement's fixed role, or the one that the table of moves has."""

from collections.abc import Mapping

from yatt.core.phases import Phase
from yatt.core.placement import TRAINER, Holders, Placement, Slab

NodeHolders = tuple[tuple[int, str], ...]
"""(slab, role) of one node's slabs."""


class SlabRoles:
    """Looks up roles for the barriers: each node is asked for twice per phase, and hashing thousands of slabs
    for each answer took a tenth of a leader's time. So answers are kept until a slab moves."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._table: Mapping[Slab, str] = {}
        self._known: dict[tuple[int, int], NodeHolders] = {}

    def holders(self, phase: Phase, scoring: int, table: Mapping[Slab, str]) -> Holders:
        """Returns the roles that hold the slabs in a phase."""
        fixed = self._fixed(phase, scoring)
        return {slab: _role(slab, role, table) for slab, role in fixed.items()}

    def holders_on(self, index: int, phase: Phase, scoring: int, table: Mapping[Slab, str]) -> NodeHolders:
        """Returns (slab, role) of one node's slabs in a phase. A changed table must be another object."""
        if table is not self._table:
            self._table, self._known = table, {}
        fixed = self._fixed(phase, scoring)
        key = index, id(fixed)  # the placement keeps it; phases that share one share their answers
        if (found := self._known.get(key)) is None:
            slabs = self._placement.slabs_by_node[index]
            found = tuple((slab.index, _role(slab, fixed[slab], table)) for slab in slabs if slab in fixed)
            self._known[key] = found
        return found

    def _fixed(self, phase: Phase, scoring: int) -> Holders:
        if phase is Phase.SCORE:
            return self._placement.scoring[scoring]
        is_sampling = phase in (Phase.SYNC, Phase.VALIDATE, Phase.ROLLOUT)
        return self._placement.sampling if is_sampling else self._placement.training


def _role(slab: Slab, role: str, table: Mapping[Slab, str]) -> str:
    return role if role == TRAINER else table.get(slab, role)
