"""Orders about slabs that change between rollout and GenRMs while a phase acts."""

from yatt.records.load import NodeLoad
from yatt.records.order import Message, Order
from yatt.records.usage import NodeMemory


class SlabMoved(Message, frozen=True, kw_only=True):
    """Whether the slab is with the role now; if not, another order has overtaken this one.

    `is_unfit`: the role's engine cannot be built there; the slab has its first role again. `workers_s`:
    seconds of it in which engines fell asleep and woke.
    """

    has_moved: bool
    is_unfit: bool = False
    workers_s: float = 0.0


class MoveSlab(Order[SlabMoved], frozen=True, kw_only=True):
    """Order to give this node's slab to `role`: its present holder sleeps, memory is checked, the role's
    engines wake. `seq` is of the leader's state; an order of an earlier phase is refused."""

    seq: int
    slab: int
    role: str


class LoadAnswer(Message, frozen=True, kw_only=True):
    """What the engines of a node do, its host memory, and the life of its controller."""

    node: int
    life: int
    load: NodeLoad
    memory: NodeMemory = NodeMemory()


class LoadQuery(Order[LoadAnswer], frozen=True, kw_only=True):
    """Request for the newest sums of a node's engines; they come with keep-alive messages too."""
