"""The user's environment: `step(text, episode)` answers one turn of the policy."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yatt.adapters.inputs.media import store_picture
from yatt.adapters.inputs.media_head import MediaRefused, head_of_bytes, refuse_pixels
from yatt.config.schema import RunConfig
from yatt.config.sections.functions import EnvironmentSection
from yatt.errors import ConfigError
from yatt.printable import printable
from yatt.records.episode import ENVIRONMENT, IMAGE_MARK, MediaRef
from yatt.reward.functions import RewardFunction, call_function, load_function

MOST_CHARACTERS = 1 << 20
"""Longest answer; it is tokenised by the controller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What an environment knows of a sample.

    Args:
        prompt: the prompt as text.
        turns: role and text of all turns after the prompt; the last one is the policy's, `assistant`.
        row: the data row as it was read; ground_truth, data_source and extra_info are from it.
        kwargs: `environment.kwargs` of the run file.
    """

    prompt: str
    turns: tuple[tuple[str, str], ...]
    data_source: str
    ground_truth: Any
    extra_info: Any
    row: dict[str, Any]
    kwargs: dict[str, Any]


def load_environment(section: EnvironmentSection) -> RewardFunction:
    """Loads the function.

    Raises:
        ConfigError: the file cannot be loaded, or has no such function.
    """
    path = Path(section.path).absolute()
    return RewardFunction(
        name=ENVIRONMENT,
        call=load_function(path, section.function, ENVIRONMENT),
        place=f"{section.path}:{section.function}",
        path=path,
        style="environment",
        kwargs=dict(section.kwargs),
        timeout_s=section.timeout_s,
    )


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """An answer to the policy's turn: text with a mark for each picture, and the pictures: a file's bytes, or
    what PIL has."""

    text: str
    images: tuple[Any, ...] = ()


async def call_step(function: RewardFunction, episode: Episode) -> StepAnswer | None:
    """Returns the answer to the last turn, None if the episode ends.

    Raises:
        ValueError: the function returned something else, or too long a text.
        Exception: as in `call_function`.
    """
    found = await call_function(function, {"text": episode.turns[-1][1], "episode": episode}, None)
    if found is None:
        return None
    answer = StepAnswer(found) if isinstance(found, str) else _with_images(found)
    if len(answer.text) > MOST_CHARACTERS:
        raise ValueError(f"its answer has {len(answer.text)} characters; {MOST_CHARACTERS} is the most")
    return answer


def _with_images(found: Any) -> StepAnswer:
    if (
        not isinstance(found, dict)
        or found.keys() - {"text", "images"}
        or not isinstance(found.get("text"), str)
    ):
        named = (
            f"an object with {', '.join(map(repr, found))}"
            if isinstance(found, dict)
            else type(found).__name__
        )
        raise ValueError(
            "it must return the answer as text, None at the end, or an object with 'text' and 'images', not "
            f"{printable(named)[:160]}"
        )
    images = [] if found.get("images") is None else found["images"]
    if not isinstance(images, list | tuple):
        raise ValueError(f"'images' of its answer must be a list, not {type(images).__name__}")
    if images and (marks := found["text"].count(IMAGE_MARK)) != len(images):
        raise ValueError(
            f"its answer has {marks} marks {IMAGE_MARK} for {len(images)} images; take them out of text that "
            "is not yours"
        )
    return StepAnswer(found["text"], tuple(images))


def keep_images(answer: StepAnswer, config: RunConfig) -> tuple[MediaRef, ...]:
    """Writes the pictures of an answer to `data.media_store`, by their digests; returns references.

    Raises:
        ConfigError: the run takes none.
        ValueError: one cannot be used.
        OSError: one cannot be written.
    """
    store, most_pixels = config.data.media_store, config.media.most_pixels
    return tuple(store_picture(content, store, most_pixels) for content in checked_images(answer, config))


def checked_images(answer: StepAnswer, config: RunConfig) -> list[bytes]:
    """Returns the pictures of an answer as the contents of files.

    Raises:
        ConfigError: the run takes none.
        ValueError: there are too many, or one cannot be used.
    """
    if answer.images and not config.environment.images:
        raise ConfigError("its answer has images; write environment.images: true")
    if len(answer.images) > config.media.most_per_prompt:
        raise ValueError(
            f"its answer has {len(answer.images)} images, more than media.most_per_prompt "
            f"({config.media.most_per_prompt})"
        )
    return [_content_of(image, number, config) for number, image in enumerate(answer.images, 1)]


def _content_of(image: Any, number: int, config: RunConfig) -> bytes:
    content = image
    if callable(save := getattr(image, "save", None)):
        try:
            save(file := io.BytesIO(), "PNG", compress_level=1)  # the default takes four times as long
        except Exception as error:  # a library and the user's picture: any type
            raise ValueError(
                f"image {number} of its answer cannot be saved as PNG ({printable(str(error))[:160]}); "
                'convert("RGB") may help'
            ) from error
        content = file.getvalue()
    if not isinstance(content, bytes | bytearray):
        raise ValueError(
            f"image {number} of its answer must be a file's bytes or a picture of PIL, not "
            f"{type(image).__name__}"
        )
    try:
        refuse_pixels(head_of_bytes(bytes(content)), config.media.most_pixels)
    except MediaRefused as error:
        raise ValueError(f"image {number} of its answer {error}") from None
    return bytes(content)
