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
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
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

LEAST_SHARE = 0.05
"""A run that has reached a smaller share of its tests proves nothing, and fails."""

QUICK_FOLDERS = ("tests/unit/", "tests/protocol/", "tests/property/", "tests/scenarios/")

WAITING = 0.3
"""A unit with a smaller share of CPU in its time mostly waits, for Slurm or a limit."""

SPREAD = 1.3
"""How much longer than at the general pace a test may take."""

TOGETHER = (
    "faults/test_resume_exact.py", "faults/test_lost_nodes.py", "faults/test_nodes_that_return.py",
    "trainer/test_layouts.py", "trainer/test_losses.py", "trainer/test_corrections.py",
    "trainer/test_planned_memory.py", "trainer/test_routes.py", "trainer/test_offload.py",
    "trainer/test_resume_matrix.py", "trainer/test_recompute.py", "trainer/test_optimizers.py",
    "faults/test_resume_pictures.py", "integration/test_planted_credentials.py", "contract/test_engine.py",
    "contract/test_engine_pictures.py",
)  # fmt: skip
"""Modules whose tests share a long set-up, which every process that runs one of them would make; and one that
looks at every process of the machine for what its other tests plant."""


def dealt_with(name: str) -> str:
    """Name of the tests that are dealt together with this one: its module, or only itself."""
    path = name.partition("::")[0]
    return path if path.endswith(TOGETHER) else name


def expected_s(names: Iterable[str], known: Durations) -> dict[str, float]:
    """Wall seconds of each test: as measured, else the most of its other cases. Of quick tests only those
    that take long were measured."""
    most: dict[str, float] = {}
    for module, tests in known.items():
        for test, (_, wall_s) in tests.items():
            function = f"{module}::{test.partition('[')[0]}"
            most[function] = max(most.get(function, 0.0), wall_s)
    found = {}
    for name in names:
        module, _, test = name.partition("::")
        new_s = most.get(name.partition("[")[0], 0.0 if name.startswith(QUICK_FOLDERS) else NEW_S)
        found[name] = max(known.get(module, {}).get(test, (0.0, new_s))[1], LEAST_S)
    return found


def unmeasured(names: Iterable[str], known: Durations) -> list[str]:
    """Returns the functions of which no case was measured: cases may be drawn."""
    found = {f"{module}::{test.partition('[')[0]}" for module, tests in known.items() for test in tests}
    return sorted({name.partition("[")[0] for name in names} - found)


def by_unit(expected: Mapping[str, float]) -> dict[str, float]:
    """Seconds of all tests that are dealt together: which of them pays for their set-up is chance."""
    total_s = dict.fromkeys(map(dealt_with, expected), 0.0)
    for name, seconds in expected.items():
        total_s[dealt_with(name)] += seconds
    return total_s


def longest_first(expected: Mapping[str, float]) -> list[str]:
    """Sorts tests by the time of their unit: a long one that begins last would run alone at the end."""
    total_s = by_unit(expected)
    return sorted(expected, key=lambda name: -total_s[dealt_with(name)])


def computing_and_waiting(names: Iterable[str], known: Durations) -> list[str]:
    """Sorts tests: the longest first, but units that compute and units that mostly wait in turns, in the
    proportion of their times. So some of the processes wait while others compute, from beginning to end."""
    expected = expected_s(names, known)
    total_s = by_unit(expected)
    cpu_s = dict.fromkeys(total_s, 0.0)
    for name in expected:
        module, _, test = name.partition("::")
        cpu_s[dealt_with(name)] += known.get(module, {}).get(test, (expected[name], 0.0))[0]
    kinds: tuple[list[str], list[str]] = ([], [])
    for name in longest_first(expected):
        kinds[cpu_s[unit := dealt_with(name)] < WAITING * total_s[unit]].append(name)
    begins: list[tuple[float, str]] = []
    for each in kinds:
        whole_s, before_s = sum(expected[name] for name in each), 0.0
        for name in each:
            begins.append((before_s / whole_s, name))
            before_s += expected[name]
    return [name for _, name in sorted(begins, key=itemgetter(0))]


def most_worth_first(units: Mapping[str, float], seed: str) -> list[str]:
    """Sorts units by what they add for their cost, with a lot among equals.

    A lot is exponential with the cost as its mean: of two units the cheaper one comes first with the odds of
    their costs (Efraimidis and Spirakis 2006, weights 1 / cost).
    """

    def lot(name: str) -> float:
        drawn = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big")
        return -math.log((drawn + 1) / 2**64) * units[name]

    modules, functions = set[str](), set[str]()
    rank: dict[str, int] = {}
    by_lot = sorted(units, key=lot)
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
    _units: dict[str, float] = field(default_factory=dict)
    _order: list[str] = field(default_factory=list)
    _took_s: float = SETTLED_S
    _expected_s: float = SETTLED_S

    def __post_init__(self) -> None:
        self._units = by_unit(self.expected)
        self._order = most_worth_first(self._units, self.seed)

    @property
    def pace(self) -> float:
        """How often the expected time the tests have taken."""
        return self._took_s / self._expected_s

    def took(self, name: str, seconds: float) -> None:
        """Notes that a test has ended."""
        self._took_s += seconds
        self._expected_s += self.expected[name]

    def fitting(
        self, waiting: Collection[str], own: Iterable[str], given: Iterable[str], workers: int, now_s: float
    ) -> set[str]:
        """Returns the units that a process may begin.

        Args:
            waiting: units that were not dealt yet.
            own: tests that the process was given and has not ended.
            given: the same of all processes.
        """
        left_s = (self.until_s - END_S - now_s) / self.pace
        capacity_s = left_s * workers - sum(self.expected[name] for name in given)
        longest_s = left_s - sum(self.expected[name] for name in own)
        short = (u for u in self._order if u in waiting and self._units[u] * SPREAD <= longest_s)
        return fitting(short, self._units, capacity_s)


