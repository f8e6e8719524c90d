"""Orders that give a slab to another role while a phase acts."""

from yatt.records.order import Message, Order


class SlabMoved(Message, frozen=True, kw_only=True):
    """Whether the slab is with the role now; if not, another order has overtaken this one.

    `workers_s`: seconds of it in which engines fell asleep and woke.
    """

    has_moved: bool
    workers_s: float = 0.0


class MoveSlab(Order[SlabMoved], frozen=True, kw_only=True):
    """Order to give this node's slab to `role`: its present holder sleeps, memory is checked, the role's
    engines wake. `seq` is of the leader's state; an order of an earlier phase is refused."""

    seq: int
    slab: int
    role: str
