"""No test depends on how fast the machine is: a limit that only a hang reaches is `HANG_S`, not a number."""

import ast
import os
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests import conftest
from tests.runs import HANG_S, LOADED
from tests.seeds import seed_of

TESTS = Path(__file__).parents[1]
LEAST_S = HANG_S / LOADED
"""Of what is multiplied by `LOADED`: `timeout_s`."""

LEAST_PLAIN_S = 300.0
"""Of what is not. A process of 12 s took 100 s beside a whole suite on a slow machine."""

PYTEST = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
WAITS = re.compile(r"wait|wait_for|wait_node|wait_state|communicate|join|acquire|settimeout|timeout")
SUBJECTS = {
    "integration/test_open_ports.py": 1,  # a port that does not answer strangers
    "integration/test_second_start.py": 1,  # a period of heartbeats
    "integration/test_stacks.py": 1,  # a signal that is ignored: nothing comes of it
    "integration/trainer/test_meeting.py": 1,  # a port that does not answer strangers
    "slurm/test_storm.py": 1,  # a period between two looks
    "unit/control/test_newcomers.py": 1,  # an engine that waits for weights
    "unit/control/test_newer_attempt.py": 1,  # turns of a watch that says nothing
    "unit/launch/test_places.py": 7,  # the number of a life, not a time
}
"""How many calls a module has in which the time is what is tested."""


@cache
def modules() -> dict[str, ast.Module]:
    """Those of the tests but the GPU's and the benchmarks, by path."""
    paths = {path.relative_to(TESTS).as_posix(): path for path in sorted(TESTS.rglob("*.py"))}
    return {
        name: ast.parse(path.read_text())
        for name, path in paths.items()
        if not name.startswith(("bench/", "gpu/"))
    }


@cache
def calls() -> list[tuple[str, ast.Call]]:
    """Every call in these modules."""
    trees = modules().items()
    return [(name, node) for name, tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]


Named = Mapping[str, ast.AST]


def named(tree: ast.Module) -> Named:
    """What the names of a module stand for: its own, and those of other modules of the tests."""
    found: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            theirs = named(modules().get(f"{node.module[6:].replace('.', '/')}.py", ast.Module([], [])))
            found |= {
                each.asname or each.name: theirs[each.name] for each in node.names if each.name in theirs
            }
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
    found.pop("LOADED", None)  # a factor for a number beside it, or for an argument's
    return found


def numbers(node: ast.AST, names: Named) -> Iterator[float]:
    """Those that a limit is made of, in sums and products too."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield node.value
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        yield from [*numbers(node.left, names), *numbers(node.right, names)]
    elif isinstance(node, ast.Name) and node.id in names:
        yield from numbers(names[node.id], {})


def is_multiplied(node: ast.AST, names: Named) -> bool:
    """Whether a limit is a product with `LOADED`."""
    found = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
    return "LOADED" in found or any(is_multiplied(names[name], {}) for name in found if name in names)


def short_limits(node: ast.Call, names: Named) -> list[float]:
    """Numbers of seconds in a call that waits; 0 is a look, not a wait. A mark may give a test more time than
    others, not less."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    is_wait = WAITS.fullmatch(name) is not None
    plain = [each.value for each in node.keywords if each.arg == "timeout"]
    plain += [] if not is_wait or any(each.arg == "timeout_s" for each in node.keywords) else node.args
    longer = [each.value for each in node.keywords if is_wait and each.arg == "timeout_s"]
    least_s = PYTEST["timeout"] if ast.unparse(node.func) == "pytest.mark.timeout" else LEAST_PLAIN_S
    leasts = [(each, LEAST_S if is_multiplied(each, names) else least_s) for each in plain]
    leasts += [(each, LEAST_S) for each in longer]
    return [
        largest for each, least in leasts if 0 < (largest := max(numbers(each, names), default=0)) < least
    ]


def test_a_limit_that_only_bounds_a_hang_is_no_number() -> None:
    names = {name: named(tree) for name, tree in modules().items()}
    places = [(name, node.lineno) for name, node in calls() if short_limits(node, names[name])]
    found = Counter(name for name, _ in places)
    assert not [f"tests/{name}:{line}" for name, line in places if found[name] != SUBJECTS.get(name)], (
        "use HANG_S, or wait_for without timeout_s (tests/runs.py)"
    )
    assert found == SUBJECTS


@pytest.mark.parametrize(
    ("call", "is_refused"),
    [
        ("x.wait(5)", True), ("x.communicate(timeout=20 * LOADED)", True), ("run(x, timeout=100)", True),
        ("run(x, timeout=60 * LOADED)", False),
        ("wait_for(x, timeout_s=BEAT_S + 5, what='')", True), ("asyncio.timeout(2.5)", True),
        ("pytest.mark.timeout(400)", True), ("pytest.mark.timeout(1200)", False),
        ("x.join(HANG_S)", False), ("x.acquire(timeout=0)", False), ("wait_for(x, timeout_s=90)", False),
        ("', '.join(x)", False), ("store(x, timeout_s=5)", False),
        ("x.wait(SOON_S)", True), ("x.wait(2 * SOON_S)", True), ("x.wait(LATE_S)", False),
        ("x.wait(ANY_S)", False),
    ],
)  # fmt: skip
def test_what_is_refused(call: str, is_refused: bool) -> None:
    node = ast.parse(call, mode="eval").body
    names = named(ast.parse("SOON_S = 3.0\nLATE_S = 3.0 * 300"))
    assert isinstance(node, ast.Call) and bool(short_limits(node, names)) == is_refused


# ---- children ----------------------------------------------------------------------------------


def test_a_child_that_is_ending_is_no_leftover_and_one_that_lives_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        assert conftest.command_line_of(child.pid)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has no memory any more
        looks = iter([{child.pid}, {child.pid}, set[int]()])
        monkeypatch.setattr(conftest, "children_of", lambda _: next(looks))
        assert conftest.command_line_of(child.pid) == b""
        assert list(looks) == [], "until it is gone"


# ---- seeds --------------------------------------------------------------------------------------

UNSEEDED = {
    "nursery/__main__.py": "what a forked process draws is what is tested",
    "soak/weather/sitecustomize.py": "it runs in other people's processes",
}


def is_unseeded(node: ast.Call) -> bool:
    """A draw of the module `random`, or a generator that nobody can repeat."""
    if not isinstance(node.func, ast.Attribute) or ast.unparse(node.func.value) != "random":
        return False
    if node.func.attr != "Random":
        return node.func.attr != "seed"
    return not node.args or "time" in ast.dump(node.args[0])


def test_what_is_drawn_can_be_repeated() -> None:
    assert not {name for name, node in calls() if is_unseeded(node)} - UNSEEDED.keys(), "use tests/seeds.py"


def test_a_seed_is_that_of_its_variable_or_of_the_run_and_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("YATT_DRAW", "71")
    monkeypatch.setenv("YATT_TRIAL_SEED", "5")
    assert seed_of("YATT_TRIAL_SEED") == 5
    monkeypatch.delenv("YATT_TRIAL_SEED")
    assert seed_of("YATT_TRIAL_SEED") == 71
    assert capsys.readouterr().out == "drawn with YATT_TRIAL_SEED=5\ndrawn with YATT_TRIAL_SEED=71\n"
