"""Two teachers by data source teach a student without rewards; the killed engine of one changes nothing."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.faults.test_lost_samples import events, finish
from tests.faults.test_resume_exact import final_state, metrics
from tests.runs import NUM_PROMPTS, RunFile, kill, living, rows, start, wait_for, yatt
from tests.tiny_models import make_qwen3

pytestmark = [pytest.mark.faults, pytest.mark.slow]

SOURCES = ("sum", "word")
ITERATIONS = 12


def run_file(folder: Path, teachers: dict[str, str], **more: Any) -> RunFile:
    """The student differs from both teachers; each prompt says by its words whose it is."""
    folder.mkdir(parents=True)
    data = [{"prompt": f"{SOURCES[i % 2]} {i} is", "data_source": SOURCES[i % 2]} for i in range(NUM_PROMPTS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    make_qwen3(folder / "policy", tied=False, seed=3, head=0.3)
    sections: list[dict[str, Any]] = [
        {
            "name": name, "model": model, "kind": "teacher", "engine": "transformers", "dtype": "float32",
            "max_model_tokens": 64, "data_sources": [name], **more,
        }
        for name, model in teachers.items()
    ]  # fmt: skip
    return RunFile(folder, {
        "launch": {"nodes": 1, "gpus_per_node": 2},
        "rewards": [],
        "genrms": sections,
        "rollout": {"engine": "transformers", "n": 4, "max_response_tokens": 12},
        "optimizer": {"lr": 3e-3},
        "trainer": {"total_iterations": ITERATIONS},
    })  # fmt: skip


def test_a_student_comes_near_its_teachers_without_a_reward(tmp_path: Path) -> None:
    """A whole run: requests that are only scored, rewards of tokens and the update meet nowhere else."""
    found = calm_and_disturbed(tmp_path)
    for name in SOURCES:
        key = f"critic/score/{name}/mean"  # absent where no prompt of a batch is its
        gaps = [-row[key] for row in found if key in row]
        assert fmean(gaps[-3:]) < 0.8 * fmean(gaps[:3]), "mean log-prob less the teacher's, in nats"
    assert all(row["critic/rewards/max"] == row["critic/rewards/min"] == 0.0 for row in found)
    assert not any(key.startswith("distill/") for row in found for key in row)


def test_a_student_comes_near_its_teachers_by_a_loss_alone(tmp_path: Path) -> None:
    """A whole run: the teachers' likeliest tokens pass through engine, controller, kept groups and ranks, and
    the loss that is made of them is all that is learned."""
    found = calm_and_disturbed(tmp_path, kills_trainer=True, top_k=12, coef=2.0)
    divergences = [row["distill/kl"] for row in found]
    assert fmean(divergences[-3:]) < 0.8 * fmean(divergences[:3]), "in nats"
    assert all(0.1 < row["distill/mass_top_k"] < 1.0 for row in found)
    for row in found:
        assert row["actor/pg_loss"] == row["critic/advantages/max"] == row["critic/advantages/min"] == 0.0
        assert row["actor/grad_norm"] > 0 and {f"critic/score/{name}/mean" for name in SOURCES} & row.keys()


def calm_and_disturbed(folder: Path, *, kills_trainer: bool = False, **more: Any) -> list[dict[str, Any]]:
    """Runs twice, once with the engine of a teacher killed: neither metrics nor the final state may differ.
    Returns the rows of metrics.

    Args:
        kills_trainer: kills a trainer rank later, so that another attempt goes on.
    """
    teachers = {
        name: make_qwen3(folder / name, tied=False, seed=seed, head=0.3)
        for seed, name in enumerate(SOURCES, 1)
    }
    calm, disturbed = (run_file(folder / name, teachers, **more) for name in ("calm", "disturbed"))
    done = yatt("run", str(calm.write()))
    assert done.returncode == 0, done.stdout + done.stderr
    process = start("run", str(disturbed.write()))

    def num_trained() -> int:
        file = disturbed.run_dir / "metrics.jsonl"
        return len(rows(file)) if file.is_file() else 0

    def hit() -> bool:
        begun = [e for e in events(disturbed, "worker.start") if e["worker"].startswith("genrm-word")]
        pid = begun[-1]["pid"] if begun and num_trained() else 0
        return living(disturbed.run_dir).get(pid) == "yatt.genrm" and kill(pid)

    def hit_trainer() -> bool:
        pids = [pid for pid, name in living(disturbed.run_dir).items() if name == "yatt.trainer"]
        return bool(num_trained() > 3 and pids) and kill(pids[0])

    wait_for(hit, timeout_s=60, what="a teacher's engine")
    if kills_trainer:
        wait_for(hit_trainer, timeout_s=60, what="a trainer rank")
    finish(process)
    assert metrics(disturbed) == metrics(calm)
    assert final_state(disturbed) == final_state(calm)
    return rows(calm.run_dir / "metrics.jsonl")
