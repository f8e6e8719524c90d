"""Benchmarks of cases: each case has a process of its own, and its row is written as soon as it is measured.

    python -m tests.gpu.MODULE [--toy] [--only CASE ...] [--call-s 540] --out FOLDER

The process that starts the cases imports no torch: its CUDA context would be a stranger to the memory check
of a run, and its memory would be missing to an engine. Models are made in a process of their own too. A
benchmark ends within `--call-s`; the same command continues with the cases that are left out or failed.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from tests.forked.lots import as_remembered
from tests.gpu.shapes import device_name
from tests.runs import popen

CALL_S = 540.0
"""Seconds of a benchmark, so that a call of ten minutes also holds the start of the machine's Python."""
LEAST_S = 20.0
"""With less time left, no further case begins."""
END_S = 20.0
SHOWN_BYTES = 3000
CASE_MEMORY = "CASE_MEMORY"
"""Variable with a folder in memory that is removed when the case's process has ended, however that ends."""
MARK = "ROW "
FALLBACKS = ("runs sequence by sequence", "computed one by one", "could not be registered with CUDA")
"""Texts of yatt's warnings that a fast path does not work here, so that a figure is one of the slow path."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a case finds its models and leaves its files.

    Args:
        work: folder on disk, and `memory` one in memory; all cases of one call share them.
        out: folder of the figures.
    """

    work: Path
    memory: Path
    out: Path
    is_toy: bool

    def model(self, shape: str) -> Path:
        """Folder of the random model of this shape."""
        return self.work / shape


@dataclass(frozen=True)
class Case:
    """Settings of a measurement.

    Args:
        shape: name of the shape whose model is made before; empty if none is needed.
    """

    name: str
    settings: Row = field(default_factory=dict)
    shape: str = ""
    limit_s: float = 180.0


@dataclass(frozen=True)
class Benchmark:
    """Cases and their measurement.

    Args:
        name: of the file of figures.
        cases: gives the cases, most valuable first; its argument: whether sizes are the smallest ones.
        measure: measures a case in this process; a row with `failed` says what is wrong.
        summary: figures that compare rows; its argument maps names of cases to whole rows.
    """

    name: str
    text: str
    cases: Callable[[bool], list[Case]]
    measure: Callable[[Row, Place], Row]
    summary: Callable[[dict[str, Row]], Row] | None = None

    def main(self) -> None:
        """Runs the benchmark, or one case of it, with the arguments of the command line."""
        parser = _parser(self.text)
        given = parser.parse_args()
        signal.signal(signal.SIGTERM, _exit)  # so that `finally` and `atexit` have their effect
        if given.case is not None:
            place = Place(given.work, given.memory, given.out, given.toy)
            print(MARK + json.dumps(self.measure(json.loads(given.case), place)), flush=True)
            return
        cases = {case.name: case for case in self.cases(given.toy)}
        for name in given.only:
            if name not in cases:
                parser.error(f"no case '{name}'; cases: {', '.join(cases)}")
        sys.exit(self._measure_all([cases[name] for name in given.only or cases], given))

    def _measure_all(self, cases: list[Case], given: argparse.Namespace) -> int:
        """Measures the cases that have no figures yet; returns the exit code."""
        until_s = time.monotonic() + given.call_s
        figures = Figures(given.out / f"{self.name}.json", is_toy=given.toy)
        with _folders(given) as place:
            for case in cases:
                if not figures.has(case.name):
                    figures.add(case.name, {**case.settings, **_measured(self.name, case, place, until_s)})
        if self.summary is not None and (whole := self.summary(figures.whole())):
            figures.add("summary", whole)
        return figures.verdict([case.name for case in cases])


