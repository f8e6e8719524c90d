"""Which tests are run first, and which are left out if there is no time for all."""

import json
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import loadscope

from tests import dealing
from tests.dealing import (
    END_S,
    NEW_S,
    QUICK_FOLDERS,
    SEED,
    SETTLED_S,
    TOGETHER,
    Dealing,
    Time,
    computing_and_waiting,
    dealt_with,
    expected_s,
    longest_first,
    most_worth_first,
    unmeasured,
)  # fmt: skip
from tests.durations import BUDGETS_CPU_S, MOST_PRODUCT, read_durations

ROOT = Path(__file__).parents[2]


def test_the_longest_tests_begin_first_and_those_that_share_a_set_up_count_together() -> None:
    shared = f"tests/{TOGETHER[0]}"
    known = {
        shared: {"test_a": (1.0, 40.0), "test_b": (1.0, 45.0)},
        "tests/slurm/test_c.py": {"test_long": (1.0, 80.0), "test_short": (1.0, 2.0)},
    }
    names = [
        "tests/slurm/test_c.py::test_short", "tests/slurm/test_c.py::test_new", f"{shared}::test_a",
        "tests/slurm/test_c.py::test_long", f"{shared}::test_b",
    ]  # fmt: skip
    assert longest_first(expected_s(names, known)) == [names[2], names[4], names[3], names[1], names[0]]


def test_what_computes_and_what_waits_take_turns_in_proportion_to_their_times() -> None:
    computes = {f"test_{number}": (9.0, 10.0) for number in range(6)}
    waits = {f"test_{number}": (1.0, 30.0) for number in range(4)}
    known = {"tests/a.py": computes, "tests/b.py": waits, f"tests/{TOGETHER[0]}": {"test_x": (1.0, 80.0)}}
    names = [f"{module}::{test}" for module, tests in known.items() for test in tests]
    order = computing_and_waiting(names, known)
    assert sorted(order) == sorted(names)
    assert [name.partition("::")[0][6:] for name in order] == [
        "a.py", TOGETHER[0], "a.py", "a.py", "b.py", "a.py", "b.py", "a.py", "b.py", "a.py", "b.py",
    ]  # fmt: skip
    assert order.index(f"tests/{TOGETHER[0]}::test_x") < 2, "the longest of its kind"


def test_a_test_that_was_never_measured_is_told_and_counts_as_long_if_it_is_not_quick() -> None:
    known = {"tests/a.py": {"test_x[1]": (1.0, 2.0), "test_y": (0.0, 0.0)}}
    names = ["tests/a.py::test_x[2]", "tests/a.py::test_y", "tests/a.py::test_z", "tests/b.py::test_x[1]"]
    assert unmeasured(names, known) == ["tests/a.py::test_z", "tests/b.py::test_x"]
    found = expected_s([*names, "tests/unit/test_c.py::test_new"], known)
    assert [round(seconds) for seconds in found.values()] == [2, 0, NEW_S, NEW_S, 0], "a case as its siblings"


def test_what_adds_most_comes_first_and_among_equals_the_cheaper_one_by_the_odds_of_their_costs() -> None:
    names = [f"tests/{m}.py::test_{f}[{c}]" for m in "ab" for f in "xy" for c in "12"]
    expected = {name: 3.0 if name.endswith("[1]") else 1.0 for name in names}
    cheaper_first = 0
    for seed in range(2000):
        order = most_worth_first(expected, str(seed))
        assert order == most_worth_first(dict(reversed(expected.items())), str(seed)), "by the seed alone"
        assert len({name.partition("::")[0] for name in order[:2]}) == 2, "one of each module"
        assert len({name.partition("[")[0] for name in order[:4]}) == 4, "one of each test"
        case = next(name for name in order if name.startswith("tests/a.py::test_x"))
        cheaper_first += case.endswith("[2]")
    assert 0.70 < cheaper_first / 2000 < 0.80, "three to one"


class Process:
    """A process as xdist has it: it begins a test only if it has the next one, or will get no more."""

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=number)
        self.tests: list[int] = []
        self.running: tuple[float, int] | None = None
        self.is_told, self.is_dead = False, False

    @property
    def shutting_down(self) -> bool:
        return self.is_told or self.is_dead

    def shutdown(self) -> None:
        self.is_told = True

    def send_runtest_some(self, tests: list[int]) -> None:
        self.tests += tests


