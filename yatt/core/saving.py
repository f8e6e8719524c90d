"""Which iteration is saved, which save is in flight, and what follows from the end of an upload: pure.

A save has two steps. The host copy of an iteration is *taken* in the phase SAVE; from then on it is *in
flight*: uploaded in the background, while the run continues. It is *committed* when its manifest exists. At
most one save is in flight. A save that is due meanwhile is postponed to the next iteration; it is never
forgotten. An upload that fails costs that save. After `MAX_FAILURES` in a row the attempt ends, because a run
that cannot save should not go on using GPUs.
"""

from dataclasses import dataclass, replace

MAX_FAILURES = 3


@dataclass(frozen=True, slots=True)
class Saving:
    """State of the saves of an attempt.

    Args:
        committed: the newest iteration with a commit that this attempt continues.
        in_flight: the iteration that is being uploaded; 0: none.
        is_postponed: whether a save was due and has not been taken.
        failures: number of failed uploads in a row.
    """

    committed: int = 0
    in_flight: int = 0
    is_postponed: bool = False
    failures: int = 0

    def resumed(self, iteration: int) -> "Saving":
        """After the state of a committed iteration was restored."""
        return replace(self, committed=iteration)

    def taken(self, iteration: int) -> "Saving":
        """After the host copy of an iteration was taken."""
        assert not self.in_flight, f"save {iteration} is taken while {self.in_flight} is in flight"
        return replace(self, in_flight=iteration, is_postponed=False)

    def postponed(self) -> "Saving":
        """After a save was due while another one was in flight."""
        return replace(self, is_postponed=True)

    def ended(self, iteration: int, *, is_committed: bool) -> "Saving":
        """After the upload of an iteration has ended. The end of another one is old and changes nothing."""
        if iteration != self.in_flight:
            return self
        if is_committed:
            return replace(self, committed=iteration, in_flight=0, failures=0)
        return replace(self, in_flight=0, is_postponed=True, failures=self.failures + 1)

    @property
    def has_given_up(self) -> bool:
        """Whether too many saves have failed."""
        return self.failures >= MAX_FAILURES


NO_SAVES = Saving()
"""At the start of an attempt."""
