"""What is known of the tests' durations, and the order that follows."""

import json
from types import SimpleNamespace

from tests import conftest
from tests.durations import merged, written


def test_a_module_that_was_measured_is_replaced_whole() -> None:
    known = {
        "tests/faults/test_a.py": {"test_gone": (9.0, 9.0)},
        "tests/unit/test_b.py": {"test_x": (0.5, 1.0)},
    }
    rows = [("tests/faults/test_a.py::test_new[1]", 0.04, 2.26), ("tests/unit/test_c.py::test_y", 0.04, 0.1)]
    found = merged(known, rows)
    assert found == {
        "tests/faults/test_a.py": {"test_new[1]": (0.0, 2.3)}, "tests/unit/test_b.py": {"test_x": (0.5, 1.0)},
    }  # fmt: skip
    assert json.loads(written(found)) == json.loads(json.dumps(found))


def test_the_longest_tests_begin_first_and_those_that_share_a_set_up_count_together(monkeypatch) -> None:
    shared = f"tests/{conftest.TOGETHER[0]}"
    durations = {
        shared: {"test_a": (1.0, 40.0), "test_b": (1.0, 45.0)},
        "tests/slurm/test_c.py": {"test_long": (1.0, 80.0), "test_short": (1.0, 2.0)},
    }
    monkeypatch.setattr(conftest, "read_durations", lambda: durations)
    names = [
        "tests/slurm/test_c.py::test_short", "tests/slurm/test_c.py::test_new", f"{shared}::test_a",
        "tests/slurm/test_c.py::test_long", f"{shared}::test_b",
    ]  # fmt: skip
    items = [SimpleNamespace(nodeid=name) for name in names]
    found = [item.nodeid for item in conftest.longest_first(items)]
    assert found == [names[2], names[4], names[3], names[1], names[0]]
