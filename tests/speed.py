"""How much slower this machine is now than a quiet one: limits of CPU time are multiplied by it.

A core that shares its units with a busy one does less in a second of CPU time, down to a half. So a limit in
plain CPU seconds would fail on a busy machine what passes on a quiet one.
"""

import contextlib
import gc
import json
import time
from collections.abc import Iterator

QUIET_S = 0.0018
"""CPU time of `fixed_work` on the quiet machine on which the limits were set."""


def fixed_work() -> object:
    """The same small work each time, of what tests do most: text, dictionaries, sorting, JSON."""
    found: dict[str, list[str]] = {}
    for number in range(400):
        key = (number % 7, str(number * number), number % 3 == 0)
        found.setdefault(str(key[:2]), []).append(str(key))
        found[str(key)] = sorted(key[1])
    return json.loads(json.dumps(found))


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """What a test has left in memory is not looked through meanwhile."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def slowness_now() -> float:
    """CPU time of the fixed work, now, as a multiple of the quiet machine's, 1 or more; done once before.

    A machine that does this work in 0.6 of the time does not run tests in 0.6 of it: they start processes and
    write files too. It has the limits of the quiet machine, and none below.
    """
    with without_collections():
        fixed_work()
        start_s = time.thread_time()
        fixed_work()
        return max(1.0, (time.thread_time() - start_s) / QUIET_S)
