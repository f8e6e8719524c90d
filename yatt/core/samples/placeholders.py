"""Pictures in a prompt's token ids: each placeholder of the chat template becomes one token per feature.

A pure function of ids and sizes, so a controller counts real tokens without reading a picture.
"""

import itertools
from collections.abc import Sequence
from typing import Protocol

import msgspec

from yatt.records.episode import MediaRef, PlacedMedia, Turn


class PictureTokens(Protocol):
    """How a model's family writes pictures into a prompt."""

    @property
    def image_token_id(self) -> int:
        """The token that stands for one feature; a chat template writes one of them for each picture."""

    @property
    def mark_ids(self) -> tuple[int, ...]:
        """What a chat template writes for a picture, for prompts that no template renders."""

    def grid_of(self, width: int, height: int) -> tuple[int, int, int]:
        """Returns the number of patches in time, height and width of a picture of this size in pixels.

        Raises:
            ValueError: the model takes no picture of this shape.
        """

    def placeholder_ids(self, grid: tuple[int, int, int]) -> list[int]:
        """Returns the ids that take the place of the template's token; one `image_token_id` a feature, in a
        row."""


def with_placeholders(
    ids: Sequence[int], pictures: Sequence[MediaRef], tokens: PictureTokens
) -> tuple[list[int], tuple[PlacedMedia, ...]]:
    """Puts the placeholder tokens of pictures into a prompt.

    Args:
        ids: the prompt, with one `image_token_id` for each picture.

    Returns:
        The longer ids, and the places of the pictures in them.

    Raises:
        ValueError: there are more or fewer such tokens than pictures, or the model does not take a picture.
    """
    marks = list(ids).count(tokens.image_token_id)
    if marks != len(pictures):
        raise ValueError(f"it has {marks} placeholders for {len(pictures)} pictures")
    found: list[int] = []
    placed: list[PlacedMedia] = []
    for token in ids:
        if token != tokens.image_token_id:
            found.append(token)
            continue
        ref = pictures[len(placed)]
        grid = tokens.grid_of(ref.width, ref.height)
        replacement = tokens.placeholder_ids(grid)
        start = len(found) + replacement.index(tokens.image_token_id)
        placed.append(PlacedMedia(ref, start, replacement.count(tokens.image_token_id), grid))
        found += replacement
    return found, tuple(placed)


def placed_in(turns: Sequence[Turn]) -> tuple[PlacedMedia, ...]:
    """Returns the pictures of turns, with places that count from the first token of the first turn."""
    firsts = itertools.accumulate((turn.num_tokens for turn in turns), initial=0)
    return tuple(
        msgspec.structs.replace(each, start=each.start + first)
        for turn, first in zip(turns, firsts, strict=False)
        for each in turn.media
    )
