"""An engine that cannot be built: its own exception on the terminal after two tries, no further start."""

import json
from pathlib import Path

import pytest

from tests.runs import RunFile, living, rows, yatt
from tests.tiny_models import make_qwen3
from yatt.adapters.run_folder.ledger import ENDED, record_of_attempt
from yatt.paths import RunPaths

pytestmark = pytest.mark.slow


def test_a_judge_that_the_engine_does_not_know_ends_the_run_at_its_second_try(tmp_path: Path) -> None:
    judge = tmp_path / "judge"
    make_qwen3(judge, tied=True)
    values = json.loads((judge / "config.json").read_text())
    values |= {"model_type": "qwen7", "architectures": ["Qwen7ForCausalLM"]}
    (judge / "config.json").write_text(json.dumps(values))
    section = {
        "name": "judge", "model": str(judge), "template": "{completion}", "engine": "transformers",
        "max_model_tokens": 256, "max_tokens": 4, "verdict": {"pattern": "(.)", "scores": {"a": 1.0}},
    }  # fmt: skip
    run = RunFile(tmp_path, {"launch": {"nodes": 1}, "genrms": [section]})
    done = yatt("run", str(run.write()), timeout_s=120)
    assert done.returncode == 93, done.stdout + done.stderr
    (told,) = [line for line in done.stdout.splitlines() if line.startswith("attempt 1 ended")]
    assert (
        "genrm-judge-n0s0: ValueError: The checkpoint you are trying to load has model type `qwen7`" in told
    )
    assert "(twice, before its first use)" in told and "SIGKILL" not in told
    assert "genrm-judge-n0s0.1 failed: ValueError: The checkpoint" in done.stdout
    events = rows(run.run_dir / "events.jsonl")
    assert sum(event["kind"] == "worker.failed" for event in events) == 2
    ended = record_of_attempt(RunPaths(run.run_dir), 1, ENDED)
    assert ended["exit_code"] == 93 and "model type `qwen7`" in ended["reason"]
    assert not (run.run_dir / "attempts" / "000002").exists()
    assert living(run.run_dir) == {}
