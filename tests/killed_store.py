"""A store whose process dies at a counted call, before or after the call has taken effect."""

from typing import Any


class Killed(BaseException):
    """SIGKILL: nobody catches it."""


class KilledStore:
    """Passes calls on to `store`; call number `at` (from 0) raises Killed. Negative: none does."""

    def __init__(self, store: Any, at: int = -1, *, is_late: bool = False) -> None:
        self._store, self._at, self._is_late = store, at, is_late
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def counted(*arguments: Any, **more: Any) -> Any:
            is_last = self.calls == self._at
            self.calls += 1
            if self.calls > self._at >= 0 and not is_last:
                raise Killed
            if is_last and not self._is_late:
                raise Killed
            given = call(*arguments, **more)
            if is_last:
                raise Killed
            return given

        return counted
