"""Pictures and videos in a prompt's token ids: each placeholder of the chat template becomes one token per
feature; that of a video becomes its pairs of frames, each with its time.

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


class TimedTokens(Protocol):
    """How a model's family writes videos into a prompt."""

    @property
    def video_token_id(self) -> int:
        """The token that stands for one feature; a chat template writes one of them for each video."""

    def grid_of_ref(self, ref: MediaRef) -> tuple[int, int, int]:
        """Returns the number of pairs of frames of a video, and of patches in height and width of each.

        Raises:
            ValueError: the model takes no such video.
        """

    def timed_ids(self, ref: MediaRef) -> list[list[int]]:
        """Returns the ids of each pair; one `video_token_id` a feature, in a row."""


def with_placeholders(
    ids: Sequence[int], media: Sequence[MediaRef], tokens: PictureTokens, timed: TimedTokens | None = None
) -> tuple[list[int], tuple[PlacedMedia, ...]]:
    """Puts the placeholder tokens of pictures and videos into a prompt.

    Args:
        ids: the prompt, with one `image_token_id` for each picture, and one `video_token_id` for each video.
        media: pictures in order, and videos in order.
        timed: how videos are written; None: there are none.

    Returns:
        The longer ids, and the places of pictures and of pairs of frames in them.

    Raises:
        ValueError: there are more or fewer such tokens than media, or the model does not take one.
    """
    waiting = {tokens.image_token_id: [ref for ref in media if not ref.is_video]}
    if timed is not None:
        waiting[timed.video_token_id] = [ref for ref in media if ref.is_video]
    for (token, refs), kind in zip(waiting.items(), ("pictures", "videos"), strict=False):
        if (marks := list(ids).count(token)) != len(refs):
            raise ValueError(f"it has {marks} placeholders for {len(refs)} {kind}")
    following = {token: iter(refs) for token, refs in waiting.items()}
    found: list[int] = []
    placed: list[PlacedMedia] = []
    for token in ids:
        if token not in following:
            found.append(token)
            continue
        ref = next(following[token])
        if ref.is_video and timed is not None:
            grid, pieces = timed.grid_of_ref(ref), timed.timed_ids(ref)
        else:
            grid = tokens.grid_of(ref.width, ref.height)
            pieces = [tokens.placeholder_ids(grid)]
        for part, piece in enumerate(pieces):
            start, number = len(found) + piece.index(token), piece.count(token)
            one = (1, *grid[1:]) if ref.is_video else grid
            placed.append(PlacedMedia(ref, start, number, one, part=part, num_parts=len(pieces)))
            found += piece
    return found, tuple(placed)


def placed_in(turns: Sequence[Turn]) -> tuple[PlacedMedia, ...]:
    """Returns the pictures of turns, with places that count from the first token of the first turn."""
    firsts = itertools.accumulate((turn.num_tokens for turn in turns), initial=0)
    return tuple(
        msgspec.structs.replace(each, start=each.start + first)
        for turn, first in zip(turns, firsts, strict=False)
        for each in turn.media
    )
