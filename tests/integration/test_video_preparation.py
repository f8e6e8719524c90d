"""Videos by real decoders and processors: rows are transformers' own, and hostile files cost a sentence.

In this folder because it imports transformers' video processors, which takes seconds.
"""

import hashlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.integration.test_media_process import Scene, peak_mib, prepared
from tests.tiny_processors import MEAN, STD, write_processor
from tests.videos import (
    decoded_by_opencv,
    encoded_frames,
    encoded_video,
    frames_of,
    hostile_videos,
)
from tests.worker_process import WorkerServer
from yatt.adapters.inputs.video_files import FrameList, NamedFrame
from yatt.adapters.node_local.prepared_media import open_prepared, parts_of_prepared, with_frames
from yatt.media.head_processes import LENGTH_BYTES
from yatt.media.video_heads import answer_heads
from yatt.media.videos import decoded_frames, load_video_preparation, video_facts
from yatt.records import message as m
from yatt.records.media import VideoFacts

LIMITS = (2.0, 16, 0, 0)
"""Frames a second, most frames, and limits of pixels as in the folder."""


def rows_of_transformers(folder: Path, frames: Any, fps: float, **more: Any) -> tuple[list[int], Any]:
    from transformers.models.qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    processor = Qwen3VLVideoProcessor.from_pretrained(str(folder))
    processor.max_frames = LIMITS[1]
    made = processor(
        [frames], video_metadata=[VideoMetadata(total_num_frames=len(frames), fps=fps)], fps=LIMITS[0],
        return_tensors="pt", **more,
    )  # fmt: skip
    return made["video_grid_thw"][0].tolist(), made["pixel_values_videos"]


@pytest.mark.parametrize(
    ("number", "fps", "size", "suffix"),
    [
        (31, 8.0, (96, 64), ".mp4"), (40, 12.5, (70, 50), ".webm"), (13, 6.0, (300, 42), ".mkv"),
        (200, 25.0, (18, 40), ".mp4"), (2, 30.0, (128, 128), ".mp4"),
    ],
)  # fmt: skip
def test_rows_of_a_file_are_those_of_transformers(
    tmp_path: Path, number: int, fps: float, size: tuple[int, int], suffix: str
) -> None:
    folder = write_processor(tmp_path / "model")
    data = encoded_video(frames_of(number, *size), fps, suffix)
    whole = decoded_by_opencv(data)
    facts = video_facts(data, 1 << 20)
    assert facts == VideoFacts(number, fps, *size)
    preparation = load_video_preparation(str(folder), *LIMITS)
    grid = preparation.grid_of_facts(facts)
    taken = preparation.tokens.sampled_frames(number, fps)
    ticks: list[int] = []
    found = preparation.patches_of_video(grid, decoded_frames(data, facts, taken), lambda: ticks.append(1))
    wanted, rows = rows_of_transformers(folder, whole, fps, do_rescale=False, do_normalize=False)
    assert list(grid) == wanted and np.array_equal(found, rows.numpy()) and len(ticks) == len(taken)
    _, normal = rows_of_transformers(folder, whole, fps)
    planes = torch.from_numpy(found).view(len(found), 3, -1).float() / 255
    own = (planes - torch.tensor(MEAN).view(3, 1)) / torch.tensor(STD).view(3, 1)
    assert (own.flatten(1) - normal).abs().max() < 1e-5


def test_another_sampling_has_another_name(tmp_path: Path) -> None:
    folder = str(write_processor(tmp_path))
    asked = [(2.0, 16, 0, 0), (1.0, 16, 0, 0), (2.0, 8, 0, 0), (2.0, 16, 2048, 0), (2.0, 16, 0, 8192)]
    assert len({load_video_preparation(folder, *each).digest for each in asked}) == len(asked)


def test_a_child_answers_for_each_file_whatever_it_has() -> None:
    files = hostile_videos()
    good = encoded_video(frames_of(9, 64, 48), 3.0)
    contents = [*(data for data, _ in files.values()), good]
    given = b"".join(len(data).to_bytes(LENGTH_BYTES, "little") + data for data in contents)
    answers = io.BytesIO()
    answer_heads(io.BytesIO(given), answers, 100_000)
    found = [json.loads(line) for line in answers.getvalue().splitlines()]
    for (name, (_, says)), answer in zip(files.items(), found[:-1], strict=True):
        assert isinstance(answer, str) and says in answer, name
    assert msgspec.convert(found[-1], VideoFacts) == VideoFacts(9, 3.0, 64, 48)


def test_a_child_needs_little_memory_and_says_nothing_else() -> None:
    data = encoded_video(frames_of(30, 640, 480))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "yatt.media.video_heads", str(1 << 20), str(256 << 20)],
        input=len(data).to_bytes(8, "little") + data, capture_output=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == [30, 8.0, 640, 480]


