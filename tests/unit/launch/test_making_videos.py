"""Rows with videos: what verl's files have, what is refused, and what a made row says.

The processes that decode files are real: they are what keeps a hostile file from harm.
"""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pytest
from pyarrow import parquet

from tests.tiny_models import VISION_CHAT, VISION_TOKENS, make_tokenizer
from tests.tiny_processors import write_processor
from tests.videos import encoded_frames, encoded_video, frames_of, hostile_videos, write_films
from yatt.adapters.inputs.data_rows import raw_rows
from yatt.adapters.inputs.dataset import read_data_rows
from yatt.adapters.inputs.media_head import MediaRefused
from yatt.adapters.inputs.video_files import FrameList, frame_list, is_frame_list
from yatt.config.load import parse_resolved
from yatt.config.schema import DataSection, RunConfig
from yatt.errors import ConfigError
from yatt.launch.checks.input_trial import check_inputs
from yatt.launch.resolve.data_files import with_made_data
from yatt.launch.resolve.making_media import MediaMaking, write_with_references
from yatt.media import head_processes
from yatt.media.head_processes import HeadProcesses
from yatt.records.episode import MediaRef
from yatt.records.media import VideoFacts

PROMPT = [{"role": "user", "content": "What happens in <video>?"}]
VIDEO = {"fps": 2.0, "max_frames": 16}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a.mp4").write_bytes(encoded_video(frames_of(20, 64, 48), 8.0))
    for number, data in enumerate(encoded_frames(frames_of(3, 64, 48))):
        (tmp_path / "root" / f"{number}.png").write_bytes(data)
    (tmp_path / "root" / "small.png").write_bytes(encoded_frames(frames_of(1, 32, 48))[0])
    return tmp_path / "root"


@pytest.fixture
def making(tmp_path: Path, root: Path) -> MediaMaking:
    return MediaMaking(
        image_key="images", video_key="videos", columns=None, root=str(root), store=str(tmp_path / "store"),
        most_pixels=100_000, most_per_prompt=8, model=str(write_processor(tmp_path / "model")), video=VIDEO,
    )  # fmt: skip


