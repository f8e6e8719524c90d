"""Lines to the other controllers, and which of them are lost.

A node that is lost is asked nothing any more, and what was asked of it fails at once: nobody waits out
a timeout for the dead.
"""

from yatt.adapters.wire import Channel
from yatt.errors import WorkerFailed
from yatt.records import message as m


class Peers:
    """The other controllers, by node index.

    Args:
        lost: nodes that take no part from the start.
    """

    def __init__(self, lost: frozenset[int] = frozenset()) -> None:
        self.lines: dict[int, Channel] = {}
        self._lost = dict.fromkeys(lost, "takes no part in this attempt")

    @property
    def lost(self) -> frozenset[int]:
        """Nodes that are not there any more, or never were."""
        return frozenset(self._lost)

    def exclude(self, index: int, why: str) -> None:
        """A node is lost: end every request to it."""
        self._lost.setdefault(index, why)
        if index in self.lines:
            self.lines[index].fail_waiting(f"node{index}", self._error(index))

    async def request(self, index: int, body: m.Message, deadline_s: float) -> m.Message:
        """One node's answer.

        Raises:
            WorkerFailed: the node is lost, or was lost meanwhile.
            DeadlineExceeded: no answer in time.
        """
        if index in self._lost:
            raise self._error(index)
        return await self.lines[index].request(f"node{index}", body, deadline_s)

    async def tell(self, index: int, body: m.Message) -> None:
        """Send without an answer, to a lost node too: it may only have stood still."""
        if index in self.lines:
            await self.lines[index].tell(f"node{index}", body)

    def _error(self, index: int) -> WorkerFailed:
        return WorkerFailed(f"node{index} {self._lost[index]}")
