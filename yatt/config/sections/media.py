"""The run file's sections about pictures: how they are decoded and kept, and what learns to see."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from yatt.config.sections.operation import no_credentials, rule
from yatt.config.sections.ranges import COUNT, COUNT_OR_NONE, SECONDS, SIZE_BYTES, Free, range_between


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSection:
    """Pictures that belong to prompts. One process on each node decodes and prepares them, once each; engines
    and trainer ranks read its files."""

    cache_bytes: Annotated[int, SIZE_BYTES] = 0
    """Memory of each node for prepared pictures, in `launch.shm_dir`, as bytes. A token of a picture takes
    about 3 KiB. 0: a thirty-second part of the node's memory, at most 4 GiB."""

    most_pixels: Annotated[int, COUNT] = 64 << 20
    """Largest picture that is decoded, in pixels; larger ones are refused by their first bytes. The process
    may use about 16 bytes of memory for each of these pixels."""

    most_per_prompt: Annotated[int, COUNT] = 16
    """Largest number of pictures in a prompt and in the answers of an environment together."""

    min_pixels: Annotated[int, COUNT_OR_NONE] = 0
    """Pictures with fewer pixels are made larger. 0: as in the model's folder."""

    max_pixels: Annotated[int, COUNT_OR_NONE] = 0
    """Pictures with more pixels are made smaller, which is the limit of their tokens: of a model with patches
    of 14 pixels that are merged by two, 784 pixels are a token. 0: as in the model's folder. With tiles
    (InternVL), this and `min_pixels` limit their number, without the small picture after them."""

    timeout_s: Annotated[float, SECONDS] = 60.0
    """Longest time to read, decode and prepare one picture."""

    storage_options: dict[str, Free] = field(default_factory=dict)
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