def made_rows(tmp_path: Path, making: MediaMaking, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        source = tmp_path / "rows.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    except TypeError:
        source = tmp_path / "rows.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), source)
    target = source.with_name(f"made{source.suffix}")
    target.unlink(missing_ok=True)
    write_with_references(source, making, target)
    return [raw for raw, _ in raw_rows(target)]


def test_every_form_of_a_file_is_read(tmp_path: Path, root: Path, making: MediaMaking) -> None:
    path = str(root / "a.mp4")
    content = (root / "a.mp4").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    forms: list[Any] = [
        "a.mp4", path, f"file://{path}", {"video": "a.mp4"}, {"path": "a.mp4"}, {"video": f"file://{path}"},
        {"type": "video", "video": path, "fps": 2.0}, {"path": "a.mp4", "sha256": digest},
    ]  # fmt: skip
    rows = made_rows(tmp_path, making, *({"prompt": PROMPT, "videos": [form]} for form in forms))
    wanted = {
        "path": "a.mp4", "sha256": digest, "num_frames": 20, "fps": 8.0, "width": 64, "height": 48,
    }  # fmt: skip
    assert [row["videos"] for row in rows] == [[wanted]] * len(forms)
    (row,) = made_rows(
        tmp_path, making, {"prompt": PROMPT, "videos": [{"bytes": content, "path": None}], "answer": 1}
    )
    assert row["videos"] == [wanted | {"path": ""}] and row["answer"] == 1
    assert (tmp_path / "store" / digest[:2] / digest).read_bytes() == content


def test_a_file_that_was_decoded_is_known_at_the_next_start(
    tmp_path: Path, root: Path, making: MediaMaking, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"prompt": PROMPT, "videos": ["a.mp4"]}
    before = made_rows(tmp_path, making, row)
    monkeypatch.setattr(head_processes, "PROGRAM", "there_is_no_such_module")
    assert made_rows(tmp_path, making, row) == before
    (root / "b.mp4").write_bytes((root / "a.mp4").read_bytes() + b"x")
    with pytest.raises(ConfigError, match="ended the process that decodes it"):
        made_rows(tmp_path, making, {"prompt": PROMPT, "videos": ["b.mp4"]})
    with pytest.raises(ConfigError, match="ended the process that decodes it"):
        made_rows(tmp_path, replace(making, most_pixels=64), row)


def test_a_list_of_frames_becomes_a_file_that_names_them(
    tmp_path: Path, root: Path, making: MediaMaking
) -> None:
    names = ["0.png", "1.png", "2.png"]
    rows = made_rows(
        tmp_path, making, {"prompt": PROMPT, "videos": [names]},
        {"prompt": PROMPT, "videos": [{"video": names, "fps": 4.0}]},
        {"prompt": PROMPT, "videos": {"video": names}},
    )  # fmt: skip
    facts = [{key: row["videos"][0][key] for key in ("path", "num_frames", "fps")} for row in rows]
    assert facts == [{"path": "", "num_frames": 3, "fps": fps} for fps in (2.0, 4.0, 2.0)]
    digests = [row["videos"][0]["sha256"] for row in rows]
    assert digests[0] == digests[2] != digests[1], "another rate is another video"
    content = (tmp_path / "store" / digests[0][:2] / digests[0]).read_bytes()
    assert is_frame_list(content) and [each.path for each in frame_list(content).frames] == names
    files = [{"bytes": (root / name).read_bytes(), "path": None} for name in names]
    (row,) = made_rows(tmp_path, making, {"prompt": PROMPT, "videos": [files]})
    digest = row["videos"][0]["sha256"]
    listed = frame_list((tmp_path / "store" / digest[:2] / digest).read_bytes())
    assert [each.sha256 for each in listed.frames] == [
        hashlib.sha256(file["bytes"]).hexdigest() for file in files
    ]


def test_a_made_row_is_read(tmp_path: Path, making: MediaMaking) -> None:
    prompt = [{"role": "user", "content": [
        {"type": "video"}, {"type": "text", "text": " or "}, {"type": "image"}, {"type": "text", "text": "?"},
    ]}]  # fmt: skip
    made_rows(
        tmp_path, making, {"prompt": prompt, "videos": ["a.mp4"], "images": ["0.png"]},
        {"prompt": "none, not even <video>"},
    )  # fmt: skip
    data = DataSection(train_files=(str(tmp_path / "made.jsonl"),), media_store=making.store)
    first, second = (row for row, _ in read_data_rows(data.train_files, data))
    assert first.prompt == [{"role": "user", "content": "<video> or <image>?"}]
    assert [(each.width, each.num_frames, each.fps) for each in first.media] == [(64, 0, 0.0), (64, 20, 8.0)]
    assert second.media == ()


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("none.mp4", "row 1: video 1: none.mp4 does not exist below data.media_root"),
        ("../a.mp4", "is not a path below data.media_root"),
        ("0.png", "0.png is a picture, not a video; a list of pictures is taken as frames"),
        ({"video": "a.mp4", "fps": 4.0}, r"asks for 4 frames a second; media\.video\.fps \(2\) is for all"),
        ({"video": "a.mp4", "nframes": 8}, "has 'nframes', and a video may have video, path, bytes and fps"),
        ({"video": ["0.png", "1.png"], "fps": 0}, "has fps 0; it needs a number between 0.001 and 1000"),
        ({"path": "a.mp4", "sha256": "00" * 32}, "its SHA-256 differs"),
        (["0.png"], "has 1 frames; a video needs 2 to"),
        (["0.png", "small.png"], "number 2 has 32 x 48 pixels, the first one 64 x 48"),
        (["0.png", "a.mp4"], "video 1: frame 2: a.mp4 is a video"),
        (7, "7 is neither a path nor bytes"),
        (["0.png", "1.png"] * 9, "has 10 pictures and pairs of frames, more than media.most_per_prompt"),
    ],
)  # fmt: skip
def test_a_video_that_cannot_be_used_is_refused_with_its_place(
    tmp_path: Path, making: MediaMaking, entry: Any, says: str
) -> None:
    images = ["0.png", "1.png"] if isinstance(entry, list) and len(entry) > 2 else []
    with pytest.raises(ConfigError, match=says) as found:
        made_rows(tmp_path, making, {"prompt": PROMPT, "videos": [entry], "images": images})
    assert f"{tmp_path / 'rows.jsonl'}: row 1" in str(found.value)


def test_hostile_files_are_refused_with_file_and_row(tmp_path: Path, root: Path, making: MediaMaking) -> None:
    files = hostile_videos()
    rows: list[dict[str, Any]] = [{"prompt": PROMPT, "videos": ["a.mp4"]}]
    for name, (data, _) in files.items():
        (root / name).write_bytes(data)
        rows.append({"prompt": PROMPT, "videos": [name]})
    with pytest.raises(ConfigError) as found:
        made_rows(tmp_path, making, *rows)
    says = str(found.value)
    lines = [line for line in says.splitlines() if ": row " in line]
    assert says.startswith(f"{len(files)} rows have") and "Traceback" not in says and len(lines) >= 12
    for line in lines:
        place, name, fault = re.match(r".*: row (\d+): video 1: (\S+) (.*)", line).groups()  # type: ignore[union-attr]
        assert [*files][int(place) - 2] == name and files[name][1] in fault


