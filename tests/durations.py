"""How long each test takes. `python -m tests.durations MEASURED...` takes over what `pytest --measure` wrote.

`tests/durations.json` maps each module to its tests, and each test to CPU seconds (of its process and all
ended children) and wall seconds, set-up included. All long tests are in it, and quick ones from 0.1 s of CPU
on. Measure on a quiet machine, a whole run or what is new:

    make long MEASURE=measured.jsonl && python -m tests.durations measured.jsonl
"""

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

FILE = Path(__file__).with_name("durations.json")
LEAST_CPU_S = 0.1

BUDGETS_CPU_S: dict[str, float] = {
    "tests/contract/": 135,
    "tests/faults/": 1050,  # two runs at once, killed: what one of them judges by hangs on the other
    "tests/gpu/": 1,
    "tests/integration/test_": 1340,
    "tests/integration/trainer/": 600,
    "tests/slurm/": 650,
    "tests/soak/": 100,
    "tests/unit/": 195,
    "tests/protocol/": 155,
    "tests/property/": 45,
}
"""CPU seconds that the tests of a folder may cost by `durations.json`; of quick tests it has those above
`LEAST_CPU_S`, and all of them have the limit of `make quick` besides. Daemons that tests leave to others,
as Slurm's, are not counted. Of the trainer's, a quarter is the matrix of families with pictures and
videos: each has towers and positions of its own. Of the contracts, most are starts of real engines, one
for each way of computing; of integration, 55 are ranks of vLLM whose parameters from slices are compared
with those from whole tensors, and 95 are recipes, run in small. Of faults, 18 are a policy that judges
itself on vLLM, killed, and 6 the turn of a critic beside an upload."""

WHOLE_RUN_CPU_S = 3.0
"""What the smallest whole run costs (forked, real trainer)."""

MOST_PRODUCT = 12
"""Number of cases of one test, unless they cost next to nothing."""

Durations = dict[str, dict[str, tuple[float, float]]]


def read_durations(file: Path = FILE) -> Durations:
    """CPU and wall seconds, by module and test."""
    return json.loads(file.read_text()) if file.exists() else {}


def merged(known: Durations, rows: Iterable[tuple[str, float, float]]) -> Durations:
    """What is known with newer rows of test, CPU and wall."""
    found = {module: dict(tests) for module, tests in known.items()}
    for name, cpu_s, wall_s in rows:
        module, _, test = name.partition("::")
        if cpu_s >= LEAST_CPU_S or not module.startswith(
            ("tests/unit/", "tests/protocol/", "tests/property/")
        ):
            found.setdefault(module, {})[test] = round(cpu_s, 1), round(wall_s, 1)
    return found


def still_there(known: Durations, names: Iterable[str]) -> Durations:
    """What is known of tests that there are.

    Args:
        names: all tests. Cases that are drawn have other names each time: all of them are kept.
    """
    names = set(names)
    functions = {name.partition("[")[0] for name in names}
    exact = {f"{m}::{test}".partition("[")[0] for m in known for test in known[m] if f"{m}::{test}" in names}
    found: Durations = {}
    for module, tests in known.items():
        for test, taken in tests.items():
            name = f"{module}::{test}"
            if name in names or name.partition("[")[0] in functions - exact:
                found.setdefault(module, {})[test] = taken
    return found


def unexplained(known: Durations, newer: Durations, sources: Callable[[str], str]) -> list[str]:
    """Returns new tests that cost as much as a whole run and whose docstrings do not say why it must be one.

    Args:
        sources: gives the text of a module.
    """
    functions = {f"{module}::{test.partition('[')[0]}" for module in known for test in known[module]}
    found = []
    for module, tests in newer.items():
        costly = {test.partition("[")[0] for test, (cpu_s, _) in tests.items() if cpu_s >= WHOLE_RUN_CPU_S}
        new = {name for name in costly if f"{module}::{name}" not in functions}
        for node in ast.parse(sources(module)).body if new else ():
            is_new = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in new
            if is_new and "whole run" not in (ast.get_docstring(node) or "").lower():
                found.append(f"{module}::{node.name}")
    return sorted(found)


def collected() -> list[str]:
    """Names of all tests."""
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=FILE.parent.parent)
    return [line for line in done.stdout.splitlines() if "::" in line]


def written(durations: Mapping[str, Mapping[str, tuple[float, float]]]) -> str:
    """One line a test, so that a change shows what has changed."""
    modules = []
    for module, tests in sorted(durations.items()):
        lines = [f"  {json.dumps(test)}: {json.dumps(list(taken))}" for test, taken in sorted(tests.items())]
        modules.append(f"{json.dumps(module)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(modules) + "\n}\n"


def main(files: list[str]) -> None:
    rows = [json.loads(line) for file in files for line in Path(file).read_text().splitlines()]
    known, names = read_durations(), collected()
    newer = still_there(merged(known, rows), names)
    costly = unexplained(still_there(known, names), newer, lambda name: (FILE.parents[1] / name).read_text())
    if costly:
        sys.exit(
            f"These cost {WHOLE_RUN_CPU_S:.0f} CPU seconds or more. A component with real files or a walk of "
            "a protocol is cheaper; if neither shows it, say why in a docstring with the words 'whole run':"
            "\n  " + "\n  ".join(costly)
        )
    FILE.write_text(written(newer))


if __name__ == "__main__":
    main(sys.argv[1:])
