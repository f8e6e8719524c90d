"""Frames, times, grids and ids of videos by their sizes alone, compared with transformers' processor."""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny_models import VISION_CHAT, VISION_TOKENS, make_tokenizer
from tests.tiny_processors import write_processor
from yatt.adapters.inputs.dataset import Row
from yatt.adapters.inputs.encoded_prompt import encode_prompt
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.config.load import parse_resolved
from yatt.config.schema import RunConfig
from yatt.errors import ConfigError
from yatt.models.pictures.videos import VideoTokens, pair_seconds, video_tokens
from yatt.records.episode import MediaRef

BEGIN, END, PICTURE, VIDEO = 3, 4, 5, 6
RATES = (1.0, 5.0, 7.5, 12.0, 23.976023976023978, 24.0, 25.0, 29.97002997002997, 30.0, 59.94, 240.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(folder, [*VISION_TOKENS, "<|video_pad|>"], VISION_CHAT)
    return str(write_processor(folder))


def processor_of(model: str) -> Any:
    from transformers import AutoTokenizer, Qwen2VLImageProcessor
    from transformers.models.qwen3_vl import Qwen3VLProcessor, Qwen3VLVideoProcessor

    tokenizer = AutoTokenizer.from_pretrained(model)
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor.from_pretrained(model), tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor.from_pretrained(model), chat_template=tokenizer.chat_template,
    )  # fmt: skip


