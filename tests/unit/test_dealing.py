"""Which tests are run first, and which are left out if there is no time for all."""

import json
import math
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import QUICK_FOLDERS
from tests.dealing import (
    END_S,
    NEW_S,
    SEED,
    SETTLED_S,
    TOGETHER,
    Time,
    expected_s,
    fitting,
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


def test_a_test_that_was_never_measured_is_told_and_counts_as_long_if_it_is_not_quick() -> None:
    known = {"tests/a.py": {"test_x[1]": (1.0, 2.0), "test_y": (0.0, 0.0)}}
    names = ["tests/a.py::test_x[2]", "tests/a.py::test_y", "tests/a.py::test_z", "tests/b.py::test_x[1]"]
    assert unmeasured(names, known) == ["tests/a.py::test_z", "tests/b.py::test_x"]
    assert expected_s(names, known, {names[3]})[names[2]] == NEW_S
    assert expected_s(names, known, {names[3]})[names[3]] < 1


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


@pytest.mark.parametrize("slowness", [0.5, 1.0, 2.0, 4.0])
def test_a_run_ends_in_time_however_slow_the_machine_is_and_runs_all_if_it_can(slowness: float) -> None:
    """Deals tests of measured lengths to three processes with a clock of its own."""
    lots = random.Random(7)
    durations = {m: t for m, t in read_durations().items() if not m.startswith("tests/unit/")}
    names = [f"{module}::{test}" for module, tests in durations.items() for test in tests]
    expected = expected_s(names, durations)
    until_s = sum(expected.values()) / 3 * 1.2 + END_S
    run = Time(until_s, expected, "5")
    queue = longest_first(expected)
    waiting, running, free_at, ran = set(queue), dict[str, float](), [0.0, 0.0, 0.0], Counter[str]()
    while queue:
        now_s = min(free_at)
        for name in [n for n, end_s in running.items() if end_s <= now_s]:
            run.took(name, expected[name] * slowness)
            del running[name]
        front = queue.pop(0)
        out = run.leave_out([front], waiting, running, 3, now_s)
        waiting.discard(front)
        if out:
            continue
        took_s = expected[front] * slowness * lots.uniform(0.7, 1.3)
        free_at[free_at.index(now_s)] = running[front] = now_s + took_s
        ran[front.partition("::")[0]] += 1
    assert max(free_at) <= until_s
    if slowness <= 1:
        assert not run.left_out and "every test was run" in run.report()[0]
    else:
        assert max(free_at) > 0.8 * until_s, "the time is used"
        assert len(ran) > 0.9 * len(durations), "of nearly every module something is run"
        told = "\n".join(run.report())
        assert f"{len(run.left_out)} of {len(names)} tests were left out" in told and f"{SEED}=5" in told


def test_the_pace_is_taken_for_one_until_something_is_known() -> None:
    run = Time(1000.0, {"a": 10.0, "b": 600.0}, "1")
    assert run.pace == 1.0
    run.took("a", 20.0)
    assert math.isclose(run.pace, (SETTLED_S + 20) / (SETTLED_S + 10))
    assert fitting(["b", "a"], run.expected, 100.0) == {"a"}, (
        "a short one still fits where a long one does not"
    )


SUITE = """
import time
import pytest

@pytest.mark.parametrize("number", range(12))
def test_some(number):
    time.sleep(0.2)

def test_other():
    pass
"""


def pytest_in(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The real options and hooks, with tests of its own."""
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    (folder / "test_some.py").write_text(SUITE)
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


def test_a_real_run_with_an_end_leaves_out_tests_and_says_so(tmp_path: Path) -> None:
    """The measured time of its tests is not known, so that each counts as long: 100 s of three are left."""
    until = f"--until={time.time() + END_S + NEW_S * 1.5 + 10:.0f}"
    done = pytest_in(tmp_path, "-n2", until, **{SEED: "77"})
    assert done.returncode == 0, done.stdout
    counts = re.search(r"(\d+) of 13 tests were left out", done.stdout)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert counts and passed and int(counts[1]) > 0 and int(counts[1]) + int(passed[1]) == 13, done.stdout
    assert done.stdout.count(f"{SEED}=77") == 2, "before and after"


def test_a_run_without_an_end_runs_every_test(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, "-n2")
    assert done.returncode == 0 and "13 passed" in done.stdout and "left out" not in done.stdout


def test_long_tests_that_were_never_measured_fail_the_run(tmp_path: Path) -> None:
    done = pytest_in(tmp_path, "-n2", "--part=long")
    assert done.returncode == 1 and "13 passed" in done.stdout, done.stdout
    assert "never measured" in done.stdout and "test_some.py::test_other" in done.stdout
    assert pytest_in(tmp_path, "-n2", "--part=long", f"--measure={tmp_path / 'm'}").returncode == 0
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
    """Of a product take pairs. A list of faults or mistakes, or of what one world has measured, is none."""
    lists = {
        "test_store_faults.py::test_a_fault_that_passes_costs_time_and_one_commit_is_there",
        "test_mistakes.py::test_a_mistake_is_told_at_once",
        "test_planned_memory.py::test_weights_gradients_and_optimizer_are_exact",
    }
    cases, cost_s = Counter[str](), Counter[str]()
    for module, tests in read_durations().items():
        for test, (cpu_s, _) in tests.items():
            name = f"{Path(module).name}::{test.partition('[')[0]}"
            cases[name] += 1
            cost_s[name] += round(cpu_s)
    found = {name for name, number in cases.items() if number > MOST_PRODUCT and cost_s[name] > 5}
    assert found == lists, json.dumps({name: [cases[name], cost_s[name]] for name in found ^ lists})
