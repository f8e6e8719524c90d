"""One word names one thing."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "yatt"


def test_a_public_class_name_is_defined_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert len(places) > 100, "the package is there"
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_a_test_file_has_a_name_of_its_own() -> None:
    """Two files of one name in folders without `__init__.py` are one module for pytest."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in (PACKAGE.parent / "tests").rglob("test_*.py"):
        places[path.name].append(str(path))
    assert len(places) > 100, "the tests are there"
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
