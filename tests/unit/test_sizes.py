"""The house stays small: modules and functions have limits."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "yatt"
MOST_LINES, MOST_IN_CONTROL, MOST_IN_FUNCTION = 400, 300, 50


def test_no_module_is_over_its_limit() -> None:
    def limit(path: Path) -> int:
        is_small = path.relative_to(PACKAGE).parts[0] in ("control", "launch")
        return MOST_IN_CONTROL if is_small else MOST_LINES

    lines = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert len(lines) > 200, "the package is there"
    assert {str(path): count for path, count in lines.items() if count > limit(path)} == {}


def test_no_function_is_over_its_limit() -> None:
    over = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MOST_IN_FUNCTION:
                    over[f"{path}:{node.name}"] = length
    assert over == {}
