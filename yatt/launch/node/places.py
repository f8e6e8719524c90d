"""Places of engine nodes in an attempt: whether a controller may take one, and the numbers of its lives.

The step that has a place starts its controller again. If the whole machine is gone, a node of a joining job
(`yatt.launch.attempt.join`) may take the place. Both claim the number of a life first, so no two processes
have one.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from yatt import clock
from yatt.adapters.files.files import create_exclusively, make_within, read_or_none, unsealed_any
from yatt.adapters.run_folder.ledger import ENDED, STARTED, STOP, newest_attempt, record_of_attempt
from yatt.paths import RunPaths

LOOK_S = 2.0


def claim_life(paths: RunPaths, attempt: int, node: int, at_least: int) -> int:
    """Claims the lowest free life of a node's controller from `at_least` on, and returns it.

    Raises:
        OSError: the run folder fails.
    """
    life = at_least
    while not claim_exactly(paths, attempt, node, life):
        life += 1
    return life


def claim_exactly(paths: RunPaths, attempt: int, node: int, life: int) -> bool:
    """Claims this life of a node's controller; returns whether it was free.

    Raises:
        OSError: the run folder fails.
    """
    path = paths.life(attempt, node, life)
    make_within(paths.root, path.parent)
    return create_exclusively(path, f"{os.uname().nodename} {os.getpid()} {secrets.token_hex(8)}".encode())


def newest_claim(paths: RunPaths, attempt: int, node: int) -> int:
    """Returns the highest life of a node's controller that was claimed; 1 if none was."""
    folder = paths.life(attempt, node, 1).parent
    names = os.listdir(folder) if folder.is_dir() else []
    parts = (name.partition(".") for name in names)
    return max((int(life) for index, _, life in parts if index == str(node) and life.isdecimal()), default=1)


def is_under_way(paths: RunPaths, attempt: int) -> bool:
    """Whether the attempt's controllers have met, and it has not ended and is not about to.

    Raises:
        OSError: the run folder fails.
    """
    is_open = not has_ended(paths, attempt) and not record_of_attempt(paths, attempt, STOP)
    return is_open and paths.all_endpoints(attempt).exists()


def has_ended(paths: RunPaths, attempt: int) -> bool:
    """Whether the attempt's leader has ended, or a newer attempt exists.

    Raises:
        OSError: the run folder fails.
    """
    leader = unsealed_any(read_or_none(paths.controller_record(attempt, 0))) or {}
    is_over = "ended" in leader or bool(record_of_attempt(paths, attempt, ENDED))
    return is_over or newest_attempt(paths) > attempt


def life_in_place(paths: RunPaths, attempt: int, node: int) -> int:
    """Returns the life of the controller that takes part for a node, or is about to; 0 if none.

    Raises:
        OSError: the run folder fails.
    """
    found = unsealed_any(read_or_none(paths.lost(attempt, node)))
    if found is not None:
        return int(found.get("joined", found.get("preparing", 0)))
    return 0 if node in record_of_attempt(paths, attempt, STARTED).get("absent", ()) else 1


@dataclass(slots=True)
class NextLife:
    """The pause of a step before its controller's next life.

    Attributes:
        is_told: whether the step has to end.
    """

    paths: RunPaths
    attempt: int
    node: int
    is_told: Callable[[], bool]

    def wait(self, life: int, due_s: float | None) -> bool:
        """Waits until it is time for a life after this one; returns False if none may follow."""
        while due_s is not None and not self.is_told() and self._may_follow(life):
            if clock.monotonic_s() >= due_s:
                return True
            time.sleep(min(LOOK_S, max(0.0, due_s - clock.monotonic_s())))
        return False

    def _may_follow(self, life: int) -> bool:
        """A folder that fails does not tell."""
        with contextlib.suppress(OSError):
            is_taken = life_in_place(self.paths, self.attempt, self.node) > life
            return is_under_way(self.paths, self.attempt) and not is_taken
        return True
