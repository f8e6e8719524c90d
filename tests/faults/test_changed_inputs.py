"""A run whose functions, models or held-out rows are others when it is resumed: told, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runs import RunFile, rows, yatt
from yatt.obs.metrics import CHANGED_INPUTS

pytestmark = pytest.mark.faults

HELPER = "WEIGHT = 1\n"
REWARD = """
import helper

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return helper.WEIGHT * sum(c in "abcdefghijklm" for c in solution_str) / 8
"""


def resumed(run: RunFile, *words: str) -> tuple[int, str]:
    done = yatt("resume", str(run.run_dir), *words)
    return done.returncode, done.stdout + done.stderr


def status(run: RunFile) -> dict[str, Any]:
    done = yatt("status", str(run.run_dir), "--json")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_changed_inputs_are_refused_or_told_once(tmp_path: Path) -> None:
    """A whole run: its launcher, its leader and its checkpoints have to agree on what was there before."""
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "helper.py").write_text(HELPER)
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text('{"prompt": "1 plus 1 is"}\n')
    run = RunFile(
        tmp_path,
        {
            "run": {"deterministic": False}, "launch": {"nodes": 1}, "model": {"trainer": "scripted"},
            "data": {"val_files": [str(held_out)]}, "validation": {"every": 1, "reward": "digits"},
            "trainer": {"total_iterations": 2},
        },
    )  # fmt: skip
    assert yatt("run", str(run.write())).returncode == 0
    before = status(run)["inputs"]
    assert {"tokenizer", "chat_template", "weights", "data.val_files", "rewards[digits]"} <= before.keys()

    for file, name in ((tmp_path / "policy/tokenizer.json", "the tokenizer"), (held_out, "data.val_files")):
        old = file.read_bytes()
        file.write_bytes(old + b"\n")
        code, said = resumed(run, "trainer.total_iterations=3")
        assert code == 2, said
        assert f"not what they were when this run wrote its last checkpoint: {name}" in said
        assert "run.accept_changed=" in said
        file.write_bytes(old)
    assert not (run.run_dir / "attempts/000002").exists(), "nothing was started"

    (tmp_path / "helper.py").write_text("WEIGHT = -1\n")
    held_out.write_text('{"prompt": "1 plus 2 is"}\n')
    accepted = "run.accept_changed=[data.val_files]"
    code, said = resumed(run, "trainer.total_iterations=3", accepted)
    assert code == 0, said
    assert "not what they were at iteration 2: data.val_files, rewards[digits]. The run goes on" in said
    now = status(run)["inputs"]
    changed = {name for name in before if now[name] != before[name]}
    assert changed == {"rewards[digits]", "data.val_files"}
    resumes = [e for e in rows(run.run_dir / "events.jsonl") if e["kind"] == "attempt.resume"]
    assert [sorted(e.get("changed", ())) for e in resumes] == [[], sorted(changed)]
    marks = [row.get(CHANGED_INPUTS, 0) for row in rows(run.run_dir / "metrics.jsonl")]
    assert marks == [0, 0, 0, 2], "in the first row that was made with them"

    code, said = resumed(run, "trainer.total_iterations=4")
    assert code == 0, said
    assert "not what they were" not in said, "the checkpoint was made with them"

    for record in (run.run_dir / "attempts").glob("*/*.json"):
        record.unlink()
    tokenizer = tmp_path / "policy/tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes() + b"\n")
    code, said = resumed(run, "trainer.total_iterations=5", "run.accept_changed=[]")
    assert code == 2, said
    assert "not what they were when this run wrote its last checkpoint: the tokenizer" in said, (
        "by the manifest"
    )
