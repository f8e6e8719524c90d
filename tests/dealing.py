"""The order of the long tests, and which of them there is time for.

Every test is run, unless the run has an end (`--until`) and this machine is too slow for all of them. Then
tests are left out that cost much and add little: a further case of a test adds less than another test, and
that less than the first test of a module. Among equals a lot decides, with odds by their cost; its seed is
printed.
"""

import hashlib
import math
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.durations import Durations, read_durations

SEED = "YATT_DRAW"
"""Environment variable: seed of the lots. Without it, a run takes a new one and prints it."""

NEW_S = 30.0
"""What is assumed of a test that was never measured."""

LEAST_S = 0.05
"""What is counted of a test that takes no measurable time."""

SETTLED_S = 60.0
"""The pace is taken for 1 until tests of about this length have ended."""

END_S = 90.0
"""Time before the end of a run for which nothing is planned: tests of unequal length end at unequal times."""

TOGETHER = (
    "faults/test_resume_exact.py", "faults/test_lost_nodes.py", "faults/test_nodes_that_return.py",
    "trainer/test_layouts.py", "trainer/test_losses.py", "trainer/test_corrections.py",
    "trainer/test_planned_memory.py", "trainer/test_routes.py", "trainer/test_offload.py",
    "trainer/test_resume_matrix.py", "trainer/test_recompute.py", "trainer/test_optimizers.py",
    "integration/test_planted_credentials.py",
)  # fmt: skip
"""Modules whose tests share a long set-up, which every process that runs one of them would make; and one that
looks at every process of the machine for what its other tests plant."""


def dealt_with(name: str) -> str:
    """Name of the tests that are dealt together with this one: its module, or only itself."""
    path = name.partition("::")[0]
    return path if path.endswith(TOGETHER) else name


def expected_s(names: Iterable[str], known: Durations, quick: Collection[str] = ()) -> dict[str, float]:
    """Wall seconds of each test, by what was measured.

    Args:
        quick: tests of which only those that take long were measured.
    """
    found = {}
    for name in names:
        module, _, test = name.partition("::")
        _, wall_s = known.get(module, {}).get(test, (0.0, 0.0 if name in quick else NEW_S))
        found[name] = max(wall_s, LEAST_S)
    return found


def unmeasured(names: Iterable[str], known: Durations) -> list[str]:
    """Returns the functions of which no case was measured: cases may be drawn."""
    found = {f"{module}::{test.partition('[')[0]}" for module, tests in known.items() for test in tests}
    return sorted({name.partition("[")[0] for name in names} - found)


def longest_first(expected: Mapping[str, float]) -> list[str]:
    """Sorts tests by the time of all that are dealt with each: one that begins last would run alone at the
    end."""
    total_s = dict.fromkeys(map(dealt_with, expected), 0.0)
    for name, seconds in expected.items():
        total_s[dealt_with(name)] += seconds
    return sorted(expected, key=lambda name: -total_s[dealt_with(name)])


def most_worth_first(expected: Mapping[str, float], seed: str) -> list[str]:
    """Sorts tests by what they add for their cost, with a lot among equals.

    A test's lot is exponential with its cost as the mean: of two tests the cheaper one comes first with the
    odds of their costs (Efraimidis and Spirakis 2006, weights 1 / cost).
    """

    def lot(name: str) -> float:
        drawn = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big")
        return -math.log((drawn + 1) / 2**64) * expected[name]

    modules, functions = set[str](), set[str]()
    rank: dict[str, int] = {}
    by_lot = sorted(expected, key=lot)
    for name in by_lot:
        module, function = name.partition("::")[0], name.partition("[")[0]
        rank[name] = (module in modules) + (function in functions)
        modules.add(module)
        functions.add(function)
    return sorted(by_lot, key=rank.__getitem__)  # stable


def fitting(names: Iterable[str], expected: Mapping[str, float], capacity_s: float) -> set[str]:
    """Returns those of the names, in their order, that fit into a capacity."""
    found: set[str] = set()
    for name in names:
        if expected[name] <= capacity_s:
            capacity_s -= expected[name]
            found.add(name)
    return found


