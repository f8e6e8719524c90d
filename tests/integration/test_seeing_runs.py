"""Whole runs of tiny models that take pictures, with vLLM and megatron-core, on verl's files as they are."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet
from safetensors.torch import load_file

from tests.packages import needs
from tests.pictures import write_geometry
from tests.runs import rows, yatt
from tests.tiny_vision import KINDS, make_vision_model, transpose_experts
from tests.unit.adapters.test_judge_api import Service, says
from tests.videos import write_films
from yatt.adapters.inputs.model_family import has_turned_experts

pytestmark = [needs("vllm"), pytest.mark.slow]
NUM_ROWS, MEDIA = 8, {"video": {"max_frames": 6}}
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert extra_info["index"] == int(ground_truth) and data_source == "hiyouga/geometry3k"
    return len(solution_str) % 5 / 5
"""


def live_through(folder: Path, config: dict[str, Any], *, n: int = 1) -> None:
    """Checks a run file, runs it, and evaluates the result on its rows, `n` samples each."""
    file = str(folder / "run.json")
    Path(file).write_text(json.dumps(config))
    evaluation = "eval", config["run"]["dir"], config["data"]["val_files"][0], "--n", str(n), "--json"
    for words in (("check", file), ("run", file), evaluation):
        done = yatt(*words)
        assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["overall"]["rewards"]["length"]["scored"] == NUM_ROWS * n
    metrics = rows(folder / "run" / "metrics.jsonl")
    assert [row["training/global_step"] for row in metrics][-1] == 2
    assert max(row.get("training/rollout_probs_diff_max", 0.0) for row in metrics) < 1e-5


TURNED = "qwen3_vl_moe turned"
"""With experts as transformers saves them, which vLLM cannot load."""


SHOWN = "qwen2_5_vl"
"""With a judge behind a URL that sees."""


def pixels_of(part: dict[str, Any]) -> np.ndarray:
    """The picture in a part of a message, [height, width, 3]."""
    data = base64.b64decode(part["image_url"]["url"].removeprefix("data:image/jpeg;base64,"))
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def check_questions(service: Service, source: Path) -> None:
    """A service has seen the picture of each row that it was asked about, in its place."""
    shown = dict[str, list[np.ndarray]]()
    for _, body, _ in service.got:
        parts = body["messages"][0]["content"]
        assert [part["type"] for part in parts] == ["text", "image_url", "text"], parts
        number = parts[2]["text"].partition("Find x")[2].partition(".")[0]
        shown.setdefault(number, []).append(pixels_of(parts[1]))
    assert shown.keys() == {str(number) for number in range(NUM_ROWS)}
    for row in parquet.read_table(source).to_pylist():
        picture = Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("RGB")
        for found in shown[row["reward_model"]["ground_truth"]]:
            assert found.shape[:2] == picture.size[::-1]
            assert np.abs(found.astype(int) - np.asarray(picture)).mean() < 8


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
    if kind == SHOWN:
        service = Service(lambda number: says(f"score: {number % 3}"))
        config["genrms"] = [
            {"name": "far", "model": "m", "api": {"url": service.url}, "sees": "prompt",
             "template": "See {prompt} {completion}", "verdict": {"pattern": "score: ([0-9])"}}
        ]  # fmt: skip
        try:
            live_through(tmp_path, config)
        finally:
            service.close()
        check_questions(service, file)
        told = [path for path in (tmp_path / "run").rglob("*") if path.suffix in (".jsonl", ".log", ".yaml")]
        assert len(told) > 10 and not [path for path in told if b"/9j/" in path.read_bytes()]
        page = tmp_path / "page.html"
        assert yatt("report", config["run"]["dir"], "--out", str(page)).returncode == 0
        assert page.read_text().count('<img alt="') >= 4
    else:
        live_through(tmp_path, config)
    trained = load_file(next((tmp_path / "run" / "model").glob("*.safetensors")))
    changed = {name for name, tensor in trained.items() if not tensor.equal(source[name])}
    tower = "visual", "vision_tower", "multi_modal_projector"
    fixed = {name for name in source if name.endswith("correction_bias") or any(map(name.count, tower))}
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


def check_views(parts: list[dict[str, Any]]) -> None:
    """Each of two completions has the three pictures of its answers, between what was said about them."""
    pictures = [pixels_of(part) for part in parts if part["type"] == "image_url"]
    assert [each.shape[:2] for each in pictures] == 2 * [(48, 56), (48, 88), (64, 64)]
    for each, red in zip(pictures, 2 * [40, 120, 120], strict=True):
        assert np.abs(each[..., (0, 2)].astype(int) - (red, 90)).max() < 6
    texts = [part["text"] for part in parts if part["type"] == "text"]
    assert len(texts) == 7 and texts[3].count("\n\n[2]\n") == 1 and texts[6][:1] == "."
    assert [text[:5] for text in texts[1:3]] == [". And", " and "], texts
    assert texts[0].endswith("You see ") and texts[1].endswith("Then "), texts


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
    service = Service(lambda number: says(f"score: {number % 3}"))
    config["genrms"] = [
        {"name": "far", "model": "m", "api": {"url": service.url}, "sees": "all",
         "judging": {"by": "listwise"}, "template": "{prompt}: {completions}",
         "verdict": {"pattern": "score: ([0-9])"}, "on_unparsable": "score"}
    ]  # fmt: skip
    try:
        live_through(tmp_path, config, n=2)
    finally:
        service.close()
    for _, body, _ in service.got:
        check_views(body["messages"][0]["content"])
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
