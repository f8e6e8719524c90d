"""A whole run on the real GSM8K by its commented run file: data, sampling, rule, validation, checkpoints."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.packages import needs
from tests.runs import ROOT, environment, run_to_end

LIMIT_S = 420

pytestmark = [needs("megatron"), pytest.mark.slow]


def gsm8k() -> Path:
    """$YATT_GSM8K, else shared/data/gsm8k beside the repository."""
    folder = Path(os.environ.get("YATT_GSM8K") or ROOT.parent / "shared" / "data" / "gsm8k")
    if not (folder / "train.jsonl").is_file() or not (folder / "test.jsonl").is_file():
        pytest.skip(
            f"GSM8K is not in {folder}: set YATT_GSM8K to a folder with its train.jsonl and test.jsonl"
        )
    return folder


def call(*argv: object) -> None:
    done = run_to_end([sys.executable, *map(str, argv)], env=environment(), timeout_s=LIMIT_S, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_a_whole_run_by_its_commented_file(tmp_path):
    """A whole run by the file that people copy. One test: with others in between, each would make it anew."""
    run = whole_run(gsm8k(), tmp_path)
    check_every_iteration_has_its_row(run)
    check_held_out_prompts_are_scored_before_during_and_after(run)
    check_checkpoints_are_committed_and_whole(run)
    check_samples_show_real_questions_with_their_whole_answers(run)


def whole_run(data: Path, folder: Path) -> Path:
    call("tools/tiny_model.py", folder / "model", data / "test.jsonl")
    call(
        "-m", "yatt.cli.main", "run", "configs/gsm8k.yaml", f"run.dir={folder / 'run'}",
        f"model.path={folder / 'model'}", f"data.train_files=[{data / 'train.jsonl'}]",
        f"data.val_files=[{data / 'test.jsonl'}]", "launch.device=cpu",
    )  # fmt: skip
    return folder / "run"


def check_every_iteration_has_its_row(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["training/global_step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert row["rollout/groups"] == 8
        assert row["training/rollout_probs_diff_max"] < 1e-3
        assert 0.0 <= row["critic/score/correct/mean"] <= 1.0
        assert row["response_length/max"] <= 64
        assert row["timing_s/step"] > 0


def check_held_out_prompts_are_scored_before_during_and_after(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    key = "val-core/openai/gsm8k/correct/mean@1"
    assert [row["training/global_step"] for row in rows if key in row] == [0, 2, 3]
    assert all(0.0 <= row[key] <= 1.0 for row in rows if key in row)


def check_checkpoints_are_committed_and_whole(run):
    store = run / "checkpoints"
    manifests = sorted((store / "manifests").glob("*.json"))
    assert [path.name for path in manifests] == ["00000002.000001.json", "00000003.000001.json"]
    for path in manifests:
        manifest = json.loads(path.read_text())
        assert manifest["files"]
        for file in manifest["files"]:
            assert (store / file["path"]).stat().st_size == file["size_bytes"]
    assert (store / "latest_checkpointed_iteration.txt").read_text().strip() == "3"


def check_samples_show_real_questions_with_their_whole_answers(run):
    shown = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert shown and all("####" in row["ground_truth"] for row in shown)
