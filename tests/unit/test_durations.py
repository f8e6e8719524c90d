"""What is known of the tests' durations."""

import ast
import json
from pathlib import Path

from tests.dealing import QUICK_FOLDERS
from tests.durations import merged, read_durations, still_there, unexplained, written

TESTS = Path(__file__).parents[1]


def test_newer_rows_replace_older_ones() -> None:
    known = {
        "tests/faults/test_a.py": {"test_old": (9.0, 9.0), "test_x": (1.0, 1.0)},
        "tests/unit/test_b.py": {"test_x": (0.5, 1.0)},
    }
    rows = [("tests/faults/test_a.py::test_x", 0.04, 2.26), ("tests/unit/test_c.py::test_y", 0.04, 0.1)]
    found = merged(known, rows)
    assert found == {
        "tests/faults/test_a.py": {"test_old": (9.0, 9.0), "test_x": (0.0, 2.3)},
        "tests/unit/test_b.py": {"test_x": (0.5, 1.0)},
    }
    assert json.loads(written(found)) == json.loads(json.dumps(found))


def test_tests_that_are_gone_are_forgotten_and_cases_that_are_drawn_are_not() -> None:
    one = (1.0, 1.0)
    known = {
        "tests/a.py": {"test_x[1]": one, "test_x[2]": one, "test_drawn[7]": one, "test_gone": one},
        "tests/b.py": {"test_x": one},
    }
    names = ["tests/a.py::test_x[1]", "tests/a.py::test_drawn[3]"]
    assert still_there(known, names) == {"tests/a.py": {"test_x[1]": one, "test_drawn[7]": one}}


def test_a_new_test_that_costs_a_whole_run_says_why_it_must_be_one() -> None:
    known = {"tests/a.py": {"test_old[1]": (9.0, 9.0)}}
    newer = {
        "tests/a.py": {"test_old[2]": (9.0, 9.0), "test_silent[x]": (4.0, 1.0), "test_why": (4.0, 1.0)},
        "tests/b.py": {"test_cheap": (0.4, 90.0), "test_other": (4.0, 1.0)},
    }
    texts = {
        "tests/a.py": "def test_old(): ...\ndef test_silent(): ...\n"
        "def test_why():\n    'A whole run: only that restarts from what a kill has left.'",
        "tests/b.py": "def test_cheap(): ...\nasync def test_other():\n    'About something else.'",
    }
    found = unexplained(known, newer, texts.__getitem__)
    assert found == ["tests/a.py::test_silent", "tests/b.py::test_other"]


def test_every_long_test_is_measured_and_what_is_gone_is_not_kept() -> None:
    """`python -m tests.durations MEASURED` mends both. Long tests in quick folders are found by their run."""
    found = set()
    for file in TESTS.rglob("test_*.py"):
        module = f"tests/{file.relative_to(TESTS)}"
        if module.startswith(QUICK_FOLDERS) or "/bench/" in module:
            continue
        for node in ast.parse(file.read_text()).body:
            names = (
                [each.asname or each.name for each in node.names] if isinstance(node, ast.ImportFrom) else []
            )
            names += [node.name] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else []
            found |= {f"{module}::{name}" for name in names if name.startswith("test_")}
    known = {
        f"{module}::{test.partition('[')[0]}"
        for module, tests in read_durations().items()
        for test in tests
        if not module.startswith(QUICK_FOLDERS)
    }
    assert sorted(found - known) == []
    assert sorted(known - found) == []
