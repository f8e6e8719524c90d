"""Every scenario in this folder gives the trace that is written in it.

`YATT_REWRITE=1 python -m pytest tests/scenarios` writes the traces anew: read the diff and understand it
before you commit it.
"""

import os
from pathlib import Path

import pytest

from tests.scenarios.scripts import PROTOCOLS, played

FILES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_scenario_gives_its_trace(path: Path) -> None:
    text = path.read_text()
    trace = played(text)
    if os.environ.get("YATT_REWRITE"):
        path.write_text(trace)
    assert trace == text or os.environ.get("YATT_REWRITE")


def test_every_protocol_has_a_scenario() -> None:
    first = [next(line for line in f.read_text().splitlines() if line and line[0] != "#") for f in FILES]
    assert {line.split()[0] for line in first} == set(PROTOCOLS)


def test_a_wrong_trace_is_caught() -> None:
    text = FILES[0].read_text()
    line = next(line for line in text.splitlines() if line.startswith("  "))
    assert played(text.replace(line, "  something else", 1)) != text.replace(line, "  something else", 1)
