"""Files of the project as they are committed."""

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOTTED = re.compile(r"(?<![\w./-])yatt(?:\.(?!sif|tar)\w+)+")
IMPORTS = re.compile(
    r"^ *from ((?:yatt|tests|tools)(?:\.\w+)*) import ((?:\w+(?: as \w+)?(?:, )?)+|\([^)]*\))", re.MULTILINE
)
FILES = re.compile(r"(?<![\w/.-])(?:yatt|tests|tools|configs)/[\w/.-]*\w\.(?:py|md|yaml)\b")
TELL_OF_OTHERS = ("docs/dev/lessons.md", "tests/integration/test_forked.py")


def test_no_file_has_the_marks_of_an_unfinished_merge() -> None:
    marks = ["-e", "^<<<<<<< ", "-e", "^>>>>>>> "]
    found = subprocess.run(
        ["git", "-C", str(ROOT), "grep", "-lIE", *marks], capture_output=True, text=True, check=False
    )
    assert found.returncode == 1, f"{found.stdout}{found.stderr}"


def test_modules_and_files_that_texts_point_to_are_there() -> None:
    """In docstrings, comments, texts and documents. Lessons tell of former places;
    tests tell of places that are nowhere."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.splitlines() if name.endswith((".py", ".md", ".toml"))]
    names = [name for name in names if not name.startswith("tests/unit/") and name not in TELL_OF_OTHERS]
    assert len(names) > 800, "the project is there"
    lost = []
    for name in names:
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
            lost += [f"{name}:{number}: {pointer}" for pointer in lost_pointers(line)]
    assert lost == []


def test_imports_within_functions_find_their_names() -> None:
    """Type checks read `yatt` alone; of `tests` and `tools` only what runs often would tell."""
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("tools/*.py")]
    lost = [f"{file.relative_to(ROOT)}: {name}" for file in files for name in lost_imports(file.read_text())]
    assert lost == []


def lost_imports(text: str) -> Iterator[str]:
    """Names that are imported of the project, and are not there."""
    for found in IMPORTS.finditer(text):
        for name in re.sub(r"#.*", "", found[2]).strip("()").split(","):
            dotted = f"{found[1]}.{name.split(' as ')[0].strip()}"
            if name.strip() and not is_there(dotted.split(".")):
                yield dotted


def lost_pointers(line: str) -> Iterator[str]:
    """Modules, their public names, and files of the project that are not there."""
    yield from (found[0] for found in FILES.finditer(line) if not (ROOT / found[0]).exists())
    yield from (found[0] for found in DOTTED.finditer(line) if not is_there(found[0].split(".")))


def is_there(parts: list[str]) -> bool:
    """Whether this is a module, or a name in one."""
    path = ROOT
    for number, part in enumerate(parts):
        if (path / part).is_dir():
            path = path / part
            continue
        module = path / f"{part}.py"
        rest = parts[number + 1 :] if module.exists() else parts[number:]
        return not rest or rest[0] in names_of(module if module.exists() else path / "__init__.py")
    return True


@functools.cache
def names_of(module: Path) -> frozenset[str]:
    """What a module defines or imports, in its classes and functions too; words of its texts are none."""
    found = set[str]()
    for node in ast.walk(ast.parse(module.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.alias(asname=str(name)) | ast.alias(name=name):
                found.add(name.partition(".")[0])
    return frozenset(found)


def test_a_lost_import_is_found() -> None:
    assert list(lost_imports("    from yatt.no.such import name\nfrom yatt.cli import main")) == [
        "yatt.no.such.name"
    ]
    text = "if 1:\n    from yatt.obs.metrics import (\n        comparable_results,\n        gone as x,\n    )"
    assert list(lost_imports(text)) == ["yatt.obs.metrics.gone"]
    assert list(lost_imports("from yatt.obs.metrics import comparable_results, gone  # why")) == [
        "yatt.obs.metrics.gone"
    ]


def test_a_lost_pointer_is_found() -> None:
    assert list(lost_pointers("see `yatt.paths.RunPaths`, yatt/paths.py and tests/runs.py")) == []
    line = "see `yatt.paths.Nothing`, `yatt.paths.folder`, yatt.nowhere, `yatt.core.gone.name`, yatt/gone.py"
    line += " and tests/gone.md"
    assert list(lost_pointers(line)) == [
        "yatt/gone.py", "tests/gone.md", "yatt.paths.Nothing", "yatt.paths.folder", "yatt.nowhere",
        "yatt.core.gone.name",
    ]  # fmt: skip
