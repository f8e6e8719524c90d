"""No code reads the text of an error of ours: what was found is a value (`yatt.errors.Finding`).

A text that was split, searched or replaced has lied: rows whose path began with that of an absent model were
called absent, and a mistake of two lines was two.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "yatt"
READING = frozenset(
    """
    split rsplit splitlines partition rpartition startswith endswith removeprefix removesuffix replace strip
    rstrip lstrip find rfind index rindex count translate
    """.split()  # noqa: SIM905 - shorter to read and to change
)
TEXTS = frozenset({"str", "repr", "words_of", "error_line"})
"""Functions that give an error's text."""

FIELDS = frozenset({"says", "cure", "heading", "args"})
"""Of findings and errors, with text."""

NAMES = frozenset({"mistake", "mistakes", "fault", "faults", "says", "failures"})
"""Parameters and variables that hold what is wrong."""

ALLOWED = {
    "cli.commands.check": "a text in one line",
    "launch.resolve.media_entries": "a kind of fault is the first words of its own sentence",
    "reward.tried_calls": "Python's text of a user's error",
    "core.requests.first_use": "vLLM's text of a lack of memory",
    "trainer.state.hf_folder": "safetensors' text, which has the number of a system's error",
    "evaluation.evaluate": "whether the end of a log is there already",
}
"""Modules that may, and why."""


def readings(tree: ast.AST) -> Iterator[int]:
    """Yields the lines where an error's text is read."""
    for scope in ast.walk(tree):
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            texts = _Texts(scope)
            yield from (node.lineno for node in ast.walk(scope) if texts.is_read(node))  # type: ignore[attr-defined]


class _Texts:
    """What is an error's text in a function."""

    def __init__(self, scope: ast.AST) -> None:
        nodes = list(ast.walk(scope))
        self._errors = {"error"} | {
            node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name
        }
        self._texts = {"error"} | {
            node.arg for node in nodes if isinstance(node, ast.arg) and node.arg in NAMES
        }
        for node in nodes:
            if isinstance(node, ast.Assign) and self.is_text(node.value):
                self._texts |= {each.id for each in node.targets if isinstance(each, ast.Name)}

    def is_read(self, node: ast.AST) -> bool:
        """Whether the node takes a text apart, or looks for something in it."""
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re")), args=args):
                return any(map(self.is_text, args))
            case ast.Call(func=ast.Attribute(attr=attr, value=value)):
                return attr in READING and self.is_text(value)
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[value]):
                return self.is_text(value)
        return False

    def is_text(self, node: ast.AST) -> bool:
        """Whether a node's value is the text of an error, or a part of it."""
        match node:
            case ast.Call(func=ast.Attribute(attr="in_words")):
                return True
            case ast.Call(func=ast.Name(id=name), args=args):
                return name in TEXTS and any(_names(each) & (self._errors | NAMES) for each in args)
            case ast.JoinedStr():
                return bool(_names(node) & (self._errors | self._texts))
            case ast.Attribute(attr=attr):
                return attr in FIELDS
            case ast.Name(id=name):
                return name in self._texts
            case ast.Subscript(value=value) | ast.Call(func=ast.Attribute(value=value)):
                return self.is_text(value)
        return False


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def test_no_code_reads_the_text_of_an_error() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        if lines := sorted(set(readings(ast.parse(path.read_text())))):
            found[name] = lines
    assert {name: lines for name, lines in found.items() if name not in ALLOWED} == {}
    assert found.keys() == ALLOWED.keys(), "what is not there any more needs no permission"


@pytest.mark.parametrize(
    "planted",
    [
        "raise ConfigError(str(error).replace('model.path', key)) from error",
        "lines = str(error).splitlines()",
        "text = f'{key}: {error}'; return text.removeprefix('model.path')",
        "return ' has no ' in str(error)",
        "found = re.search('row [0-9]+', words_of(error))",
        "return [each for each in error.findings if each.says.startswith('no file')]",
        "return path in error.findings[0].in_words()",
        "return mistake.partition(':')[0]",
    ],
)
def test_each_way_of_reading_is_found(planted: str) -> None:
    text = f"def f(key, path, mistake):\n    try: g()\n    except ConfigError as error:\n        {planted}\n"
    assert list(readings(ast.parse(text))) == [4]