class World:
    """The real dealing to three processes, with the measured tests and a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, until_s: float | None, pace: float) -> None:
        monkeypatch.setattr(dealing, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(loadscope, "parse_tx_spec_config", lambda _: [1] * 3)
        monkeypatch.setenv(SEED, "5")
        known = read_durations()
        names = [f"{m}::{t}" for m, tests in known.items() for t in tests if not m.startswith(QUICK_FOLDERS)]
        self.expected = expected_s(names, known)
        self.names = computing_and_waiting(names, known)
        self.now_s, self.pace, self.lots = 0.0, pace, random.Random(7)
        config: Any = SimpleNamespace(option=SimpleNamespace())
        self.dealing = Dealing(config, Producer("test", enabled=False), until_s, is_long=True)
        self.processes: list[Process] = []
        self.ran = Counter[str]()
        self.crashed = 0
        for _ in range(3):
            self.join()
        for process in self.processes:
            self.dealing.add_node_collection(process, self.names)
        self.dealing.schedule()

    def join(self) -> Process:
        self.processes.append(process := Process(len(self.processes)))
        self.dealing.add_node(process)
        return process

    def begin(self) -> None:
        for each in [p for p in self.processes if not p.is_dead and p.running is None]:
            if len(each.tests) >= 2 or (each.tests and each.is_told):
                number = each.tests.pop(0)
                took_s = self.expected[self.names[number]] * self.pace * self.lots.uniform(0.7, 1.3)
                each.running = self.now_s + took_s, number
            elif not each.tests and each.is_told:
                assert self.dealing.remove_node(each) is None
                each.is_dead = True

    def crash(self, process: Process, number: int) -> None:
        """In the middle of a test; another process comes."""
        process.is_dead = True
        assert self.dealing.remove_node(process) == self.names[number]
        self.dealing.add_node_collection(self.join(), self.names)
        self.dealing.schedule()

    def run(self, *crashes_s: float) -> None:
        """Runs until nobody has anything to do."""
        crashes = list(crashes_s)
        while True:
            self.begin()
            if self.dealing.tests_finished:
                for each in self.dealing.nodes:
                    each.shutdown()
                self.begin()
            busy = [p for p in self.processes if p.running is not None and not p.is_dead]
            if not busy:
                break
            first = min(busy, key=lambda p: p.running)
            self.now_s, number = first.running
            first.running = None
            self.ran[self.names[number]] += 1
            if crashes and self.now_s > crashes[0]:
                crashes.pop(0)
                self.crashed += 1
                self.crash(first, number)
            else:
                self.dealing.mark_test_complete(first, number, self.took_s(number))
        assert all(p.is_dead for p in self.processes), "nobody waits for ever"
        assert not self.ran or max(self.ran.values()) == 1, "no test is dealt twice"

    def took_s(self, number: int) -> float:
        return self.expected[self.names[number]] * self.pace


@pytest.mark.parametrize("crashes_s", [(), (100.0, 1500.0), (2500.0, 2600.0, 2700.0)])
@pytest.mark.parametrize("pace", [0.5, 1.0, 2.0, 4.0])
def test_a_run_ends_in_time_however_slow_the_machine_is_and_runs_all_if_it_can(
    monkeypatch, pace: float, crashes_s: tuple[float, ...]
) -> None:
    until_s = sum(expected_s_of_all().values()) / 3 * 1.2 + 2 * END_S
    world = World(monkeypatch, until_s, pace)
    world.run(*crashes_s)
    told = "\n".join(world.dealing.report())
    out = len(world.names) - len(world.ran)
    again_s = END_S if crashes_s else 0.0  # what a process that crashed was given is dealt again
    assert world.now_s <= until_s + again_s
    if pace <= 1:
        assert not out, told
    else:
        assert world.now_s > 0.85 * until_s, "the time is used"
        modules = {name.partition("::")[0] for name in world.names}
        assert len({name.partition("::")[0] for name in world.ran}) > 0.8 * len(modules)
        assert f"{out} of {len(world.names)} tests were left out" in told and f"{SEED}=5" in told
    assert (f"{world.crashed} of {len(world.names)} tests were not reached" in told) == bool(world.crashed)
    assert ("every test was run" in told) == (not out and not world.crashed)
    together = {name.partition("::")[0] for name in world.names if dealt_with(name) != name}
    for module in together:
        mine = [name for name in world.names if name.startswith(f"{module}::")]
        assert world.crashed or len({name in world.ran for name in mine}) == 1, "they have one set-up"


def expected_s_of_all() -> dict[str, float]:
    known = read_durations()
    names = [f"{m}::{t}" for m, tests in known.items() for t in tests if not m.startswith(QUICK_FOLDERS)]
    return expected_s(names, known)


@pytest.mark.parametrize("crashes_s", [(), (50.0, 800.0, 2500.0)])
def test_without_an_end_every_test_is_dealt_once(monkeypatch, crashes_s: tuple[float, ...]) -> None:
    world = World(monkeypatch, None, 1.0)
    world.run(*crashes_s)
    assert len(world.ran) == len(world.names) and not world.dealing.report()


def test_a_run_whose_time_is_over_deals_nothing_and_fails(monkeypatch) -> None:
    world = World(monkeypatch, 10.0, 1.0)
    world.run()
    assert not world.ran and not world.dealing.has_proved
    assert "too few were run to show anything" in world.dealing.report()


def test_the_pace_is_taken_for_one_until_something_is_known() -> None:
    run = Time(1000.0, {"a": 10.0, "b": 600.0}, "1")
    assert run.pace == 1.0
    run.took("a", 20.0)
    assert math.isclose(run.pace, (SETTLED_S + 20) / (SETTLED_S + 10))
    fits = run.fitting(["b", "a"], [], [], 1, 1000.0 - END_S - 100.0)
    assert fits == {"a"}, "a short one still fits where a long one does not"


SUITE = """
import pytest