@dataclass(slots=True)
class Time:
    """The time of a run that has an end.

    Args:
        until_s: its end, on the monotonic clock.
        expected: seconds of each test.
        seed: of the lots.
    """

    until_s: float
    expected: Mapping[str, float]
    seed: str
    left_out: dict[str, float] = field(default_factory=dict)
    _took_s: float = SETTLED_S
    _expected_s: float = SETTLED_S
    _order: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._order = most_worth_first(self.expected, self.seed)

    @property
    def pace(self) -> float:
        """How often the expected time the tests have taken."""
        return self._took_s / self._expected_s

    def took(self, name: str, seconds: float) -> None:
        self._took_s += seconds
        self._expected_s += self.expected[name]

    def leave_out(
        self, front: Sequence[str], waiting: set[str], running: Iterable[str], workers: int, now_s: float
    ) -> list[str]:
        """Returns those of the next tests for which there is no time.

        Args:
            front: the tests that are dealt next.
            waiting: all tests that were not dealt yet, these included.
            running: those that were dealt and have not ended.
        """
        left_s = (self.until_s - END_S - now_s) * workers / self.pace
        capacity_s = left_s - sum(self.expected[name] for name in running)
        kept = fitting((n for n in self._order if n in waiting), self.expected, capacity_s)
        out = [name for name in front if name not in kept]
        self.left_out.update({name: self.expected[name] for name in out})
        return out

    def report(self) -> list[str]:
        """What a person is told at the end."""
        if not self.left_out:
            return [f"every test was run, at {self.pace:.2f} times the measured durations"]
        costly = sorted(self.left_out, key=self.left_out.__getitem__, reverse=True)
        out_s, all_s = sum(self.left_out.values()), sum(self.expected.values())
        return [
            f"{len(costly)} of {len(self.expected)} tests were left out, {out_s:.0f} of {all_s:.0f} measured "
            f"seconds: tests take {self.pace:.2f} times the measured durations here, and it had an end.",
            f"{SEED}={self.seed} draws with the same lots. The longest that were left out:",
            *(f"  {self.left_out[name]:6.1f} s  {name}" for name in costly[:10]),
        ]


class Dealing(LoadScopeScheduling):
    """Deals tests one by one to whoever is free, those of some modules together, in the order of the items.

    Args:
        until_s: the end of the run, on the monotonic clock; None if it has none.
        is_long: whether these are all long tests, which must have been measured.
    """

    def __init__(self, config: pytest.Config, log: Any, until_s: float | None, *, is_long: bool) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False
        self.time: Time | None = None
        self.unmeasured: list[str] = []
        self._until_s = until_s
        self._is_long = is_long

    def schedule(self) -> None:
        if self.collection is None and self.registered_collections:
            names, known = next(iter(self.registered_collections.values())), read_durations()
            if self._is_long:
                self.unmeasured = unmeasured(names, known)
            if self._until_s is not None:
                self.time = Time(self._until_s, expected_s(names, known), os.environ[SEED])
        super().schedule()

    def report(self) -> list[str]:
        """What a person is told at the end."""
        told = self.time.report() if self.time is not None else []
        if self.unmeasured:
            told.append("never measured (tests/durations.py says how): " + ", ".join(self.unmeasured))
        return told

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        if self.time is not None:
            self.time.took(self.registered_collections[node][item_index], duration)
        super().mark_test_complete(node, item_index, duration)

    def _split_scope(self, nodeid: str) -> str:
        return dealt_with(nodeid)

    def _reschedule(self, node: Any) -> None:
        if self.time is not None:
            self._leave_out(self.time)
        super()._reschedule(node)

    def _leave_out(self, run: Time) -> None:
        """Removes tests for which there is no time from the front of the queue."""
        given = [unit for of_node in self.assigned_work.values() for unit in of_node.values()]
        while self.workqueue:
            scope, tests = next(iter(self.workqueue.items()))
            front, waiting = _not_ended([tests]), set(_not_ended(self.workqueue.values()))
            workers, now_s = len(self.assigned_work), time.monotonic()
            for name in run.leave_out(front, waiting, _not_ended(given), workers, now_s):
                del tests[name]
            if tests:
                return
            del self.workqueue[scope]


def _not_ended(units: Iterable[Mapping[str, bool]]) -> list[str]:
    """Units of a process that has crashed are dealt again, with their tests that had ended."""
    return [name for unit in units for name, has_ended in unit.items() if not has_ended]