class Figures:
    """The rows of a benchmark in a JSON file, which is whole after each row.

    Rows of an earlier call in the same file stay, if they are of the same device and sizes. Else that file
    gets another name: a figure of a GPU may be the only one that there will be.
    """

    def __init__(self, file: Path, *, is_toy: bool) -> None:
        self._file, self._head = file, {"device": device_name(), "is_toy": is_toy}
        self._rows: dict[str, Row] = {}
        found = _read(file)
        if found is not None and {name: found.get(name) for name in self._head} == self._head:
            self._rows = {row["case"]: row for row in found["rows"]}
        elif file.exists():
            print(f"{file.name} is of another device or size; it is {_set_aside(file)} now", flush=True)

    def has(self, name: str) -> bool:
        """Whether this case was measured."""
        return name in self.whole()

    def whole(self) -> dict[str, Row]:
        """Rows of the cases that were measured."""
        return {name: row for name, row in self._rows.items() if not row.keys() & {"failed", "left_out"}}

    def add(self, name: str, row: Row) -> None:
        """Shows a row and writes all rows."""
        self._rows[name] = {"case": name, **row}
        print(self._file.stem, json.dumps(self._rows[name])[:SHOWN_BYTES], flush=True)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps({**self._head, "rows": list(self._rows.values())}, indent=1))
        os.replace(partial, self._file)

    def verdict(self, names: list[str]) -> int:
        """Says which cases have no figures; returns the exit code."""
        for why in ("failed", "left_out"):
            if those := [name for name in names if why in self._rows.get(name, {})]:
                print(f"{why}: {', '.join(those)}; the same command measures them again", flush=True)
        return int(any(not self.has(name) for name in names))


def _read(file: Path) -> Row | None:
    """Figures of an earlier call; None if there are none, or the file is damaged."""
    try:
        found: Row = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found


def _set_aside(file: Path) -> str:
    """Gives a file a name that is free, and returns it."""
    names = (file.with_suffix(f".{number}{file.suffix}") for number in itertools.count(1))
    free = next(name for name in names if not name.exists())
    return file.rename(free).name


def run_in_process(module: str, words: list[str], log: Path, limit_s: float) -> Row:
    """Runs a module of this package in a process of its own; returns the last row that it printed, or why
    there is none."""
    log.parent.mkdir(parents=True, exist_ok=True)
    argv, quiet = [sys.executable, "-m", module, *words], {"PYTHONWARNINGS": "ignore"}
    with log.open("wb") as output, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        process = popen(
            argv,
            env={**as_remembered(os.environ), **quiet, CASE_MEMORY: memory},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(process)
    said = log.read_text(errors="replace")
    if code is None:
        return {"failed": f"not done after {limit_s:.0f} s", "said": said[-SHOWN_BYTES:]}
    printed = [line.removeprefix(MARK) for line in said.splitlines() if line.startswith(MARK)]
    if code or not printed:
        return {"failed": f"exit code {code}", "said": said[-SHOWN_BYTES:]}
    row: Row = json.loads(printed[-1])
    warned = [line for line in said.splitlines() if any(text in line for text in FALLBACKS)]
    return {**row, "warned": warned} if warned else row


def words_of(settings: Row, place: Place) -> list[str]:
    """Arguments with which a benchmark's module measures one case."""
    folders = ["--work", str(place.work), "--memory", str(place.memory), "--out", str(place.out)]
    return ["--case", json.dumps(settings), *folders, *(["--toy"] if place.is_toy else [])]


def _measured(benchmark: str, case: Case, place: Place, until_s: float) -> Row:
    """Makes the case's model if it is missing, and measures the case."""
    assert "torch" not in sys.modules, "this process could have a CUDA context"
    log = place.out / "logs" / f"{benchmark} {case.name}.log".replace(" ", "-")
    began_s = time.monotonic()
    if until_s - began_s < LEAST_S:
        return {"left_out": "no time left"}
    row: Row = {}
    if case.shape and not place.model(case.shape).exists():
        words = [case.shape, str(place.model(case.shape))]
        row = run_in_process("tests.gpu.shapes", words, log, until_s - began_s)
    if "failed" not in row:
        left_s = max(0.0, until_s - time.monotonic())
        module = sys.modules["__main__"].__spec__
        assert module is not None, "benchmarks are started by `python -m`"
        row = run_in_process(module.name, words_of(case.settings, place), log, min(case.limit_s, left_s))
    return {**row, "whole_s": round(time.monotonic() - began_s, 1)}


def _end_group(process: "subprocess.Popen[Any]") -> None:
    """Ends what is left of a process and its children."""
    for number, limit_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limit_s)


def _exit(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


@contextlib.contextmanager
def _folders(given: argparse.Namespace) -> Iterator[Place]:
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        yield Place(Path(work), Path(memory), given.out.resolve(), given.toy)


def _parser(text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=text.split("\n")[0])
    parser.add_argument("--toy", action="store_true", help="smallest sizes, on whatever device there is")
    parser.add_argument("--only", nargs="+", default=[], help="names of cases")
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures, as JSON")
    parser.add_argument("--call-s", type=float, default=CALL_S, help="seconds of all cases together")
    for name in ("--case", "--work", "--memory"):
        parser.add_argument(name, type=None if name == "--case" else Path, help=argparse.SUPPRESS)
    return parser