class VideoScene(Scene):
    """A media process whose model takes videos of few frames."""

    def video(self, name: str, data: bytes, facts: VideoFacts | None = None) -> m.MediaItem:
        return msgspec.structs.replace(self.add(name, data), video=facts or VideoFacts(40, 8.0, 64, 48))

    def listed(self, name: str, files: list[bytes], fps: float, facts: VideoFacts) -> m.MediaItem:
        items = [self.add(f"{name}-{number}.png", data) for number, data in enumerate(files)]
        listed = FrameList(fps=fps, frames=tuple(NamedFrame(each.path, each.sha256) for each in items))
        content = msgspec.json.encode(listed)
        digest = hashlib.sha256(content).hexdigest()
        target = self.folder / "store" / digest[:2] / digest
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        return m.MediaItem("", digest, video=facts)


def test_a_process_prepares_files_and_lists_of_frames_and_refuses_all_others(tmp_path: Path) -> None:
    """The process is real: what files do to its memory is the subject. A whole run would show it later."""
    scene = VideoScene(tmp_path, video={"fps": 2.0, "max_frames": 16}, most_pixels=100_000)
    frames = frames_of(40, 64, 48)
    data = encoded_video(frames, 8.0)
    few = VideoFacts(5, 2.0, 64, 48)
    good = scene.video("good.mp4", data)
    pictures = encoded_frames(frames[:5])
    listed = scene.listed("frame", pictures, 2.0, few)
    other_size = scene.listed("odd", [*pictures[:4], encoded_frames(frames_of(1, 32, 48))[0]], 2.0, few)
    bad = {
        **{item.path: (item, says) for item, says in (
            (scene.video(name, content), says) for name, (content, says) in hostile_videos().items()
        ) if item.path not in ("one.mp4", "slow.mp4", "fast.mp4", "large.mp4", "cut.webm")},
        "shorter": (scene.video("short.mp4", encoded_video(frames[:30])), "has 30 frames, and had 40 when"),
        "longer": (scene.video("long.mp4", encoded_video([*frames, frames[0]])), "has more frames than"),
        "cut.webm": (scene.video("c.webm", hostile_videos()["cut.webm"][0]), "frames, and had 40"),
        "larger": (scene.video("wide.mp4", encoded_video(frames_of(40, 96, 48))), "has frames of 96 x 48"),
        "huge": (
            scene.video("h.mp4", data + b"x", VideoFacts(40, 8.0, 400, 300)),
            "more than media.most_pixels",
        ),
        "no list": (scene.listed("more", pictures[:4], 2.0, few), "has other frames than when the data"),
        "odd": (other_size, "as its frame 5, which has 32 x 48 pixels, not"),
        "genrm": (msgspec.structs.replace(good, genrm="judge"), "is a video, and only the policy is shown"),
    }  # fmt: skip

    async def play(server: WorkerServer) -> None:
        answer = await prepared(server, good, good, listed, *(item for item, _ in bad.values()))
        assert [each.index for each in answer.items] == [0, 1, 2], answer.faults
        for fault, (name, (_, says)) in zip(answer.faults, bad.items(), strict=True):
            assert says in fault.error and fault.error.isprintable() and not fault.waits, (name, fault)
        for each, source in ((answer.items[0], decoded_by_opencv(data)), (answer.items[2], frames[:5])):
            grid, rows = rows_of_transformers(
                tmp_path, np.stack(source), 8.0 if len(source) == 40 else 2.0, do_rescale=False,
                do_normalize=False,
            )  # fmt: skip
            media = open_prepared(scene.kept, each.digest)
            assert list(each.grid) == list(media.grid) == grid and not media.is_still
            assert np.array_equal(np.concatenate([
                with_frames(part, 2) for part in parts_of_prepared(media)
            ]), rows.numpy())  # fmt: skip
        assert peak_mib(server) <= 700

    assert "Traceback" not in scene.play(play)


def test_items_of_one_video_are_decoded_once(tmp_path: Path) -> None:
    scene = VideoScene(tmp_path, video={"fps": 2.0, "max_frames": 16})
    item = scene.video("one.mp4", encoded_video(frames_of(40, 64, 48), 8.0))

    async def play(server: WorkerServer) -> None:
        first = await prepared(server, *[item] * 6)
        (scene.pictures / "one.mp4").unlink()
        again = await prepared(server, item)
        assert {each.digest for each in (*first.items, *again.items)} == {first.items[0].digest}
        other = msgspec.structs.replace(item, video=VideoFacts(20, 8.0, 64, 48), grid=(3, 4, 4))
        (fault,) = (await prepared(server, other)).faults
        assert "patches, but its prompt was made for 3 x 4 x 4" in fault.error

    scene.play(play)
