"""Which iteration is saved, which save is in flight, and what follows from the end of an upload: pure.

A save has two steps. The host copy of an iteration is *taken* in the phase SAVE; from then on it is *in
flight*: uploaded in the background, while the run continues. It is *committed* when its manifest exists. At
most one save is in flight. A save that is due meanwhile is postponed to the next iteration; it is never
forgotten. An upload that fails costs that save. After `MAX_FAILURES` in a row the attempt ends, because a run
that cannot save should not go on using GPUs.

At an early stop with little time, an upload may be given up, and the newest iteration is *kept* on the nodes'
disks: a local commit (`yatt.core.phases.time_left`).

A save is due after a number of iterations or after an interval of time, whichever comes first. The time is
that since the last host copy was taken, or since the state was restored: work that is older is safe. A save
never changes training, so a decision by time does not change the results of a deterministic run.
"""

from dataclasses import dataclass, replace

MAX_FAILURES = 3


@dataclass(frozen=True, slots=True)
class Saving:
    """State of the saves of an attempt.

    Args:
        committed: the newest iteration with a commit that this attempt continues.
        in_flight: the iteration that is being uploaded; 0: none.
        is_due: whether a save is due that has not been taken: by time, or postponed.
        failures: number of failed uploads in a row.
        taken_s: when the last host copy was taken, or the state restored; monotonic seconds of the leader.
    """

    committed: int = 0
    in_flight: int = 0
    is_due: bool = False
    failures: int = 0
    taken_s: float = 0.0
    kept: int = 0
    """The newest iteration with a local commit of this attempt: on the nodes' disks only."""

    def resumed(self, iteration: int, at_s: float) -> "Saving":
        """After the state of a committed iteration was restored."""
        return replace(self, committed=iteration, taken_s=at_s)

    def trained(self, at_s: float, every_s: float) -> "Saving":
        """After an iteration was trained; `every_s`: interval of saves by time, 0 if there is none."""
        return replace(self, is_due=self.is_due or (every_s > 0 and at_s - self.taken_s >= every_s))

    def taken(self, iteration: int, at_s: float) -> "Saving":
        """After the host copy of an iteration was taken."""
        assert not self.in_flight, f"save {iteration} is taken while {self.in_flight} is in flight"
        return replace(self, in_flight=iteration, is_due=False, taken_s=at_s)

    def postponed(self) -> "Saving":
        """After a save was due while another one was in flight."""
        return replace(self, is_due=True)

    def ended(self, iteration: int, *, is_committed: bool) -> "Saving":
        """After the upload of an iteration has ended. The end of another one is old and changes nothing."""
        if iteration != self.in_flight:
            return self
        if is_committed:
            return replace(self, committed=iteration, in_flight=0, failures=0)
        return replace(self, in_flight=0, is_due=True, failures=self.failures + 1)

    def given_up(self, iteration: int, *, is_kept: bool) -> "Saving":
        """After the upload of an iteration was given up at an early stop, because it would come too late;
        `is_kept`: its files are on the nodes' disks instead."""
        if iteration != self.in_flight:
            return self
        return replace(self, in_flight=0, kept=iteration if is_kept else self.kept)

    @property
    def has_given_up(self) -> bool:
        """Whether too many saves have failed."""
        return self.failures >= MAX_FAILURES


NO_SAVES = Saving()
"""At the start of an attempt."""
