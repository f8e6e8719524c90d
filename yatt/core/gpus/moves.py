"""Which shared slab changes its role, and when: the leader's rules, as a pure state machine.

The *table* has the role of each shared slab: the one that holds it, or that it was ordered to. A node carries
out an order in its own time (`yatt.core.gpus.lease`) and answers when the new role's engines are awake. Moves
are ordered only while the table is *open*. Where the trainer uses the same slabs it is open while a batch is
sampled; afterwards the barriers of the phases give each slab to the table's role.

- A slab with an order that is not answered is not ordered again. If it was overtaken by another order, and
  the table is open, it is sent again: the table decides.
- A move leaves its former role at least its floor of slabs that are there, and gives no role more than its
  ceiling.
- Where a role's engine cannot be built, the slab has its first role again, and is not ordered to that role
  any more.
- A role without any slab gets one of a role that has two, whatever the floors.
- For a batch in turns (`yatt.core.gpus.tail`) rollout has every slab, whatever the floors. The barriers of
  the scoring phases give slabs to GenRMs, and the table stays closed. A lost node or an engine that cannot be
  built ends it: roles have their floors again.
- If a lost node leaves a role below its floor, a slab of the role that can best spare one is ordered to it,
  as soon as there is one that does not move already.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from yatt.core.gpus.placement import ROLLOUT, Slab


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRules:
    """Fewest and most slabs of each engine role."""

    least: Mapping[str, int]
    most: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """The leader's state.

    Attributes:
        table: the role of each shared slab, those of lost nodes included.
        moving: slabs with an order that is not answered.
        changed: slabs whose role in the table has changed while it was closed.
        unfit: slabs and roles whose engine cannot be built there.
        lost: nodes that take no part.
        takes_turns: rollout has every slab, and GenRMs have them later.
    """

    table: Mapping[Slab, str]
    moving: frozenset[Slab] = frozenset()
    changed: frozenset[Slab] = frozenset()
    unfit: frozenset[tuple[Slab, str]] = frozenset()
    lost: frozenset[int] = frozenset()
    is_open: bool = False
    takes_turns: bool = False

    def there(self, role: str) -> list[Slab]:
        """Slabs that this role holds now."""
        return [slab for slab in self.of(role) if slab not in self.moving]

    def of(self, role: str) -> list[Slab]:
        """Slabs that this role holds, or that were ordered to it."""
        return [slab for slab, holder in self.table.items() if holder == role and slab.node not in self.lost]

    def num_of(self) -> Counter[str]:
        """Number of slabs by role, as `of` has them. Asked at each step: with thousands of slabs, lists of
        them would take most of a leader's time."""
        found = Counter(self.table.values())
        if self.lost:
            found.subtract(role for slab, role in self.table.items() if slab.node in self.lost)
        return found

    def num_there(self) -> Counter[str]:
        """Number of slabs by role, as `there` has them."""
        found = self.num_of()
        found.subtract(self.table[slab] for slab in self.moving if slab.node not in self.lost)
        return found


@dataclass(frozen=True, slots=True)
class TableOpened:
    """Slabs may move. `is_settled`: barriers have given every slab to the table's role before; without them,
    what has changed is ordered now."""

    is_settled: bool = True


@dataclass(frozen=True, slots=True)
class TableClosed:
    """No slab may move any more; orders that are under way are refused or without effect."""


@dataclass(frozen=True, slots=True)
class MoveWanted:
    """The policy wants this slab to change to `role`."""

    slab: Slab
    role: str


@dataclass(frozen=True, slots=True)
class MoveAnswered:
    """The slab's order is over: the role holds it, or another order has overtaken this one."""

    slab: Slab
    has_moved: bool


@dataclass(frozen=True, slots=True)
class MoveFailed:
    """The role's engine cannot be built on this slab; its node gives the slab to `first` again."""

    slab: Slab
    role: str
    first: str
    is_answer: bool = True
    """Whether it answers the slab's order; else it was heard of otherwise."""


@dataclass(frozen=True, slots=True)
class NodeGone:
    """The node takes no part any more."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeBack:
    """The node takes part again, with the table's roles."""

    node: int


MoveEvent = TableOpened | TableClosed | MoveWanted | MoveAnswered | MoveFailed | NodeGone | NodeBack


@dataclass(frozen=True, slots=True)
class OrderMove:
    """Order the slab's node to give it to `role`."""

    slab: Slab
    role: str


Result = tuple[Moves, tuple[OrderMove, ...]]


def step(moves: Moves, event: MoveEvent, rules: MoveRules) -> Result:
    """Handles an event: returns the next state and the orders. Ignores what is not allowed."""
    match event:
        case TableOpened(is_settled):
            return _opened(moves, is_settled=is_settled)
        case TableClosed():
            return replace(moves, is_open=False), ()
        case MoveWanted(slab, role):
            return _moved(moves, slab, role) if may_move(moves, slab, role, rules) else (moves, ())
        case MoveAnswered(slab, has_moved):
            return _answered(moves, slab, rules, has_moved=has_moved)
        case MoveFailed():
            return _repaired(replace(_without(moves, event), takes_turns=False), rules)
        case NodeGone(node):
            moving = frozenset(slab for slab in moves.moving if slab.node != node)
            without = replace(moves, lost=moves.lost | {node}, moving=moving, takes_turns=False)
            return _repaired(without, rules)
        case NodeBack(node):
            return _repaired(replace(moves, lost=moves.lost - {node}, takes_turns=False), rules)