@pytest.mark.parametrize("number", range(12))
def test_some(number):
    pass

def test_other():
    pass
"""


def pytest_in(
    folder: Path, *words: str, more: str = "", hooks: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """The real options and hooks, with tests of its own."""
    (folder / "conftest.py").write_text(f"from tests.conftest import *\n{hooks}")
    (folder / "test_some.py").write_text(SUITE + more)
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        f"--rootdir={folder}",
        *words,
        str(folder),
    ]
    return subprocess.run(
        argv,
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | variables | {"PYTHONPATH": str(ROOT)},
    )


STEMLESS = "lots.the_stem = lambda: None"
"""These tests start no process of yatt: what would fork them costs more than all of them."""

KNOWN = """
from tests import dealing
dealing.read_durations = lambda: {"test_some.py": {"test_other": (9.0, 9000.0), "test_some[0]": (0.1, 0.2)}}
"""


@pytest.mark.slow
def test_a_real_run_with_an_end_leaves_out_tests_and_says_so(tmp_path: Path) -> None:
    until = f"--until={time.time() + END_S + 900:.0f}"
    done = pytest_in(tmp_path, "-n2", until, hooks=KNOWN, **{SEED: "77"})
    assert done.returncode == 0 and "12 passed" in done.stdout, done.stdout
    assert (
        "1 of 13 tests were left out" in done.stdout and "9000.0 s  test_some.py::test_other" in done.stdout
    )
    assert done.stdout.count(f"{SEED}=77") == 2, "before and after"


@pytest.mark.slow
def test_a_process_that_crashes_costs_one_test(tmp_path: Path) -> None:
    crash = "\n\ndef test_crash():\n    import os\n    os._exit(1)\n"
    done = pytest_in(tmp_path, "-n2", more=crash)
    assert done.returncode == 1 and "1 failed, 13 passed" in done.stdout, done.stdout


@pytest.mark.slow
def test_a_run_without_an_end_runs_every_test(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, "-n2")
    assert done.returncode == 0 and "13 passed" in done.stdout and "left out" not in done.stdout


@pytest.mark.slow
def test_long_tests_that_were_never_measured_fail_the_run(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, "-n2", "--part=long")
    assert done.returncode == 1 and "13 passed" in done.stdout, done.stdout
    assert "never measured" in done.stdout and "test_some.py::test_other" in done.stdout
    words = ("-n2", "--part=long", f"--measure={tmp_path / 'm'}")
    assert pytest_in(tmp_path, *words, hooks=STEMLESS).returncode == 0
    assert len((tmp_path / "m").read_text().splitlines()) == 13


def test_an_end_without_processes_is_refused(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, "--until=1")
    assert done.returncode == 4 and "--until needs -n" in done.stderr


def test_no_folder_of_tests_costs_more_than_its_budget() -> None:
    """Measured again, these may fall: lower the budget too."""
    known = read_durations()
    for folder, most_s in BUDGETS_CPU_S.items():
        cost_s = sum(
            cpu_s for m, tests in known.items() if m.startswith(folder) for cpu_s, _ in tests.values()
        )
        assert cost_s <= most_s, f"{folder} costs {cost_s:.0f} s of CPU: find a cheaper proof, or say why not"
        is_near = cost_s >= 0.6 * most_s or most_s == 1
        assert is_near, f"{folder} costs {cost_s:.0f} s of CPU only: lower its budget"
    others = [m for m in known if not m.startswith((*QUICK_FOLDERS, *BUDGETS_CPU_S))]
    assert not others, "a folder without a budget"


def test_no_test_that_costs_something_has_more_than_a_dozen_cases() -> None:
    """Of a product take pairs. A list of faults, mistakes or families, or of what one world has measured, is
    none."""
    lists = {
        "test_store_faults.py::test_a_fault_that_passes_costs_time_and_one_commit_is_there",
        "test_mistakes.py::test_a_mistake_is_told_at_once",
        "test_families.py::test_a_family_is_transformers_in_every_layout",
        "test_given.py::test_gradients_are_those_of_the_definitions_in_every_layout",
        "test_planned_memory.py::test_weights_gradients_and_optimizer_are_exact",
        "test_planned_memory.py::test_the_peak_of_activations_and_logits_is_within_five_percent",
    }
    cases, cost_s = Counter[str](), Counter[str]()
    for module, tests in read_durations().items():
        for test, (cpu_s, _) in tests.items():
            name = f"{Path(module).name}::{test.partition('[')[0]}"
            cases[name] += 1
            cost_s[name] += round(cpu_s)
    found = {name for name, number in cases.items() if number > MOST_PRODUCT and cost_s[name] > 5}
    assert found <= lists, json.dumps({name: [cases[name], cost_s[name]] for name in found - lists})
