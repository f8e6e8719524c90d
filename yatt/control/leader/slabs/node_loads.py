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
        self._over: dict[str, StepSums] = {}
        """Sums of the lives that are over, by role."""

    def put(self, index: int, life: int, load: NodeLoad) -> None:
        """Handles the report of a node's controller. Its sums begin again with each life.

        Called for each keep-alive message, so sums are added up only when they are asked for.
        """
        known_life, known = self._newest.get(index, (life, load))
        if known_life != life:
            _add(self._over, known)
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
        found = dict(self._over)
        for load in self.now().values():
            _add(found, load)
        return found


def _add(sums: dict[str, StepSums], load: NodeLoad) -> None:
    for role, more in load.steps.items():
        sums[role] = sums.get(role, StepSums()) + more
