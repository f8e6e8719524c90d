"""Progress of a node, for its callers: deadlines count only time without progress."""

from collections.abc import Callable

from yatt.control.membership.peers import Peers


class Progress:
    """Counters that only rise.

    A peer that waits for this node receives only the progress made here. The leader and this node's own
    workers also receive the progress that other nodes make for this node. So two nodes that wait for each
    other never count the other's waiting as progress.

    Args:
        work: progress of this node's workers, as a counter; being alive does not count.
    """

    def __init__(self, work: Callable[[], int]) -> None:
        self._work = work
        self._num_done = self._num_heard = 0

    def done(self) -> None:
        """Counts work that no worker counts: a reward call ended, a piece of a file arrived."""
        self._num_done += 1

    def heard(self) -> None:
        """Counts progress of another node on a request of this one."""
        self._num_heard += 1

    def own(self) -> int:
        """Returns the progress made here."""
        return self._work() + self._num_done

    def whole(self) -> int:
        """Returns the progress made here, and on other nodes for this one."""
        return self.own() + self._num_heard

    def told_to(self, sender: str) -> int:
        """Returns the progress that is reported to a sender that queries its request."""
        return self.own() if Peers.is_follower(sender) else self.whole()
