"""Videos for tests, written by OpenCV."""

import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.pictures import encoded

CODES = {".mp4": "mp4v", ".webm": "VP80", ".mkv": "mp4v"}


def frames_of(number: int, width: int, height: int, seed: int = 0) -> list[NDArray[np.uint8]]:
    """Coloured frames [height, width, 3] that move and differ, smooth so that a codec changes them little."""
    y, x = np.mgrid[0:height, 0:width]
    found = []
    for index in range(number):
        planes = [127 + 100 * np.sin((x * (1 + channel) + y + 9 * index + seed) / 17) for channel in range(3)]
        found.append(np.stack(planes, -1).astype(np.uint8))
    return found


def encoded_video(frames: list[NDArray[np.uint8]], fps: float = 8.0, suffix: str = ".mp4") -> bytes:
    """A video's file."""
    import cv2

    height, width, _ = frames[0].shape
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"video{suffix}")
        writer = cv2.VideoWriter(
            str(path), cv2.CAP_FFMPEG, cv2.VideoWriter_fourcc(*CODES[suffix]), fps, (width, height)
        )
        assert writer.isOpened()
        for frame in frames:
            writer.write(cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
        writer.release()
        return path.read_bytes()


def encoded_frames(frames: list[NDArray[np.uint8]]) -> list[bytes]:
    """A picture's file of each frame."""
    return [encoded(Image.fromarray(frame), "PNG") for frame in frames]


def decoded_by_opencv(data: bytes) -> NDArray[np.uint8]:
    """All frames of a video, [frames, height, width, 3], read once more from a file with a name."""
    import cv2

    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        video, found = cv2.VideoCapture(file.name), []
        while (read := video.read())[0]:
            found.append(cv2.cvtColor(read[1], cv2.COLOR_BGR2RGB))
    return np.stack(found)


def hostile_videos() -> dict[str, tuple[bytes, str]]:
    """Names and contents of files that are no videos that are taken, with words of the refusal."""
    mp4 = encoded_video(frames_of(40, 64, 48))
    webm = encoded_video(frames_of(40, 64, 48), suffix=".webm")
    picture = encoded_frames(frames_of(1, 64, 48))[0]
    return {
        "cut.mp4": (mp4[: len(mp4) // 2], "is damaged or truncated"),
        "cut.webm": (webm[: len(webm) // 2], "is truncated or damaged: it says 40 frames"),
        "head.mp4": (mp4[:40], "is damaged or truncated"),
        "head.webm": (webm[:40], "is damaged or truncated"), "empty.mp4": (b"", "is empty; copy it again"),
        "page.mp4": (b"<!DOCTYPE html><html>404</html>", "is a page in HTML or XML, not a video"),
        "text.mp4": (b"hello" * 100, "is not a video in MP4, WebM or Matroska"),
        "list.mp4": (b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n", "is not a video in MP4"),
        "pointer.mp4": (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of git-lfs"),
        "picture.mp4": (picture, "is a picture, not a video"),
        "one.mp4": (encoded_video(frames_of(1, 64, 48)), "has 1 frames that can be decoded"),
        "noise.mp4": (mp4[:32] + bytes(range(256)) * 40, "is damaged or truncated"),
        "noise.mkv": (webm[:64] + bytes(range(256)) * 40, "is damaged or truncated"),
        "large.mp4": (encoded_video(frames_of(2, 640, 480)), "more than media.most_pixels (100000)"),
        "slow.mp4": (with_late_frame(mp4), "has frames at irregular times, up to"),
        "fast.mp4": (with_rate(mp4), "frames a second; between 0.001 and 1000 are taken"),
    }  # fmt: skip


def with_late_frame(mp4: bytes) -> bytes:
    """The same frames, the first of which stands still for 40 times as long: a variable rate."""
    place = mp4.index(b"stts")
    count, number, delta = (int.from_bytes(mp4[place + at : place + at + 4], "big") for at in (8, 12, 16))
    assert count == 1 and number == 40
    table = b"".join(each.to_bytes(4, "big") for each in (2, 1, 40 * delta, number - 1, delta))
    mp4 = mp4.replace(b"edts", b"free")  # it says how long the whole is
    return _with_longer_box(mp4, place - 4, 24, mp4[place + 4 : place + 8] + table)


def with_rate(mp4: bytes) -> bytes:
    """The same frames, all within a millisecond."""
    place = mp4.index(b"mdhd")
    scale = place + 4 + 4 + 8
    return mp4[:scale] + (10**9).to_bytes(4, "big") + mp4[scale + 4 :]


def _with_longer_box(mp4: bytes, start: int, size: int, content: bytes) -> bytes:
    """Replaces a box, and corrects the sizes of the boxes around it, which stand after the pictures' data."""
    name = mp4[start + 4 : start + 8]
    box = (8 + len(content)).to_bytes(4, "big") + name + content
    more = len(box) - size
    data = bytearray(mp4[:start] + box + mp4[start + size :])
    for parent in (b"moov", b"trak", b"mdia", b"minf", b"stbl"):
        at = mp4.index(parent) - 4
        assert at > mp4.index(b"mdat")
        data[at : at + 4] = (int.from_bytes(data[at : at + 4], "big") + more).to_bytes(4, "big")
    return bytes(data)


def write_films(path: Path, *, rows: int) -> Path:
    """A parquet file as verl's preprocessing writes it: bytes of a file, or of frames; some rows have a
    picture, too."""
    import pyarrow
    from pyarrow import parquet

    written = []
    for number in range(rows):
        frames = frames_of(9 + number, 64, 48, seed=number)
        listed = [{"bytes": data, "path": None} for data in encoded_frames(frames[:5])]
        is_file = number % 2 == 0
        film = {
            "bytes": encoded_video(frames, 4.0) if is_file else None, "path": None,
            "video": None if is_file else listed, "fps": None if is_file else 4.0,
        }  # fmt: skip
        has_picture = number % 4 == 3
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
