"""Every block of docs/tutorial.md, in order, in an empty folder, as a reader types them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import LOADED, ROOT, rows

pytestmark = pytest.mark.timeout(1800)

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
BLOCK = re.compile(r"^```(\S*) ?(\S*)\n(.*?)^```$", re.M | re.S)


def test_every_block_of_the_tutorial_works_in_order(tmp_path: Path) -> None:
    binaries = tmp_path / "bin"
    binaries.mkdir()
    yatt = f'#!/bin/sh\nexec "{sys.executable}" -m yatt.cli.main "$@"\n'
    for name, text in (("yatt", yatt), ("python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')):
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)
    folder = tmp_path / "tutorial"
    folder.mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    env["PATH"] = f"{binaries}:{os.environ['PATH']}"
    said = {}
    for kind, name, text in BLOCK.findall(PAGE):
        if name:
            (folder / name).write_text(text)
        for command in text.splitlines() if kind == "sh" else ():
            done = subprocess.run(
                ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, check=False,
                timeout=300 * LOADED,
            )  # fmt: skip
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            assert "Traceback" not in done.stderr
            said[command] = done.stdout
    assert any("reward" in text for command, text in said.items() if command.startswith("yatt show"))
    trained = [row for row in rows(folder / "runs" / "run" / "metrics.jsonl") if "critic/rewards/mean" in row]
    assert len(trained) == 20, "the finished run continued"
    assert (folder / "first.html").is_file() and (folder / "both.html").is_file()
    assert (folder / "model" / "config.json").is_file()
    judged = rows(folder / "runs" / "judged" / "metrics.jsonl")
    assert sum(row.get("genrm/judge/asked", 0) for row in judged) > 0
    assert "finished" in said["python notebook.py"]
