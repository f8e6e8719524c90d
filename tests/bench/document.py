"""docs/benchmarks.md from the results: a pure function, so that the page never says more than they do."""

from typing import Any

HEADER = """# Benchmarks

Made by `make bench` (`python -m tests.bench.run [NAME ...]`) from `tests/bench/results/*.json`; do not edit.
Compare ratios, not seconds: each comparison was made in one run on one machine, its arms in turn.
"""


def document(results: list[dict[str, Any]]) -> str:
    """The whole page."""
    return "\n".join([HEADER, *(_section(result) for result in results)])


def _section(result: dict[str, Any]) -> str:
    lines = [f"## {result['title']}", "", result["how"], "", *_table(result["head"], result["rows"]), ""]
    targets = [
        [t["what"], t["target"], t["value"], "yes" if t["met"] else "**no**"] for t in result["targets"]
    ]
    lines += [*_table(["target", "wanted", "measured", "met"], targets), ""] if targets else []
    lines += [f"{note}\n" for note in result.get("notes", [])]
    return "\n".join([*lines, f"`tests/bench/{result['name']}.py`; {_machine(result['machine'])}.", ""])


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [_row(head), _row(["---"] * len(head)), *map(_row, rows)]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _machine(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    size = f"{machine['cores']} cores, {machine['memory_gib']} GiB"
    return f"{machine['date']}, {machine['cpu']}, {size}; {versions}"