def test_frames_times_and_grids_are_those_of_the_processor(model: str) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize
    from transformers.video_utils import VideoMetadata

    processor, draw, refused = processor_of(model), random.Random(3), 0
    for _ in range(600):
        num_frames, fps = draw.choice([draw.randint(2, 40), draw.randint(2, 5000)]), draw.choice(RATES)
        width, height = (round(2 ** draw.uniform(0, 11)) for _ in range(2))
        limits = draw.choice([(4096, 65_536), (128 * 1024, 768 * 1024), (1, 1 << 30)])
        target, most = draw.choice([0.5, 1.0, 2.0, 3.0, 4.0]), draw.choice([2, 4, 7, 16, 64, 768])
        tokens = video_tokens(model, target, most, *limits)
        own = processor.video_processor
        own.max_frames = most
        expected = own.sample_frames(VideoMetadata(total_num_frames=num_frames, fps=fps), fps=target)
        frames = tokens.sampled_frames(num_frames, fps)
        if fps != target:
            assert frames == expected.tolist(), (num_frames, fps, target, most)
        seconds = processor._calculate_timestamps(list(frames), fps, 2)
        assert pair_seconds(frames, fps) == seconds
        try:
            sides = smart_resize(len(frames), height, width, 2, 32, *limits)
        except ValueError:
            refused += 1
            with pytest.raises(ValueError, match="no side may be more than 200 times the other"):
                tokens.grid_of_video(width, height, len(frames))
        else:
            grid = tokens.grid_of_video(width, height, len(frames))
            assert grid == (math.ceil(len(frames) / 2), sides[0] // 16, sides[1] // 16)
    assert 0 < refused < 300


def test_a_video_that_has_the_wanted_rate_loses_no_frame_to_rounding(model: str) -> None:
    tokens = video_tokens(model, 49.0, 4096)
    assert int(1 / 49.0 * 49.0) == 0, "of floats"
    for number in range(1, 300):
        assert tokens.sampled_frames(number, 49.0) == [*range(number)]


def config_of(model: str, **video: Any) -> RunConfig:
    sizes = dict.fromkeys(("total_iterations", "train_batch_size", "mini_batch_size"), 1)
    return parse_resolved(json.dumps({
        "run": {"dir": "r"}, "model": {"path": model}, "optimizer": {"lr": 0.1}, "trainer": sizes,
        "rewards": [{"name": "exact", "path": "builtin:exact"}], "media": {"video": video},
        "data": {"train_files": ["x"], "media_store": "store"},
    }))  # fmt: skip


def test_ids_are_those_of_the_models_processor(model: str) -> None:
    from PIL import Image
    from transformers.video_utils import VideoMetadata

    processor, tokenizer = processor_of(model), Tokenizer(model)
    videos = [(9, 3.0, 70, 50), (48, 12.0, 64, 64), (5, 2.0, 200, 40)]
    refs = [MediaRef("", "ab" * 32, width, height, count, fps) for count, fps, width, height in videos]
    picture = MediaRef("", "cd" * 32, 70, 40)
    text = "see <video> and <image> or <video><video>, what differs? <0.5 seconds>"
    parts: list[dict[str, str]] = [
        {"type": "text", "text": "see "}, {"type": "video"}, {"type": "text", "text": " and "},
        {"type": "image"}, {"type": "text", "text": " or "}, {"type": "video"}, {"type": "video"},
        {"type": "text", "text": ", what differs? <0.5 seconds>"},
    ]  # fmt: skip
    rendered = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    made = processor(
        text=[rendered], images=[Image.new("RGB", (70, 40))], return_tensors="pt",
        videos=[np.zeros((count, height, width, 3), np.uint8) for count, _, width, height in videos],
        video_metadata=[VideoMetadata(total_num_frames=count, fps=fps) for count, fps, _, _ in videos],
    )  # fmt: skip
    row = Row(
        prompt=[{"role": "user", "content": text}], ground_truth=None, data_source="", raw={},
        media=(picture, *refs),
    )  # fmt: skip
    found = encode_prompt(row, tokenizer, config_of(model))
    assert found.ids == made["input_ids"][0].tolist()
    grids = made["video_grid_thw"].tolist()
    assert found.text == text
    shown = [each for each in found.media if each.ref.is_video]
    assert [each.part for each in shown] == [part for grid in grids for part in range(grid[0])]
    assert [list(each.file_grid) for each in shown] == [grid for grid in grids for _ in range(grid[0])]
    for each in found.media:
        token = VIDEO if each.ref.is_video else PICTURE
        assert found.ids[each.start : each.start + each.num_tokens] == [token] * each.num_tokens
        assert (found.ids[each.start - 1], found.ids[each.start + each.num_tokens]) == (BEGIN, END)
        assert each.grid[0] == 1 and each.num_tokens == each.grid[1] * each.grid[2] // 4


def test_prompts_without_a_template_have_the_same_marks(model: str) -> None:
    tokenizer, config = Tokenizer(model), config_of(model)
    ref = MediaRef("", "ab" * 32, 64, 64, 2, 2.0)
    row = Row(prompt="<video>how <image>?", ground_truth=None, data_source="", raw={}, media=(ref,))
    found = encode_prompt(row, tokenizer, config)
    times, after = tokenizer.encode_plain("<0.2 seconds>"), tokenizer.encode_plain("how <image>?")
    assert found.ids == [BEGIN, *times, BEGIN, *[VIDEO] * 4, END, END, *after], "a mark of none is text"


@pytest.mark.parametrize(
    ("text", "says"),
    [("<video><video>", "2 placeholders for 1 videos"), ("none", "0 placeholders for 1 videos")],
)
def test_another_number_of_videos_is_refused(model: str, text: str, says: str) -> None:
    ref = MediaRef("", "ab" * 32, 64, 64, 4, 2.0)
    row = Row(prompt=text, ground_truth=None, data_source="", raw={}, media=(ref,))
    with pytest.raises(ConfigError, match=says):
        encode_prompt(row, Tokenizer(model), config_of(model))


def test_a_video_of_one_frame_is_no_video(model: str) -> None:
    tokens = video_tokens(model, 2.0, 64)
    with pytest.raises(ValueError, match="it needs two; give it as a picture"):
        tokens.grid_of_ref(MediaRef("", "", 64, 64, 1, 25.0))


@pytest.mark.parametrize(
    ("config", "video", "says"),
    [
        (
            {"model_type": "glm4v_moe"},
            {},
            "videos are taken by models of the types qwen3_vl, qwen3_vl_moe, not",
        ),
        ({"model_type": "qwen2_5_vl"}, {}, "not 'qwen2_5_vl'"),
        ({"video_token_id": None}, {}, "video_token_id is None; it needs a token's number"),
        ({}, {"size": {}}, r"media\.video\.min_pixels: .* does not say it \(size\.shortest_edge\)"),
        ({}, {"image_mean": [0.0, 0.0, 0.0]}, r"image_mean is \[0\.0, 0\.0, 0\.0\]; videos are taken with"),
        ({}, {"temporal_patch_size": 1}, "temporal_patch_size is 1; videos are taken with 2 only"),
        ({}, {"cap_pixels_per_frame": True}, "cap_pixels_per_frame is True"),
        ({}, {"min_frames": "4"}, "min_frames is '4'; it needs a whole number"),
    ],
)
def test_a_folder_whose_videos_cannot_become_tokens_is_refused(
    tmp_path: Path, config: dict[str, Any], video: dict[str, Any], says: str
) -> None:
    write_processor(tmp_path)
    for name, changes in (("config.json", config), ("video_preprocessor_config.json", video)):
        file = tmp_path / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError, match=says):
        video_tokens(str(tmp_path), 2.0, 64)


def test_limits_of_the_run_take_the_place_of_the_folders(tmp_path: Path) -> None:
    write_processor(tmp_path)
    (tmp_path / "video_preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"copy the model.s folder with video_preprocessor_config"):
        video_tokens(str(tmp_path), 2.0, 64)
    found = video_tokens(str(tmp_path), 2.0, 64, 4096, 8192)
    assert isinstance(found, VideoTokens) and found.grid_of_video(640, 640, 2) == (1, 4, 4)
