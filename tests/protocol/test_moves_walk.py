"""All orders of events of shared slabs, with nodes that are slow, lost and back, and with batches in turns;
planted mistakes must be caught."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from yatt.core.gpus import moves as core
from yatt.core.gpus.moves import MoveRules, Moves, OrderMove
from yatt.core.gpus.placement import Slab

A, B = "rollout", "genrm:judge"
SLABS = tuple(Slab(node, index, (index,)) for node in (0, 1) for index in (0, 1))
RULES = MoveRules(least={A: 1, B: 1}, most={A: 4, B: 2})
START = Moves(table={SLABS[0]: A, SLABS[1]: A, SLABS[2]: A, SLABS[3]: B})
Step = Callable[[Moves, core.MoveEvent, MoveRules], core.Result]


@dataclass(frozen=True)
class World:
    """The leader's state, what nodes hold, and orders that are under way: (slab, role, number of the
    opening)."""

    moves: Moves
    held: tuple[str, ...]
    orders: frozenset[tuple[Slab, str, int]] = frozenset()
    opening: int = 0
    losses: int = 0
    overtaken: int = 0  # orders, so far
    unfit: int = 0

    @property
    def key(self) -> tuple[object, ...]:
        moves, table = self.moves, tuple(self.moves.table[slab] for slab in SLABS)
        late = frozenset((slab, role, number == self.opening) for slab, role, number in self.orders)
        counts = self.losses, self.overtaken, self.unfit
        leader = table, moves.moving, moves.changed, moves.unfit, moves.lost, moves.is_open, moves.takes_turns
        return leader, self.held, late, counts


def lives(world: World, slab: Slab) -> bool:
    return slab.node not in world.moves.lost


class Walk:
    """Visits every reachable world; `faults` has what is wrong in them."""

    def __init__(
        self,
        step: Step,
        *,
        has_barriers: bool = True,
        rules: MoveRules = RULES,
        turned: Callable[[Moves], Moves] | None = None,
        **spent: int,
    ) -> None:
        self._step, self._most_losses, self._has_barriers, self._rules = step, 1, has_barriers, rules
        self._turned = turned
        self._first = World(START, tuple(START.table[slab] for slab in SLABS), **spent)
        self.faults: set[str] = set()
        self.num_worlds = 0

    def run(self) -> "Walk":
        """Ends with the first fault."""
        seen, left = set[object](), deque([self._first])
        while left and not self.faults:
            world = left.popleft()
            if world.key in seen:
                continue
            seen.add(world.key)
            self._check(world)
            left += self._following(world)
        self.num_worlds = len(seen)
        return self

    def _after(self, world: World, event: core.MoveEvent) -> World:
        before = world.moves
        after, orders = self._step(before, event, self._rules)
        for order in orders:
            self._check_order(before, after, order, event)
        sent = {(order.slab, order.role, world.opening) for order in orders}
        return replace(world, moves=after, orders=world.orders | sent)

    def _following(self, world: World) -> list[World]:
        found = [self._after(world, core.MoveWanted(slab, role)) for slab in SLABS for role in (A, B)]
        if world.moves.is_open:
            found += [self._after(world, core.TableClosed())] if self._has_barriers else []
        elif not self._has_barriers:
            planned = core.with_table(world.moves, {SLABS[2]: B})
            found += [self._after(each, core.TableOpened(is_settled=False))
                      for each in (world, replace(world, moves=planned))]  # fmt: skip
        else:  # a barrier has given every slab to the table's role before
            at = tuple(world.moves.table[s] if lives(world, s) else "" for s in SLABS)
            opened = self._after(replace(world, held=at), core.TableOpened())
            found.append(replace(opened, opening=world.opening + 1))
            found += [replace(world, moves=self._turned(world.moves))] if self._turned else []
            if world.moves.takes_turns and not world.moves.lost:  # the policy ends it
                found.append(replace(world, moves=core.with_table(world.moves, START.table)))
        found += [self._delivered(world, order) for order in world.orders]
        if not world.overtaken:
            once = replace(world, overtaken=1)
            found += [self._delivered(once, order, is_overtaken=True) for order in world.orders]
        if not world.unfit:
            once = replace(world, unfit=1)
            found += [
                self._failed(once, order) for order in world.orders if order[1] != START.table[order[0]]
            ]
        return found + self._nodes(world)

    def _failed(self, world: World, order: tuple[Slab, str, int]) -> World:
        """The node cannot build the role's engine; it takes the slab's first role again."""
        slab, role, number = order
        without = replace(world, orders=world.orders - {order})
        if not world.moves.is_open or number != world.opening or not lives(world, slab):
            return self._delivered(world, order)
        at = SLABS.index(slab)
        held = (*world.held[:at], START.table[slab], *world.held[at + 1 :])
        return self._after(replace(without, held=held), core.MoveFailed(slab, role, START.table[slab]))

    def _delivered(self, world: World, order: tuple[Slab, str, int], *, is_overtaken: bool = False) -> World:
        """The node carries out an order, unless a later phase has begun, or another order takes its place;
        then the leader hears of it."""
        slab, role, number = order
        without = replace(world, orders=world.orders - {order})
        if not lives(world, slab):
            return without
        has_moved = world.moves.is_open and number == world.opening and not is_overtaken
        if has_moved:
            at = SLABS.index(slab)
            without = replace(without, held=(*world.held[:at], role, *world.held[at + 1 :]))
        return self._after(without, core.MoveAnswered(slab, has_moved))

    def _nodes(self, world: World) -> list[World]:
        if not world.moves.lost and world.losses < self._most_losses:
            gone = replace(world, losses=world.losses + 1)
            return [self._after(_emptied(gone, node), core.NodeGone(node)) for node in (0, 1)]
        return [
            replace(back, held=tuple(
                back.moves.table[s] if s.node == node and s not in back.moves.moving else held
                for s, held in zip(SLABS, back.held, strict=True)
            ))
            for node in world.moves.lost
            for back in [self._after(world, core.NodeBack(node))]
        ]  # fmt: skip

    # ---- what must hold -------------------------------------------------------------------------

    def _check(self, world: World) -> None:
        moves = world.moves
        if moves.takes_turns:
            self._check_turns(moves)
            return
        for role in (A, B):
            can_be_repaired = not world.orders or any(len(moves.there(other)) > 1 for other in (A, B))
            if len(moves.of(role)) < 1 and can_be_repaired:
                self.faults.add(f"{role} has no slab, and none is ordered to it")
        now = [(slab, number) for slab, _, number in world.orders if number == world.opening]
        if len(set(now)) < len(now):
            self.faults.add("two orders for one slab are under way")
        for slab, held in zip(SLABS, world.held, strict=True):
            is_settled = moves.is_open and lives(world, slab) and slab not in moves.moving
            if is_settled and held != moves.table[slab]:
                self.faults.add("a settled slab is not where the table says")

    def _check_turns(self, moves: Moves) -> None:
        """A batch in turns: nothing moves, and every slab can have either role."""
        if moves.is_open:
            self.faults.add("the table is open for a batch in turns")
        if set(moves.table.values()) != {A}:
            self.faults.add("a batch in turns, and rollout has not every slab")
        if moves.unfit:
            self.faults.add("a batch in turns, and an engine cannot be built somewhere")

    def _check_order(self, before: Moves, after: Moves, order: OrderMove, event: core.MoveEvent) -> None:
        if not after.is_open:
            self.faults.add("an order while the table is closed")
        if (order.slab, order.role) in after.unfit:
            self.faults.add("an order to a role that has no engine there")
        if order.slab.node in after.lost:
            self.faults.add("an order to a lost node")
        if not isinstance(event, core.MoveWanted):
            return  # a repair
        if len(before.there(before.table[order.slab])) <= self._rules.least[before.table[order.slab]]:
            self.faults.add("a move takes the last slab that is there")
        if len(after.of(order.role)) > RULES.most[order.role]:
            self.faults.add("a move gives a role too many slabs")


def _emptied(world: World, node: int) -> World:
    held = tuple("" if s.node == node else held for s, held in zip(SLABS, world.held, strict=True))
    return replace(world, held=held, orders=frozenset(o for o in world.orders if o[0].node != node))


@pytest.mark.parametrize("has_barriers", [True, False])
@pytest.mark.parametrize("floors", [{A: 1, B: 1}, {A: 3, B: 1}])
def test_no_order_of_events_breaks_the_rules(has_barriers: bool, floors: dict[str, int]):
    """Without barriers the table is opened once; what has changed before is ordered then. A lost node may
    leave too few slabs for all floors, but no role without any."""
    walk = Walk(core.step, has_barriers=has_barriers, rules=replace(RULES, least=floors)).run()
    assert not walk.faults
    assert walk.num_worlds > (1000 if floors[A] == 1 else 100)


@pytest.mark.parametrize("spent", [{"losses": 1}, {"unfit": 1}])
def test_no_order_of_events_breaks_the_rules_of_batches_in_turns(spent: dict[str, int]):
    """They begin and end between any two batches, and an engine cannot be built, or a node is lost: both, and
    orders that are overtaken, would be too many worlds."""
    walk = Walk(core.step, turned=core.with_turns, overtaken=1, **spent).run()
    assert not walk.faults
    assert walk.num_worlds > 1000


def believing(**believed: object) -> Step:
    """Takes something of the state for another value when a move is wanted."""

    def mistaken(moves: Moves, event: core.MoveEvent, rules: MoveRules) -> core.Result:
        if not isinstance(event, core.MoveWanted):
            return core.step(moves, event, rules)
        after, orders = core.step(replace(moves, **believed), event, rules)
        return replace(after, **{name: getattr(moves, name) for name in believed}), orders

    return mistaken


def ignores_floor(moves: Moves, event: core.MoveEvent, rules: MoveRules) -> core.Result:
    return core.step(moves, event, replace(rules, least={A: 0, B: 0}))


def ignores_ceiling(moves: Moves, event: core.MoveEvent, rules: MoveRules) -> core.Result:
    return core.step(moves, event, replace(rules, most={A: 4, B: 4}))


def forgets_what_moves(moves: Moves, event: core.MoveEvent, rules: MoveRules) -> core.Result:
    after, orders = core.step(moves, event, rules)
    return replace(after, moving=frozenset()), orders


def counts_what_comes_as_there(moves: Moves, event: core.MoveEvent, rules: MoveRules) -> core.Result:
    if not isinstance(event, core.MoveWanted):
        return core.step(moves, event, rules)
    settled = replace(moves, moving=moves.moving & {event.slab})
    after, orders = core.step(settled, event, rules)
    return replace(after, moving=after.moving | moves.moving), orders


def never_repairs(moves: Moves, event: core.MoveEvent, rules: MoveRules) -> core.Result:
    if isinstance(event, core.NodeGone):
        moving = frozenset(slab for slab in moves.moving if slab.node != event.node)
        return replace(moves, lost=moves.lost | {event.node}, moving=moving), ()
    return core.step(moves, event, rules)


def takes_overtaken_orders_for_done(moves: Moves, event: core.MoveEvent, rules: MoveRules) -> core.Result:
    is_answer = isinstance(event, core.MoveAnswered)
    return core.step(moves, replace(event, has_moved=True) if is_answer else event, rules)


def forgets_what_has_changed(moves: Moves, event: core.MoveEvent, rules: MoveRules) -> core.Result:
    is_opened = isinstance(event, core.TableOpened)
    return core.step(moves, core.TableOpened() if is_opened else event, rules)


def test_a_table_that_has_changed_while_it_was_closed_is_carried_out_without_barriers():
    assert Walk(forgets_what_has_changed, has_barriers=False).run().faults


def forgets_what_is_unfit(moves: Moves, event: core.MoveEvent, rules: MoveRules) -> core.Result:
    if isinstance(event, core.MoveFailed):
        return core.step(moves, core.MoveAnswered(event.slab, has_moved=True), rules)
    return core.step(moves, event, rules)


def forgets_the_table(moves: Moves, event: core.MoveEvent, rules: MoveRules) -> core.Result:
    after, orders = core.step(moves, event, rules)
    if isinstance(event, core.TableOpened):
        return replace(after, table=START.table), orders
    return after, orders


@pytest.mark.parametrize(
    "mistaken",
    [
        ignores_floor, ignores_ceiling, forgets_what_moves, counts_what_comes_as_there,
        believing(is_open=True), believing(lost=frozenset()), never_repairs,
        takes_overtaken_orders_for_done, forgets_the_table, forgets_what_is_unfit,
        believing(unfit=frozenset()),
    ],
)  # fmt: skip
def test_planted_mistakes_are_caught(mistaken: Step):
    assert Walk(mistaken).run().faults


def repairs_a_batch_in_turns(moves: Moves, event: core.MoveEvent, rules: MoveRules) -> core.Result:
    """A late answer gives the GenRM its floor again, in the middle of the batch."""
    if isinstance(event, core.MoveAnswered) and moves.takes_turns:
        after, orders = core.step(replace(moves, takes_turns=False), event, rules)
        return replace(after, takes_turns=True), orders
    return core.step(moves, event, rules)


def opens_for_a_batch_in_turns(moves: Moves, event: core.MoveEvent, rules: MoveRules) -> core.Result:
    after, orders = core.step(replace(moves, takes_turns=False), event, rules)
    return replace(after, takes_turns=moves.takes_turns and after.takes_turns), orders


def goes_on_in_turns(moves: Moves, event: core.MoveEvent, rules: MoveRules) -> core.Result:
    """After an engine could not be built."""
    after, orders = core.step(moves, event, rules)
    return replace(after, takes_turns=moves.takes_turns), orders


def ends_turns_without_floors(moves: Moves, event: core.MoveEvent, rules: MoveRules) -> core.Result:
    if isinstance(event, core.NodeGone | core.NodeBack) and moves.takes_turns:
        after, _ = core.step(moves, event, rules)
        return replace(after, table=moves.table), ()
    return core.step(moves, event, rules)


def turns_where_an_engine_is_unfit(moves: Moves) -> Moves:
    return replace(core.with_turns(replace(moves, unfit=frozenset())), unfit=moves.unfit)


def test_turns_begin_only_where_every_slab_can_have_every_role():
    assert Walk(core.step, turned=turns_where_an_engine_is_unfit).run().faults


@pytest.mark.parametrize(
    "mistaken",
    [
        repairs_a_batch_in_turns, opens_for_a_batch_in_turns, goes_on_in_turns, ends_turns_without_floors,
    ],
)  # fmt: skip
def test_planted_mistakes_about_turns_are_caught(mistaken: Step):
    assert Walk(mistaken, turned=core.with_turns).run().faults


def test_a_new_table_changes_as_few_slabs_as_possible_and_prefers_engines_that_are_built():
    table = dict.fromkeys(SLABS, A)
    built = frozenset({(SLABS[1], B)})
    after = core.assigned_table(table, {A: 2, B: 2}, built)
    assert [slab for slab in SLABS if after[slab] == B] == [SLABS[1], SLABS[3]]
    assert core.assigned_table(after, {A: 2, B: 2}, frozenset()) == after