def may_move(moves: Moves, slab: Slab, role: str, rules: MoveRules) -> bool:
    """Whether this slab may be ordered to `role` now."""
    former = moves.table.get(slab, role)
    if not moves.is_open or former == role or slab in moves.moving or slab.node in moves.lost:
        return False
    if (slab, role) in moves.unfit:
        return False
    return moves.num_there()[former] > rules.least[former] and moves.num_of()[role] < rules.most[role]


def with_table(moves: Moves, table: Mapping[Slab, str]) -> Moves:
    """Returns the state with another table, which the barriers of the next phases carry out."""
    assert not moves.is_open, "an open table changes by orders"
    changed = frozenset(slab for slab, role in table.items() if moves.table[slab] != role)
    after = {**moves.table, **table}
    return replace(moves, table=after, changed=moves.changed | changed, takes_turns=False)


def with_turns(moves: Moves) -> Moves:
    """Returns the state for batches in turns; the same if an engine could not be built somewhere."""
    if moves.unfit:
        return moves
    return replace(with_table(moves, dict.fromkeys(moves.table, ROLLOUT)), takes_turns=True)


def _opened(moves: Moves, *, is_settled: bool) -> Result:
    if moves.takes_turns:
        return moves, ()
    after = replace(moves, is_open=True, changed=frozenset())
    if is_settled:
        return after, ()
    ordered = sorted(each for each in moves.changed - moves.moving if each.node not in moves.lost)
    orders = tuple(OrderMove(slab, moves.table[slab]) for slab in ordered)
    return replace(after, moving=moves.moving | frozenset(ordered)), orders


def _answered(moves: Moves, slab: Slab, rules: MoveRules, *, has_moved: bool) -> Result:
    if slab not in moves.moving:
        return moves, ()
    if not has_moved and moves.is_open:
        return moves, (OrderMove(slab, moves.table[slab]),)
    return _repaired(replace(moves, moving=moves.moving - {slab}), rules)


def _without(moves: Moves, event: MoveFailed) -> Moves:
    """Returns the state in which the slab has its first role again, if the table has it with the unfit
    one."""
    unfit = moves.unfit | {(event.slab, event.role)}
    is_its = moves.table.get(event.slab) == event.role
    over = {event.slab} if event.is_answer or is_its else set[Slab]()
    known = replace(moves, unfit=unfit, moving=moves.moving - over)
    if not is_its:
        return known
    table = {**moves.table, event.slab: event.first}
    return replace(known, table=table, changed=moves.changed - {event.slab})


def _moved(moves: Moves, slab: Slab, role: str) -> Result:
    after = replace(moves, table={**moves.table, slab: role})
    if not moves.is_open:
        return replace(after, changed=moves.changed | {slab}), ()
    return replace(after, moving=moves.moving | {slab}), (OrderMove(slab, role),)


def _repaired(moves: Moves, rules: MoveRules) -> Result:
    """Gives slabs to roles that are below their floor, but for a batch in turns."""
    if moves.takes_turns:
        return moves, ()
    orders: list[OrderMove] = []
    for role in sorted(rules.least):
        while moves.num_of()[role] < rules.least[role] and (slab := _spare(moves, role, rules)) is not None:
            moves, ordered = _moved(moves, slab, role)
            orders += ordered
    return moves, tuple(orders)


def _spare(moves: Moves, wanted: str, rules: MoveRules) -> Slab | None:
    """Returns a fit slab of the role that is farthest above its floor. If the wanted role has none at all,
    floors do not count: each other role keeps one. None if there is none to spare."""
    num_there, is_last = moves.num_there(), not moves.num_of()[wanted]
    spare = {role: num_there[role] - (1 if is_last else least) for role, least in rules.least.items()}
    for role in sorted(spare, key=lambda each: (-spare[each], each)):
        fit = [slab for slab in moves.there(role) if (slab, wanted) not in moves.unfit]
        if spare[role] > 0 and fit:
            return max(fit)
    return None


def assigned_table(
    table: Mapping[Slab, str],
    split: Mapping[str, int],
    built: frozenset[tuple[Slab, str]],
    unfit: frozenset[tuple[Slab, str]] = frozenset(),
) -> dict[Slab, str]:
    """Returns a table with this many slabs of each role that changes as few slabs as possible; with fewer,
    if no more are fit.

    Args:
        built: slabs and roles whose engine is built: preferred, since it need not be built first.
    """
    after = dict(table)
    over = {role: sum(holder == role for holder in table.values()) - num for role, num in split.items()}
    for role in sorted(split):
        num_wanted = -over[role]
        fit = (slab for slab, holder in after.items() if over[holder] > 0 and (slab, role) not in unfit)
        best = sorted(fit, key=lambda slab: ((slab, role) in built, slab.node, slab.index), reverse=True)
        for slab in best if num_wanted > 0 else ():
            if over[after[slab]] > 0 and num_wanted > 0:
                over[after[slab]] -= 1
                num_wanted -= 1
                after[slab] = role
    return after
