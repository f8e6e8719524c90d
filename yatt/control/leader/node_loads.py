"""What all nodes report about their engines: the newest load of each, and steps of engines since the
start."""

from collections.abc import Callable

from yatt.records.load import NodeLoad, StepSums


class NodeLoads:
    """The newest load of every node.

    Args:
        own: returns that of the leader's own node.
    """

    def __init__(self, own: Callable[[], NodeLoad]) -> None:
        self._own = own
        self._newest: dict[int, tuple[int, NodeLoad]] = {}
        self._steps: dict[str, StepSums] = {}

    def put(self, index: int, life: int, load: NodeLoad) -> None:
        """Handles the report of a node's controller. Its sums begin again with each life."""
        known_life, known = self._newest.get(index, (0, NodeLoad()))
        before = known.steps if known_life == life else {}
        for role, sums in load.steps.items():
            new = sums - before.get(role, StepSums())
            self._steps[role] = self._steps.get(role, StepSums()) + new
        self._newest[index] = life, load

    def gone(self, index: int) -> None:
        """Forgets what a lost node's engines are doing."""
        if index in self._newest:
            life, load = self._newest[index]
            self._newest[index] = life, NodeLoad(steps=load.steps)

    def now(self) -> dict[int, NodeLoad]:
        """Returns the newest load of each node that has reported."""
        self.put(0, 1, self._own())
        return {index: load for index, (_, load) in self._newest.items()}

    def steps(self) -> dict[str, StepSums]:
        """Returns the sums of all engines so far, by role."""
        self.put(0, 1, self._own())
        return dict(self._steps)
