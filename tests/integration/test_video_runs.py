"""Whole runs of a tiny Qwen3-VL on rows with videos, as verl's files have them."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from safetensors.torch import load_file

from tests.integration.test_seeing_runs import NUM_ROWS, REWARD, live_through
from tests.packages import needs
from tests.runs import rows, yatt
from tests.tiny_vision import make_vision_model
from tests.videos import encoded_frames, encoded_video, frames_of

pytestmark = [needs("vllm"), pytest.mark.slow, pytest.mark.timeout(900)]


def write_films(path: Path) -> Path:
    """A parquet file as verl's preprocessing writes it: bytes of a file, or of frames; one row has a picture,
    too."""
    written = []
    for number in range(NUM_ROWS):
        frames = frames_of(9 + number, 64, 48, seed=number)
        listed = [{"bytes": data, "path": None} for data in encoded_frames(frames[:5])]
        is_file = number % 2 == 0
        film = {
            "bytes": encoded_video(frames, 4.0) if is_file else None, "path": None,
            "video": None if is_file else listed, "fps": None if is_file else 4.0,
        }  # fmt: skip
        has_picture = number == 3
        images = [{"bytes": encoded_frames(frames[:1])[0], "path": None}] if has_picture else []
        text = "<video>What moves" + (" unlike <image>?" if has_picture else "?")
        written.append({
            "data_source": "hiyouga/geometry3k", "prompt": [{"role": "user", "content": text}],
            "videos": [film], "images": images, "ability": "video",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"split": "train", "index": number, "answer": str(number)},
        })  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist(written), path, row_group_size=3)
    return path


def config_of(folder: Path, policy: str, file: Path, **more: Any) -> dict[str, Any]:
    (folder / "reward.py").write_text(REWARD)
    return {
        "run": {"dir": str(folder / "run")}, "model": {"path": policy, "dtype": "float32"},
        "data": {"train_files": [str(file)], "val_files": [str(file)], "max_prompt_tokens": 160},
        "rewards": [{"name": "length", "path": str(folder / "reward.py")}],
        "rollout": {
            "engine": "vllm", "n": 2, "max_response_tokens": 6, "kv_cache_bytes": 32 << 20,
            "enforce_eager": True, "max_num_seqs": 16,
        },
        "trainer": {"total_iterations": 2, "train_batch_size": 4, "mini_batch_size": 4},
        "media": {"video": {"max_frames": 6}}, "validation": {"reward": "length", "every": 2, "n": 1},
        "optimizer": {"lr": 1e-3}, "launch": {"nodes": 1, "gpus_per_node": 1, "device": "cpu"}, **more,
    }  # fmt: skip


def test_a_file_of_verl_with_videos_is_checked_run_and_evaluated(tmp_path: Path) -> None:
    """A whole run: each part has its own tests, and this is the first time that they meet."""
    policy = make_vision_model(tmp_path / "policy", "qwen3_vl")
    file = write_films(tmp_path / "train.parquet")
    live_through(tmp_path, config_of(tmp_path, policy, file, vision={"train": "all"}))
    source = load_file(Path(policy, "model.safetensors"))
    trained = load_file(next((tmp_path / "run" / "model").glob("*.safetensors")))
    same = {name for name in source if trained[name].equal(source[name])}
    assert not same, "all of it has learned"
    samples = [row for row in rows(tmp_path / "run" / "samples.jsonl") if row["kind"] == "sample"]
    assert samples and not any(row["failed"] for row in samples)
    assert {len(row["media"]) for row in samples} <= {1, 2}, "each video is named once"


def test_who_takes_no_videos_refuses_them_before_the_start(tmp_path: Path) -> None:
    """Another family, and a GenRM that is to see: in one sentence each."""
    file = write_films(tmp_path / "train.parquet")
    other = make_vision_model(tmp_path / "other", "qwen2_5_vl")
    (tmp_path / "run.json").write_text(json.dumps(config_of(tmp_path, other, file)))
    done = yatt("check", str(tmp_path / "run.json"))
    says = done.stdout + done.stderr
    assert done.returncode == 2 and "Traceback" not in says
    assert "row 1: column 'videos' has videos; model.path: " in says and "qwen3_vl_moe" in says
    policy = make_vision_model(tmp_path / "policy", "qwen3_vl")
    judge = {
        "name": "judge", "model": policy, "sees": "prompt", "template": "{media} Is {completion} right?",
        "engine": "vllm", "verdict": {"minimum": 0, "maximum": 1}, "kv_cache_bytes": 32 << 20,
        "max_tokens": 4,
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(config_of(tmp_path, policy, file, genrms=[judge])))
    done = yatt("check", str(tmp_path / "run.json"))
    says = done.stdout + done.stderr
    assert done.returncode == 2 and "Traceback" not in says
    assert "row 1 has videos, which a GenRM is not shown; remove genrms[].sees" in says


def test_sft_learns_from_rows_with_videos(tmp_path: Path) -> None:
    """A whole run of the command: rows, the processes that decode, and the trainer's patches meet here."""
    start = make_vision_model(tmp_path / "start", "qwen3_vl")
    media = tmp_path / "media"
    media.mkdir()
    frames = frames_of(12, 64, 48)
    (media / "a.webm").write_bytes(encoded_video(frames, 6.0, ".webm"))
    for number, data in enumerate(encoded_frames(frames[:3])):
        (media / f"{number}.png").write_bytes(data)
    listed = {"video": ["0.png", "1.png", "2.png"], "fps": 2.0}
    parts = [{"type": "video"}, {"type": "text", "text": "and"}, {"type": "image"}]
    written = [
        {"prompt": "<video>what?", "videos": ["a.webm"], "completion": "x"},
        {"prompt": "no video", "videos": [], "completion": "y"},
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "a"}],
         "videos": [listed], "images": ["1.png"]},
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    config = {
        "output": str(tmp_path / "out"), "start": start, "max_steps": 2, "lr": 1e-3, "batch_size": 3,
        "train_file": str(tmp_path / "rows.jsonl"), "media_root": str(media),
        "validation": {"file": str(tmp_path / "rows.jsonl"), "every": 1}, "vision": {"train": "connector"},
    }  # fmt: skip
    (tmp_path / "sft.json").write_text(json.dumps(config))
    done = yatt("sft", str(tmp_path / "sft.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    trained, source = (load_file(next((tmp_path / name).glob("*.safetensors"))) for name in ("out", "start"))
    changed = {name for name, tensor in trained.items() if not tensor.equal(source[name])}
    assert changed == source.keys() - {n for n in source if "visual" in n and "merger" not in n}
    assert len([*(tmp_path / "out.data" / "prepared").glob("?" * 64)]) == 3
    (media / "a.webm").write_bytes((media / "a.webm").read_bytes()[:900])
    done = yatt("sft", str(tmp_path / "sft.json"))
    assert done.returncode == 2 and "row 1: video 1: a.webm is truncated" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
