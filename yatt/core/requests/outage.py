"""Distinguishes a service that is down from a request that it cannot serve. Pure.

A request that has used its tries is repeated while the service is down: since its last try but one began,
nobody had an answer. If others had one, the request itself is the cause, and it fails.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Outage:
    """What the requests to one service have seen.

    Args:
        limit_s: longest outage that requests wait for.
    """

    limit_s: float
    _answered_s: float = -1.0
    """Time of the last answer."""

    _silent_s: float | None = None
    """Beginning of the outage; None: the service is up, as far as is known."""

    _slow: set[int] = field(default_factory=set)
    """Requests without an answer since the last answer."""

    _is_down: bool = False

    def answered(self, now_s: float) -> None:
        """Notes an answer of any kind: the service is up."""
        self._answered_s, self._silent_s, self._is_down = now_s, None, False
        self._slow.clear()

    def unanswered(self, began_s: float, request: int, *, is_down: bool) -> None:
        """Notes a try without an answer that began at `began_s`.

        Args:
            request: number of the request.
            is_down: the service cannot be reached, or says that it serves nobody. Otherwise it was only not
                in time, which may be because of this request, so that one alone is no sign.
        """
        self._slow.add(request)
        self._is_down = self._is_down or is_down
        if self._silent_s is None:
            self._silent_s = max(began_s, self._answered_s)

    def is_waited_for(self, since_s: float, now_s: float) -> bool:
        """Whether a request that has used its tries is repeated.

        Args:
            since_s: beginning of its last try but one; of its only try if there was one.
        """
        is_known = self._is_down or len(self._slow) > 1
        is_down = is_known and self._silent_s is not None and self._answered_s < since_s
        return is_down and now_s - (self._silent_s or 0.0) < self.limit_s
