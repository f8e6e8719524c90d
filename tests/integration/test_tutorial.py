"""Every block of docs/tutorial.md, in order, in an empty folder, as a reader types them."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.runs import LOADED, ROOT, command, environment, rows, run_to_end

pytestmark = pytest.mark.timeout(1800)

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
BLOCK = re.compile(r"^```(\S*) ?(\S*)\n(.*?)^```$", re.M | re.S)


def test_every_block_of_the_tutorial_works_in_order(tmp_path: Path) -> None:
    said = {}
    for kind, name, text in BLOCK.findall(PAGE):
        if name:
            (tmp_path / name).write_text(text)
        for line in text.splitlines() if kind == "sh" else ():
            program, *words = shlex.split(line)
            argv = {"yatt": command(*words), "python": [sys.executable, *words]}[program]
            done = run_to_end(argv, env=environment(), cwd=tmp_path, timeout_s=300 * LOADED)
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            assert "Traceback" not in done.stderr
            said[line] = done.stdout
    (printed,) = (text for line, text in said.items() if line == "yatt run run.yaml small.yaml")
    assert printed.count("    completion: ") == 3, "of iterations 20, 40 and 60"
    assert any("reward" in text for command, text in said.items() if command.startswith("yatt show"))
    trained = [
        row for row in rows(tmp_path / "runs" / "run" / "metrics.jsonl") if "critic/rewards/mean" in row
    ]
    assert len(trained) == 70, "the finished run continued"
    rewards = [row["critic/rewards/mean"] for row in trained]
    assert sum(rewards[50:60]) / 10 > sum(rewards[:10]) / 10 + 0.2, "a reader sees that it learns"
    assert (tmp_path / "first.html").is_file() and (tmp_path / "both.html").is_file()
    assert (tmp_path / "model" / "config.json").is_file()
    judged = rows(tmp_path / "runs" / "judged" / "metrics.jsonl")
    assert sum(row.get("genrm/judge/asked", 0) for row in judged) > 0
    assert "finished" in said["python notebook.py"]
