"""A run with a trained scalar reward model beside a text judge: its killed engine changes no score."""

from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_lost_samples import events, finish
from tests.faults.test_resume_exact import final_state, metrics
from tests.reward_models import make_reward_model
from tests.runs import RunFile, kill, living, rows, start, wait_for, yatt
from tests.tiny_models import make_scripted_model

pytestmark = [pytest.mark.faults, pytest.mark.slow]


def run_file(folder: Path, scalar: str, **changes: Any) -> RunFile:
    judge = make_scripted_model(folder / "judge", mean_tokens=3)
    (Path(judge) / "model.safetensors").write_bytes(b"")
    text = {
        "name": "words", "model": judge, "engine": "scripted", "template": "{completion}",
        "max_model_tokens": 64, "max_tokens": 6,
        "verdict": {"pattern": "([a-z])", "scores": {"a": 1.0}}, "on_unparsable": "score",
    }  # fmt: skip
    number = {
        "name": "number", "model": scalar, "kind": "scalar", "engine": "transformers", "dtype": "float32",
        "chat": True, "max_model_tokens": 128, "transform": "standardize", **changes,
    }  # fmt: skip
    return RunFile(folder, {
        "launch": {"nodes": 1, "gpus_per_node": 2},
        "genrms": [text, number],
        "trainer": {"total_iterations": 5},
    })  # fmt: skip


def test_a_killed_engine_of_a_scalar_model_changes_no_score(tmp_path: Path) -> None:
    """A whole run: role, leases, kills and scores of a second kind of GenRM meet nowhere else."""
    scalar = make_reward_model(tmp_path / "scalar", steps=15)
    calm, disturbed = (run_file(tmp_path / name, scalar) for name in ("calm", "disturbed"))
    done = yatt("run", str(calm.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    process = start("run", str(disturbed.write()))

    def hit() -> bool:
        begun = [e for e in events(disturbed, "worker.start") if e["worker"].startswith("genrm-number")]
        return (
            bool(begun)
            and living(disturbed.run_dir).get(begun[-1]["pid"]) == "yatt.genrm"
            and kill(begun[-1]["pid"])
        )

    wait_for(hit, timeout_s=60, what="the engine of the scalar model")
    finish(process)
    assert metrics(disturbed) == metrics(calm)
    assert final_state(disturbed) == final_state(calm)
    means = [row["critic/score/number/mean"] for row in rows(calm.run_dir / "metrics.jsonl")]
    assert len(means) == 5 and max(map(abs, means)) < 1e-6, "standardized in each group"
