"""This process's limit of open file descriptors."""

import contextlib
import resource
import sys


def hard_limit() -> int:
    """Returns the hard limit of open file descriptors (`ulimit -Hn`)."""
    return _count(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def raise_soft_limit() -> int:
    """Raises the soft limit to the hard limit; returns the resulting limit. Children inherit it.

    The soft limit is 1,024 on most systems, for programs that use select(), which yatt does not.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a kernel that allows less than the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return _count(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _count(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
