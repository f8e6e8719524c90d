"""Failures of workers before their first use: another try of the same thing fails in the same way. Pure.

An engine or a trainer that cannot be built (a model that the library does not know, a KV cache that is too
small) raises the same exception at every start, each after minutes. So a second equal one is enough.
"""

import re
from collections import Counter

from yatt.errors import EXIT_DO_NOT_RESTART, EXIT_USER_MISTAKE, YattError

MAX_WAKE_FAILURES = 3

LASTING = (
    "ValueError",
    "TypeError",
    "KeyError",
    "IndexError",
    "AttributeError",
    "NotImplementedError",
    "AssertionError",
    "ImportError",
    "ModuleNotFoundError",
    "ValidationError",
    "LookupError",
)
"""Exceptions that come from what was asked, not from the machine: another node would raise them too."""

OTHERS_MEMORY = "Free memory on device"
"""In vLLM's ValueError about a GPU that another process uses."""

_RUNTIME = re.compile(r"(?:^|[:;] )RuntimeError: ")
_MACHINES = re.compile(
    r"cuda|hip\b|cublas|cudnn|nccl|gloo|memory|alloc|mmap|shm|time[ds]? ?out|connect|socket|address|device|"
    r"driver|resource|fork|process|thread|file|permission|root cause",
    re.IGNORECASE,
)
"""Words of a RuntimeError that a machine may have caused."""

_LASTING = re.compile(rf"(?:^|[:;] )(?:{'|'.join(LASTING)}): ")
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")


def is_lasting(error: str) -> bool:
    """Whether an error's text says that the cause is in what was asked for."""
    if _LASTING.search(error):
        return OTHERS_MEMORY not in error
    return _RUNTIME.search(error) is not None and _MACHINES.search(error) is None


def error_likeness(error: str) -> str:
    """The text without numbers and addresses, to compare two failures."""
    return _VARYING.sub("#", error)


class WakeFailures:
    """The failures of workers to come up, by name."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._worked: set[str] = set()

    def worked(self, name: str) -> None:
        """Records that a worker came up: later failures have other causes."""
        self._worked.add(name)
        self._last.pop(name, None)
        del self._counts[name]

    def failed(self, name: str, error: YattError, *, is_own: bool) -> tuple[str, int] | None:
        """Records a failure; returns text and exit code if it ends the attempt, None if the worker is started
        again.

        Args:
            is_own: it was not killed from outside.
        """
        text = str(error)
        if error.exit_code == EXIT_USER_MISTAKE:
            return text, error.exit_code
        self._counts[name] += is_own
        if is_own and name not in self._worked:
            before, self._last[name] = self._last.get(name), error_likeness(text)
            if before == self._last[name] and is_lasting(text):
                return f"{text} (twice, before its first use)", EXIT_DO_NOT_RESTART
        return (text, error.exit_code) if self._counts[name] >= MAX_WAKE_FAILURES else None