def test_a_model_that_takes_no_videos_refuses_them_by_name(tmp_path: Path, making: MediaMaking) -> None:
    blind = replace(making, model=str(write_processor(tmp_path / "other", "qwen2_5_vl")))
    with pytest.raises(ConfigError, match=r"column 'videos' has videos; model\.path: .*not 'qwen2_5_vl'"):
        made_rows(tmp_path, blind, {"prompt": PROMPT, "videos": ["a.mp4"]})
    assert made_rows(tmp_path, blind, {"prompt": "text", "videos": []})[0]["videos"] == []


def test_a_run_with_videos_is_checked_and_a_genrm_that_sees_is_refused(tmp_path: Path, root: Path) -> None:
    """With the columns of verl's files; the made file has what the run needs, and no more."""
    model = tmp_path / "policy"
    make_tokenizer(model, [*VISION_TOKENS, "<|video_pad|>"], VISION_CHAT)
    write_processor(model)
    file = write_films(tmp_path / "films.parquet", rows=4)
    judge = {
        "name": "judge", "model": str(model), "sees": "prompt", "template": "{media} Is {completion} right?",
        "engine": "vllm", "verdict": {"minimum": 0, "maximum": 1}, "max_tokens": 4, "chat": True,
    }  # fmt: skip
    sizes = dict.fromkeys(("total_iterations", "train_batch_size", "mini_batch_size"), 1)

    def made(genrms: list[dict[str, Any]]) -> RunConfig:
        return with_made_data(parse_resolved(json.dumps({
            "run": {"dir": str(tmp_path / "run")}, "model": {"path": str(model)}, "optimizer": {"lr": 0.1},
            "data": {"train_files": [str(file)], "max_prompt_tokens": 200}, "trainer": sizes,
            "rollout": {"engine": "scripted"}, "genrms": genrms, "media": {"video": VIDEO},
            "rewards": [{"name": "exact", "path": "builtin:exact"}],
        })))  # fmt: skip

    config = made([])
    check_inputs(config)
    rows = [row for row, _ in read_data_rows(config.data.train_files, config.data)]
    assert [[ref.num_frames for ref in row.media] for row in rows] == [[9], [5], [11], [0, 5]]
    assert [ref.fps for row in rows for ref in row.media if ref.is_video] == [4.0] * 4
    assert "ability" not in rows[0].raw, "nobody needs it"
    with pytest.raises(ConfigError, match=r"row 1 has videos, which a GenRM is not shown; remove genrms\[\]"):
        check_inputs(made([judge]))


CHILD = """
import sys
size = int.from_bytes(sys.stdin.buffer.read(8), "little")
word = sys.stdin.buffer.read(size)
if word == b"crash":
    import signal
    signal.raise_signal(signal.SIGSEGV)
if word == b"hang":
    sys.stdin.buffer.read()
print("[2, 1.0, 3, 4]", flush=True)
"""


def test_a_file_that_ends_or_stops_its_process_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "child_of_a_test.py").write_text(CHILD)
    monkeypatch.setattr(head_processes, "PROGRAM", "child_of_a_test")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    heads = HeadProcesses(1 << 20)
    try:
        with pytest.raises(MediaRefused, match=r"ended the process that decodes it .*SIGSEGV"):
            heads.facts(b"crash")
        heads._limit_s = 0.1
        with pytest.raises(MediaRefused, match=r"was not decoded within 0\.1 s; cut it into pieces"):
            heads.facts(b"hang")
        heads._limit_s = head_processes.LIMIT_S
        assert heads.facts(b"good") == VideoFacts(2, 1.0, 3, 4)
    finally:
        heads.close()
    with pytest.raises(MediaRefused, match="another row ended the work"):
        heads.facts(b"late")


def test_older_records_are_read_and_one_of_text_has_three_bytes_of_what_it_lacks() -> None:
    """No pictures are an empty list, no rewards of tokens two bytes, no likeliest tokens of a teacher one."""
    from yatt.records.episode import PlacedMedia, Turn

    assert msgspec.msgpack.encode(Turn(b"\1\0\0\0")).hex() == "98c40401000000c2c40090a090c400c0"
    for before in ("96c40401000000c2c40090a090", "97c40401000000c2c40090a090c400"):
        assert msgspec.msgpack.decode(bytes.fromhex(before), type=Turn) == Turn(b"\1\0\0\0")
    older = msgspec.msgpack.encode([["a.png", "ab", 3, 4], 1, 2, [1, 2, 4], "cd"])
    read = msgspec.msgpack.decode(older, type=PlacedMedia)
    assert read == PlacedMedia(MediaRef("a.png", "ab", 3, 4), 1, 2, (1, 2, 4), "cd")
    assert not read.ref.is_video and read.file_grid == (1, 2, 4)


def test_a_damaged_list_of_frames_is_refused() -> None:
    whole = msgspec.json.encode(FrameList(fps=2.0, frames=()))
    for content, says in ((whole, "in another form"), (whole[:-1], "is a damaged list of frames")):
        with pytest.raises(MediaRefused, match=says):
            frame_list(content)
