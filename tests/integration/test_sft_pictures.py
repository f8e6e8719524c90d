"""`yatt sft` with pictures and videos: prepared once, learned from, and named where they cannot be used."""

import json
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file

from tests.runs import yatt
from tests.tiny_vision import make_vision_model
from tests.videos import encoded_frames, encoded_video, frames_of

pytestmark = pytest.mark.slow
FILMED = [{"type": "video"}, {"type": "text", "text": "and"}, {"type": "image"}]
LISTED = {"video": ["0.png", "1.png", "2.png"], "fps": 2.0}
CHAT = [{"role": "user", "content": "<image> or <image>?"}, {"role": "assistant", "content": "a"}]


def noise(path: Path, seed: int) -> None:
    Image.frombytes("RGB", (40, 50), bytes((seed * 7 + i * i) % 256 for i in range(6000))).save(path)


def cut_film(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:900])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_vision_model(tmp_path / "start", "qwen3_vl")
    (tmp_path / "pictures").mkdir()
    for name in "ab":
        noise(tmp_path / "pictures" / f"{name}.png", ord(name))
    rows = [
        {"prompt": "<image>what?", "images": ["a.png"], "completion": "x"},
        {"prompt": "no picture", "images": [], "completion": "y"},
        {"messages": CHAT, "images": ["a.png", "b.png"]},
        {"prompt": [CHAT[0]], "images": ["b.png", "a.png"], "completion": "z"},
        {"prompt": "<video>what?", "images": [], "videos": ["a.webm"], "completion": "x"},
        {"messages": [{"role": "user", "content": FILMED}, CHAT[1]], "videos": [LISTED], "images": ["a.png"]},
    ]
    frames = frames_of(12, 64, 48)
    (tmp_path / "pictures" / "a.webm").write_bytes(encoded_video(frames, 6.0, ".webm"))
    for number, data in enumerate(encoded_frames(frames[:3])):
        (tmp_path / "pictures" / f"{number}.png").write_bytes(data)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "output": str(tmp_path / "out"), "start": str(tmp_path / "start"), "max_steps": 2, "lr": 1e-3,
        "train_file": str(tmp_path / "rows.jsonl"), "media_root": str(tmp_path / "pictures"), "batch_size": 6,
        "validation": {"file": str(tmp_path / "rows.jsonl"), "every": 1}, "vision": {"train": "connector"},
    }  # fmt: skip
    (tmp_path / "sft.json").write_text(json.dumps(config))
    return tmp_path


def test_rows_of_every_form_are_learned_and_changed_pictures_are_another_training(folder: Path) -> None:
    """A whole run of the command, four times: each asks whether the training before stands."""
    file = str(folder / "sft.json")
    done = yatt("sft", file)
    assert done.returncode == 0, done.stdout + done.stderr
    trained, source = (load_file(next((folder / name).glob("*.safetensors"))) for name in ("out", "start"))
    changed = {name for name, tensor in trained.items() if not tensor.equal(source[name])}
    still = {name for name in source if "visual" in name and "merger" not in name}
    assert changed == source.keys() - still
    assert (folder / "out" / "preprocessor_config.json").is_file()
    prepared = sorted((folder / "out.data" / "prepared").glob("?" * 64))
    assert len(prepared) == 4, "two pictures, and two videos"
    assert "nothing to do" in yatt("sft", file).stdout
    noise(folder / "pictures" / "b.png", 99)
    again = yatt("sft", file)
    assert again.returncode == 0 and "2 steps" in again.stdout, again.stdout + again.stderr
    assert len([*(folder / "out.data" / "prepared").glob("?" * 64)]) == 5


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:400]), "b.png is damaged or truncated"),
        (lambda path: path.unlink(), "b.png does not exist below data.media_root"),
        (lambda path: path.write_text("<html>"), "row 3: picture 2: b.png"),
        (lambda path: cut_film(path.with_name("a.webm")), "row 5: video 1: a.webm is truncated"),
    ],
    ids=["cut", "gone", "another", "film"],
)
def test_a_picture_that_cannot_be_used_is_named(folder: Path, harm, says: str) -> None:
    harm(folder / "pictures" / "b.png")
    done = yatt("sft", str(folder / "sft.json"))
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (folder / "out" / "yatt-sft.sha256").exists()