class Dealing(LoadScopeScheduling):
    """Deals tests one by one to whoever is free, those of some modules together, in the order of the items.

    A unit for which there is no time is put aside, and dealt at the end if there is time after all.

    Args:
        until_s: the end of the run, on the monotonic clock; None if it has none.
        is_long: whether these are all long tests, which must have been measured.
    """

    def __init__(self, config: pytest.Config, log: Any, until_s: float | None, *, is_long: bool) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False
        self.time: Time | None = None
        self.unmeasured: list[str] = []
        self._aside: dict[str, dict[str, bool]] = {}
        self._ended: set[str] = set()
        self._until_s = until_s
        self._is_long = is_long

    @property
    def has_proved(self) -> bool:
        """Whether enough was run, and all of it is measured."""
        return not self.unmeasured and not (self.time is not None and self._has_few(self.time))

    def schedule(self) -> None:
        """Deals the first tests, or those for a process that came later."""
        if self.collection is None and self.registered_collections:
            names, known = next(iter(self.registered_collections.values())), read_durations()
            if self._is_long:
                self.unmeasured = unmeasured(names, known)
            if self._until_s is not None:
                self.time = Time(self._until_s, expected_s(names, known), os.environ[SEED])
        super().schedule()

    def report(self) -> list[str]:
        """What a person is told at the end."""
        told = self._report_of(self.time) if self.time is not None else []
        if self.unmeasured:
            told.append("never measured (tests/durations.py says how):")
            told += [f"  {name}" for name in self.unmeasured]
        return told

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        """Notes that a test has ended."""
        name = self.registered_collections[node][item_index]
        self._ended.add(name)
        if self.time is not None:
            self.time.took(name, duration)
        super().mark_test_complete(node, item_index, duration)

    def remove_node(self, node: Any) -> str | None:
        """Deals again what a process that has crashed had not begun.

        The inherited method deals again its tests that had ended too, and the one in which it crashed. So
        another process is given nothing, and the run waits for ever.
        """
        left = _not_ended(self.assigned_work.pop(node).values())
        for name in left[1:]:
            self.workqueue.setdefault(dealt_with(name), {})[name] = False
        for other in self.assigned_work:
            self._reschedule(other)
        return left[0] if left else None

    def _split_scope(self, nodeid: str) -> str:
        return dealt_with(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        self._put_aside(node)
        if self.workqueue:
            super()._assign_work_unit(node)

    def _reschedule(self, node: Any) -> None:
        self._put_aside(node)
        super()._reschedule(node)
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)  # a process begins a test only if it has the next one

    def _put_aside(self, node: Any) -> None:
        """Takes units for which a process has no time from the front of the queue."""
        if self.time is None or node.shutting_down:
            return
        given = [unit for of_node in self.assigned_work.values() for unit in of_node.values()]
        own, everybodys = _not_ended(self.assigned_work[node].values()), _not_ended(given)
        rest = (own, everybodys, len(self.assigned_work), time.monotonic())
        fits = self.time.fitting(self.workqueue, *rest)
        while self.workqueue and next(iter(self.workqueue)) not in fits:
            scope, tests = self.workqueue.popitem(last=False)
            self._aside[scope] = tests
        if not self.workqueue:
            for scope in sorted(self.time.fitting(self._aside, *rest), key=list(self._aside).index):
                self.workqueue[scope] = self._aside.pop(scope)

    def _report_of(self, run: Time) -> list[str]:
        aside = {name: run.expected[name] for name in _not_ended(self._aside.values())}
        others = len(run.expected) - len(self._ended) - len(aside)
        told = [f"{others} of {len(run.expected)} tests were not reached"] if others else []
        if not aside:
            return told or [f"every test was run, at {run.pace:.2f} times the measured durations"]
        costly = sorted(aside, key=aside.__getitem__, reverse=True)
        out_s, all_s = sum(aside.values()), sum(run.expected.values())
        return [
            *told,
            f"{len(costly)} of {len(run.expected)} tests were left out, {out_s:.0f} of {all_s:.0f} measured "
            f"seconds: tests take {run.pace:.2f} times these here, and there was no time for all of them.",
            f"{SEED}={run.seed} draws with the same lots. The longest that were left out:",
            *(f"  {aside[name]:6.1f} s  {name}" for name in costly[:10]),
            *(["too few were run to show anything"] if self._has_few(run) else []),
        ]

    def _has_few(self, run: Time) -> bool:
        return len(self._ended) < LEAST_SHARE * len(run.expected)


def _not_ended(units: Iterable[Mapping[str, bool]]) -> list[str]:
    return [name for unit in units for name, has_ended in unit.items() if not has_ended]
