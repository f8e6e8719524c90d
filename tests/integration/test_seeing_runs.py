"""Whole runs of tiny models that take pictures, with vLLM and megatron-core, on verl's files as they are."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.packages import needs
from tests.pictures import write_geometry
from tests.runs import rows, yatt
from tests.tiny_vision import KINDS, make_vision_model, transpose_experts
from tests.videos import write_films
from yatt.adapters.inputs.model_family import has_turned_experts

pytestmark = [needs("vllm"), pytest.mark.slow, pytest.mark.timeout(900)]
NUM_ROWS, MEDIA = 8, {"video": {"max_frames": 6}}
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert extra_info["index"] == int(ground_truth) and data_source == "hiyouga/geometry3k"
    return len(solution_str) % 5 / 5
"""


def live_through(folder: Path, config: dict[str, Any]) -> None:
    """Checks a run file, runs it, and evaluates the result on its rows."""
    file = str(folder / "run.json")
    Path(file).write_text(json.dumps(config))
    evaluation = "eval", config["run"]["dir"], config["data"]["val_files"][0], "--n", "1", "--json"
    for words in (("check", file), ("run", file), evaluation):
        done = yatt(*words)
        assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["overall"]["rewards"]["length"]["scored"] == NUM_ROWS
    metrics = rows(folder / "run" / "metrics.jsonl")
    assert [row["training/global_step"] for row in metrics][-1] == 2
    assert max(row.get("training/rollout_probs_diff_max", 0.0) for row in metrics) < 1e-5


TURNED = "qwen3_vl_moe turned"
"""With experts as transformers saves them, which vLLM cannot load."""


@pytest.mark.parametrize("kind", [*KINDS, TURNED])
def test_a_file_of_verl_is_checked_run_and_evaluated(tmp_path: Path, kind: str) -> None:
    """A whole run: each part has its own tests, and this is the first time that they meet. Of Qwen3-VL, with
    videos: files and lists of frames."""
    policy = Path(make_vision_model(tmp_path / "policy", kind.split()[0]))
    source = load_file(policy / "model.safetensors")
    if kind == TURNED:
        transpose_experts(policy / "model.safetensors")
        assert has_turned_experts(str(policy))
    write = write_films if kind == "qwen3_vl" else write_geometry
    file = write(tmp_path / "train.parquet", rows=NUM_ROWS)
    (tmp_path / "reward.py").write_text(REWARD)
    config = {
        "run": {"dir": str(tmp_path / "run")}, "model": {"path": str(policy), "dtype": "float32"},
        "data": {"train_files": [str(file)], "val_files": [str(file)], "max_prompt_tokens": 160},
        "rewards": [{"name": "length", "path": str(tmp_path / "reward.py")}], "media": MEDIA,
        "rollout": {
            "engine": "vllm", "n": 2, "max_response_tokens": 6, "kv_cache_bytes": 32 << 20,
            "enforce_eager": True, "max_num_seqs": 16,
        },
        "trainer": {"total_iterations": 2, "train_batch_size": 4, "mini_batch_size": 4},
        "algorithm": {"kl_in": "loss", "kl_coef": 0.01},
        "validation": {"reward": "length", "every": 2, "n": 1},
        "optimizer": {"lr": 1e-3}, "launch": {"nodes": 1, "gpus_per_node": 1, "device": "cpu"},
    }  # fmt: skip
    live_through(tmp_path, config)
    trained = load_file(next((tmp_path / "run" / "model").glob("*.safetensors")))
    changed = {name for name, tensor in trained.items() if not tensor.equal(source[name])}
    fixed = {name for name in source if "visual" in name or name.endswith("correction_bias")}
    assert changed == source.keys() - fixed, "the tower is frozen"
    samples = [row for row in rows(tmp_path / "run" / "samples.jsonl") if row["kind"] == "sample"]
    assert samples and not any(row["failed"] for row in samples)
    assert {len(row["media"]) for row in samples} <= {1, 2}, "a video is named once"


