"""Decodes videos of strangers, and prepares them: frame by frame, in bounded memory, with one thread each.

OpenCV gets a file without a name, never a path of the data, and only what begins as a video: its library
would also open lists that name other files. Of a video each frame is decoded in order up to the last that is
taken, because jumping finds other frames in some files. Rows have the form of transformers'
`Qwen3VLVideoProcessor`, two frames each, and its pixels before it normalises them; a test compares them.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from yatt.adapters.inputs.media_head import MediaRefused
from yatt.adapters.inputs.video_files import refuse_other_files
from yatt.models.pictures.videos import MOST_FPS, MOST_FRAMES, PAIR, VideoTokens, video_tokens
from yatt.records.media import Grid, VideoFacts

RULES = 1
"""Number of the rules of decoding and of the form of the result; a change of either needs another one."""

DECODER_BYTES = 64
"""Memory for each pixel of a frame: pictures that a decoder refers to, and copies of the one that is
prepared."""

MOST_DRIFT_S = 0.5
"""Largest distance of a frame's time from what its number and the frames a second say."""


_SILENT = {"OPENCV_FFMPEG_LOGLEVEL": "-8", "OPENCV_LOG_LEVEL": "SILENT"}
BEFORE = "when the data was made"


@dataclass(frozen=True, slots=True)
class VideoPreparation:
    """A model's way to prepare videos. Several threads may use it.

    Attributes:
        digest: of its settings, in hex.
    """

    tokens: VideoTokens
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        settings = {"video": RULES, **asdict(self.tokens)}
        text = json.dumps(settings, sort_keys=True)
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).hexdigest())

    def grid_of_facts(self, video: VideoFacts) -> Grid:
        """Returns the grid of a prepared video.

        Raises:
            MediaRefused: the model takes no video of this length or shape.
        """
        number = len(self.tokens.sampled_frames(video.num_frames, video.fps))
        try:
            return self.tokens.grid_of_video(video.width, video.height, number)
        except ValueError as error:
            raise MediaRefused(f"cannot be prepared ({error})") from None

    def memory_bytes(self, video: VideoFacts) -> int:
        """Returns the memory to decode and prepare a video, without that of its file."""
        pairs, height, width = self.grid_of_facts(video)
        prepared = pairs * height * width * 3 * PAIR * self.tokens.patch**2
        return prepared + DECODER_BYTES * video.width * video.height

    def patches_of_video(
        self, grid: Grid, frames: Iterator[NDArray[np.uint8]], tick: Callable[[], None]
    ) -> NDArray[np.uint8]:
        """Returns the patches of a video, [rows, 3 * 2 * patch * patch].

        Args:
            frames: [height, width, 3]; the last one is taken twice if their number is odd.
            tick: called after each.
        """
        pairs, height, width = grid
        patch, merge = self.tokens.patch, self.tokens.merge
        rows = np.empty((pairs, height * width, 3 * PAIR * patch**2), np.uint8)
        resized = np.empty((PAIR, 3, height * patch, width * patch), np.uint8)
        for number, frame in enumerate(frames):
            resized[number % PAIR] = _resized(frame, height * patch, width * patch)
            if number % PAIR == 0:
                resized[1] = resized[0]
            cut = resized.reshape(PAIR, 3, height // merge, merge, patch, width // merge, merge, patch)
            rows[number // PAIR] = cut.transpose(2, 5, 3, 6, 1, 0, 4, 7).reshape(rows.shape[1:])
            tick()
        return rows.reshape(-1, rows.shape[-1])


def load_video_preparation(
    folder: str, fps: float, max_frames: int, min_pixels: int, max_pixels: int
) -> VideoPreparation:
    """Returns how the model in a folder wants videos; arguments and errors as of `video_tokens`."""
    return VideoPreparation(video_tokens(folder, fps, max_frames, min_pixels, max_pixels))


def _resized(frame: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """A frame [height, width, 3] with another size, as [3, height, width]."""
    import torch
    from torchvision.transforms.v2 import functional

    planes = torch.from_numpy(np.ascontiguousarray(frame.transpose(2, 0, 1)))
    bicubic = functional.InterpolationMode.BICUBIC
    found: NDArray[np.uint8] = functional.resize(planes, [height, width], bicubic, antialias=True).numpy()
    return found


# ---- files --------------------------------------------------------------------------------------


def video_facts(data: bytes, most_pixels: int) -> VideoFacts:
    """Decodes a whole video and returns what it has.

    Raises:
        MediaRefused: it is no video that is taken, or damaged.
    """
    with _opened_video(data) as video:
        fps, said = float(video.get(_cv2().CAP_PROP_FPS)), int(video.get(_cv2().CAP_PROP_FRAME_COUNT))
        if not 0.001 <= fps <= MOST_FPS:
            raise MediaRefused(f"says {fps:g} frames a second; between 0.001 and {MOST_FPS:g} are taken")
        width, height = _size_of(video)
        if width * height > most_pixels:
            raise MediaRefused(
                f"has frames of {width} x {height} pixels, more than media.most_pixels ({most_pixels})"
            )
        times = list[float]()
        while video.grab():
            times.append(video.get(_cv2().CAP_PROP_POS_MSEC) / 1000)
            if len(times) > MOST_FRAMES:
                raise MediaRefused(f"has more than {MOST_FRAMES} frames; cut it into pieces")
    if len(times) < said - max(2, said // 50):
        raise MediaRefused(f"is truncated or damaged: it says {said} frames, and {len(times)} can be decoded")
    if len(times) < PAIR:
        raise MediaRefused(f"has {len(times)} frames that can be decoded; a video needs two")
    drift_s = max(abs(time - times[0] - number / fps) for number, time in enumerate(times))
    if drift_s > MOST_DRIFT_S:
        raise MediaRefused(
            f"has frames at irregular times, up to {drift_s:.1f} s off {fps:g} frames a second; convert it "
            "to a constant rate"
        )
    return VideoFacts(len(times), fps, width, height)


def decoded_frames(data: bytes, video: VideoFacts, wanted: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yields some frames of a video, [height, width, 3] in red, green and blue.

    Args:
        video: what it had when the data was made.
        wanted: their numbers, in order.

    Raises:
        MediaRefused: it is no video, or not what it was.
    """
    with _opened_video(data) as opened:
        if (size := _size_of(opened)) != (video.width, video.height):
            now, had = f"{size[0]} x {size[1]}", f"{video.width} x {video.height}"
            raise MediaRefused(f"has frames of {now} pixels, and had {had} {BEFORE}")
        place = -1
        for number in wanted:
            while place < number:
                place += 1
                if not opened.grab():
                    raise MediaRefused(f"has {place} frames, and had {video.num_frames} {BEFORE}")
            is_whole, frame = opened.retrieve()
            if not is_whole or frame.shape != (video.height, video.width, 3):
                raise MediaRefused(f"is damaged: its frame {number + 1} cannot be decoded")
            yield _cv2().cvtColor(frame, _cv2().COLOR_BGR2RGB)
        if place == video.num_frames - 1 and opened.grab():
            raise MediaRefused(f"has more frames than the {video.num_frames} {BEFORE}")


@contextlib.contextmanager
def _opened_video(data: bytes) -> Iterator[Any]:
    """Context manager: OpenCV's capture of a file's content."""
    refuse_other_files(data[:64])
    cv2 = _cv2()
    descriptor = os.memfd_create("video", os.MFD_CLOEXEC)
    try:
        view, done = memoryview(data), 0
        while done < len(view):
            done += os.write(descriptor, view[done:])
        name = f"/proc/self/fd/{descriptor}"
        video = cv2.VideoCapture(name, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
        try:
            if not video.isOpened():
                raise MediaRefused("is damaged or truncated, or of a kind that OpenCV cannot decode")
            yield video
        finally:
            video.release()
    finally:
        os.close(descriptor)


def _size_of(video: Any) -> tuple[int, int]:
    """Width and height of the frames as they are shown."""
    cv2 = _cv2()
    return int(video.get(cv2.CAP_PROP_FRAME_WIDTH)), int(video.get(cv2.CAP_PROP_FRAME_HEIGHT))


def _cv2() -> Any:
    """OpenCV, which vLLM brings; imported with the first video, and silent: what decoders say of a damaged
    file can be long, and be in the file's own words.

    Raises:
        MediaRefused: it is not installed.
    """
    for key, value in _SILENT.items():
        os.environ.setdefault(key, value)
    try:
        import cv2
    except ImportError as error:
        raise MediaRefused(f"needs OpenCV: pip install opencv-python-headless ({error})") from error
    return cv2
