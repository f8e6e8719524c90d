"""The run file's sections about pictures and videos: how they are decoded and kept, and what learns to
see."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from yatt.config.sections.operation import no_credentials, rule
from yatt.config.sections.ranges import (
    COUNT,
    COUNT_OR_NONE,
    OPERATIONAL,
    SECONDS,
    SIZE_BYTES,
    Free,
    range_between,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSection:
    """Videos that belong to prompts. Frames are taken at even distances, as Qwen's processor does; two of
    them are one picture for engines and trainer."""

    fps: Annotated[float, range_between(0.001, 1000)] = 2.0
    """Frames that are taken of a second. A list of frames has so many a second unless it says its own
    `fps`."""

    max_frames: Annotated[int, range_between(2, 4096)] = 64
    """Largest number of frames that are taken of a video; of a longer one they are further apart."""

    min_pixels: Annotated[int, COUNT_OR_NONE] = 0
    """Videos whose frames have fewer pixels together are made larger. 0: as in the model's folder."""

    max_pixels: Annotated[int, COUNT_OR_NONE] = 0
    """Videos whose frames have more pixels together are made smaller, which is the limit of their tokens:
    with patches of 16 pixels that are merged by two, 2,048 pixels are a token. 0: as in the model's
    folder."""

    def __post_init__(self) -> None:
        rule(
            not self.max_pixels or self.min_pixels <= self.max_pixels,
            f"min_pixels is {self.min_pixels}, above max_pixels {self.max_pixels}; write at most that.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSection:
    """Pictures and videos that belong to prompts. One process on each node decodes and prepares them, once
    each; engines and trainer ranks read its files."""

    cache_bytes: Annotated[int, SIZE_BYTES, OPERATIONAL] = 0
    """Memory of each node for prepared pictures, in `launch.shm_dir`, as bytes. A token of a picture takes
    about 3 KiB. 0: a thirty-second part of the node's memory, at most 4 GiB."""

    most_pixels: Annotated[int, COUNT] = 64 << 20
    """Largest picture that is decoded, in pixels; larger ones are refused by their first bytes. The process
    may use about 16 bytes of memory for each of these pixels."""

    most_per_prompt: Annotated[int, COUNT] = 64
    """Largest number of pictures in a prompt and in the answers of an environment together. Each two frames
    of a video count as one."""

    min_pixels: Annotated[int, COUNT_OR_NONE] = 0
    """Pictures with fewer pixels are made larger. 0: as in the model's folder."""

    max_pixels: Annotated[int, COUNT_OR_NONE] = 0
    """Pictures with more pixels are made smaller, which is the limit of their tokens: of a model with patches
    of 14 pixels that are merged by two, 784 pixels are a token. 0: as in the model's folder. With tiles
    (InternVL), this and `min_pixels` limit their number, without the small picture after them."""

    timeout_s: Annotated[float, SECONDS, OPERATIONAL] = 60.0
    """Longest time to read, decode and prepare one picture."""

    video: VideoSection = field(default_factory=VideoSection)

    storage_options: Annotated[dict[str, Free], OPERATIONAL] = field(default_factory=dict)
    """Options passed to fsspec if `data.media_root` is the URL of an object store: endpoint_url, profile ...
    Credentials are refused here: they come from the environment or the driver's own files."""

    def __post_init__(self) -> None:
        no_credentials("", self.storage_options)
        rule(
            not self.max_pixels or self.min_pixels <= self.max_pixels,
            f"min_pixels is {self.min_pixels}, above max_pixels {self.max_pixels}; write at most that.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSection:
    """What a model that takes pictures learns of its tower, which makes features of them."""

    train: Literal["none", "connector", "all"] = "none"
    """What is trained besides the language model. none: nothing; each picture then passes the tower once an
    iteration. connector: what makes tokens of the tower's features. all: the whole tower."""

    lr: Annotated[float, range_between(0, 1)] = 0.0
    """Largest learning rate of what `train` names. 0: that of `optimizer.lr`."""

    def __post_init__(self) -> None:
        rule(self.train != "none" or not self.lr, "lr has no effect while train is none; remove it.")