MAZE = """
import io
from PIL import Image

def step(text, episode):
    number = len(episode.turns)
    if number > 3:
        return None
    view = Image.new("RGB", (40 + 16 * number, 48), (40 * number, len(text) % 200, 90))
    if number == 1:
        return {"text": "You see <image>. And?", "images": [view]}
    file = io.BytesIO()
    view.save(file, "BMP")
    return {"text": "Then <image> and <image>.", "images": [file.getvalue(), view.resize((64, 64))]}
"""


def test_an_environment_answers_with_pictures_that_are_learnt_from(tmp_path: Path) -> None:
    """A whole run: prompts of text whose answers have pictures, from sampling to a save and an evaluation."""
    policy = Path(make_vision_model(tmp_path / "policy", "qwen3_vl"))
    rows_of_text = [
        {"prompt": [{"role": "user", "content": f"Find the way out of maze {n}."}],
         "extra_info": {"index": n}, "data_source": "hiyouga/geometry3k",
         "reward_model": {"ground_truth": str(n)}}
        for n in range(NUM_ROWS)
    ]  # fmt: skip
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows_of_text))
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "maze.py").write_text(MAZE)
    config = {
        "run": {"dir": str(tmp_path / "run")}, "model": {"path": str(policy), "dtype": "float32"},
        "data": {"train_files": [str(file)], "val_files": [str(file)], "max_prompt_tokens": 96},
        "rewards": [{"name": "length", "path": str(tmp_path / "reward.py")}],
        "environment": {"path": str(tmp_path / "maze.py"), "images": True, "max_turns": 3},
        "rollout": {
            "engine": "vllm", "n": 2, "max_response_tokens": 200, "kv_cache_bytes": 32 << 20,
            "enforce_eager": True, "max_num_seqs": 16, "stop": ["a", "e", "t"],
        },
        "trainer": {"total_iterations": 2, "train_batch_size": 4, "mini_batch_size": 4},
        "validation": {"reward": "length", "every": 2, "n": 1},
        "optimizer": {"lr": 1e-3}, "launch": {"nodes": 1, "gpus_per_node": 1, "device": "cpu"},
    }  # fmt: skip
    live_through(tmp_path, config)
    samples = [row for row in rows(tmp_path / "run" / "samples.jsonl") if row["kind"] == "sample"]
    assert {len(row["media"]) for row in samples} == {1 + 2} and not any(row["failed"] for row in samples)
    kept = {path.name for path in (tmp_path / "run.data" / "media").rglob("*") if path.is_file()}
    assert {name for row in samples for name in row["media"]} <= kept


def test_an_environment_whose_pictures_nobody_expects_is_refused_before_the_start(tmp_path: Path) -> None:
    """Each of its samples would fail."""
    policy = make_vision_model(tmp_path / "policy", "qwen3_vl")
    file = tmp_path / "train.jsonl"
    file.write_text(
        json.dumps({"prompt": "Find the way out.", "extra_info": {"index": 0}, "answer": "1"}) + "\n"
    )
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "maze.py").write_text(MAZE)
    config = {
        "run": {"dir": str(tmp_path / "run")}, "model": {"path": policy, "dtype": "float32"},
        "data": {"train_files": [str(file)], "max_prompt_tokens": 96, "ground_truth_key": "answer"},
        "rewards": [{"name": "length", "path": str(tmp_path / "reward.py"), "trial": False}],
        "environment": {"path": str(tmp_path / "maze.py")}, "optimizer": {"lr": 1e-3},
        "trainer": {"total_iterations": 2, "train_batch_size": 4, "mini_batch_size": 4},
        "launch": {"nodes": 1, "gpus_per_node": 1, "device": "cpu"},
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(config))
    checked = yatt("check", str(tmp_path / "run.json"))
    assert checked.returncode == 2
    assert "its answer has images; write environment.images: true" in checked.stdout + checked.stderr
    file = tmp_path / "policy" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    blind = settings["chat_template"].replace("part['type'] == 'image'", "part['type'] == 'nothing'")
    file.write_text(json.dumps(settings | {"chat_template": blind}))
    config["environment"] |= {"images": True}
    (tmp_path / "run.json").write_text(json.dumps(config))
    checked = yatt("check", str(tmp_path / "run.json"))
    assert checked.returncode == 2
    assert "shows no picture in a message of the role user" in checked.stdout + checked.stderr
