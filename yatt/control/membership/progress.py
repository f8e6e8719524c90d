"""What gets on at a node, for those who wait for it: deadlines count the time in which nothing did."""

from collections.abc import Callable

from yatt.control.membership.peers import Peers


class Progress:
    """Counters that only rise.

    A peer that waits for this node is told of what is done here alone. The leader, and this node's own
    workers, are told as well of what others do for this node. Two nodes that wait for each other thus never
    take the other's waiting for progress.

    Args:
        work: of this node's workers, as a counter; that they merely live does not count.
    """

    def __init__(self, work: Callable[[], int]) -> None:
        self._work = work
        self._num_done = self._num_heard = 0

    def done(self) -> None:
        """Something was done here that no worker counts: a reward call ended, a piece of a file came."""
        self._num_done += 1

    def heard(self) -> None:
        """Another node got on with a request of this one."""
        self._num_heard += 1

    def own(self) -> int:
        """What is done here."""
        return self._work() + self._num_done

    def whole(self) -> int:
        """What is done here, and elsewhere for this node."""
        return self.own() + self._num_heard

    def told_to(self, sender: str) -> int:
        """For whoever asks whether a request is still worked on."""
        return self.own() if Peers.is_follower(sender) else self.whole()
