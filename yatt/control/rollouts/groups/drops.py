"""Dropped prompt groups of one node: the reason of the last one, and the errors that end the run."""

from collections.abc import Sequence

from yatt.control.rollouts.groups.groups import SampleState
from yatt.core.samples.prompts import Quota, Trials
from yatt.errors import ConfigError, WorkerFailed, YattError

FLAT = "all its rewards are equal"
MOST_MEDIA_FAULTS = 0.05
"""Largest share of an iteration's groups that may fail by their pictures."""

SHOWN_FAULTS = 3


class Drops:
    """Follows which groups are dropped, and why.

    Args:
        filter_by: `algorithm.filter_by`.
    """

    def __init__(self, filter_by: str = "") -> None:
        self._flat = f"all its rewards, or all its scores of {filter_by}, are equal" if filter_by else FLAT
        self._trials = Trials()
        self._is_users = False
        self._media_faults: dict[int, list[str]] = {}  # by iteration
        self.reason = ""
        """Why the last group was dropped."""

    @property
    def is_hopeless(self) -> bool:
        """Whether all first groups failed, so that more would only repeat the failure."""
        return self._trials.is_hopeless

    def worked_before(self) -> None:
        """Records that groups were trained on in an earlier attempt."""
        self._trials = Trials(has_worked=True)

    def resolved(self, failed: SampleState | None, *, is_dropped: bool) -> None:
        """Records one group that was accepted or dropped, with its failed sample, if any."""
        self._trials = self._trials.after(is_users_failure=failed is not None and failed.is_users_failure)
        if is_dropped:
            self.reason = failed.failed if failed else self._flat
            self._is_users = failed is None or failed.is_users_failure

    def begin_iteration(self, iteration: int) -> None:
        """Forgets the faults of pictures before the iteration that may be trained meanwhile."""
        self._media_faults = {i: each for i, each in self._media_faults.items() if i >= iteration - 1}

    def media_fault(self, iteration: int, reasons: Sequence[str], target: int) -> None:
        """Records that groups of an iteration were dropped because a picture of each cannot be used.

        Args:
            target: groups that this node is to have in the iteration.

        Raises:
            ConfigError: too many were.
        """
        found = self._media_faults.setdefault(iteration, [])
        found.extend(reasons)
        if len(found) > max(1.0, MOST_MEDIA_FAULTS * target):
            first = "\n  ".join(found[:SHOWN_FAULTS])
            raise ConfigError(
                f"{len(found)} of about {target} groups have pictures that cannot be used. "
                f"At most {MOST_MEDIA_FAULTS:.0%} may; correct them and start the run again. The first:\n"
                f"  {first}"
            )

    def check_some_work(self) -> None:
        """Raises ConfigError if all first groups failed."""
        if self.is_hopeless:
            raise ConfigError(
                f"the first {self._trials.failed} prompt groups all failed; the last: {self.reason}. "
                "Correct it and start the run again."
            )

    def out_of_reach(self, quota: Quota) -> YattError:
        """Returns the error if the target can no longer be reached."""
        why = f"The last was dropped because: {self.reason}. The event log (rollout.group.drop) has all"
        says = f"{quota.shortfall()}. {why}"
        if not self._is_users:  # engines, a filesystem: another attempt may succeed
            return WorkerFailed(f"{says}.")
        return ConfigError(f"{says}; correct the reward, or raise algorithm.max_groups_opened_factor.")
