"""What is known of the tests' durations."""

import json

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
