"""Pictures in a micro-batch: positions with three axes, the places of pictures, and which feature each has.

A picture is known by its place, never by a token: the policy may sample a placeholder token, which is no
picture. Each picture is in a micro-batch once, however many samples show it.

Suffixes: S tokens of the whole stream, M places of pictures on this context-parallel rank.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from yatt.records.message import PlacedMedia


class Picture(NamedTuple):
    """A picture by its file's digest, and its patches in time, height and width; or a part of a video."""

    sha256: str
    grid: tuple[int, int, int]
    part: int = 0


def shown_picture(media: PlacedMedia) -> Picture:
    """Returns the picture of a place in a sample, or the part of a video."""
    return Picture(media.ref.sha256, media.grid, media.part)


class PlacedSequence(NamedTuple):
    """The tokens of a sequence that are input, and its pictures."""

    num_tokens: int
    media: tuple[PlacedMedia, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaBatch:
    """What a model that takes pictures needs beside tokens; also where there is no picture.

    Args:
        positions_3S: int64, of each token of the whole stream: time, height and width.
        places_M: int64, places in this rank's tokens whose embedding is a picture's feature.
        order_M: int64, the row of each among the features of `pictures`, one picture after the other.
        pictures: each once.
    """

    positions_3S: Tensor
    places_M: Tensor
    order_M: Tensor
    pictures: tuple[Picture, ...]


class AddedLevels(NamedTuple):
    """Features that the first layers add to their output (DeepStack): rows `order_M` of each level [N, H], at
    these places."""

    places_M: Tensor
    order_M: Tensor
    levels: list[Tensor]


def media_batch(
    sequences: Sequence[PlacedSequence],
    lengths: Sequence[int],
    held_S: NDArray[np.int64],
    merge_size: int,
    device: torch.device,
) -> MediaBatch:
    """Returns what a micro-batch has of pictures.

    Args:
        lengths: of the sequences in the stream with their padding; further ones are padding only.
        held_S: places of the stream on this context-parallel rank.
        merge_size: patches of a token's side; 0: positions do not depend on pictures.
    """
    bounds = [0, *itertools.accumulate(lengths)]
    features_S = np.full(bounds[-1], -1, np.int64)
    positions = [np.tile(np.arange(length), (3, 1)) for length in lengths]
    firsts: dict[Picture, int] = {}
    num_features = 0
    for index, (sequence, begin) in enumerate(zip(sequences, bounds, strict=False)):
        axes = positions_of(sequence.num_tokens, sequence.media, merge_size)
        positions[index][:, : sequence.num_tokens] = axes
        for each in sequence.media:
            picture = shown_picture(each)
            if picture not in firsts:
                firsts[picture] = num_features
                num_features += each.num_tokens
            end = min(each.start + each.num_tokens, sequence.num_tokens)  # the last token is only a label
            features = firsts[picture] + np.arange(max(end - each.start, 0))
            features_S[begin + each.start : begin + end] = features
    held = features_S[held_S]
    (places_M,) = np.nonzero(held >= 0)
    return MediaBatch(
        positions_3S=torch.from_numpy(np.concatenate(positions, 1)).to(device),
        places_M=torch.from_numpy(places_M).to(device),
        order_M=torch.from_numpy(held[places_M]).to(device),
        pictures=tuple(firsts),
    )


def positions_of(num_tokens: int, media: Sequence[PlacedMedia], merge_size: int) -> NDArray[np.int64]:
    """Returns positions int64 [3, num_tokens] with the axes time, height and width.

    The axes of text are equal. A picture's tokens begin where the text before it ends, and differ in height
    and width; the text after it goes on beyond its longer side (Qwen2-VL, arXiv:2409.12191, section 2.1).

    Args:
        media: in the order of their places, which do not overlap; one may end beyond the tokens.
        merge_size: patches of a token's side; 0: all axes are those of text.
    """
    if not merge_size:
        return np.tile(np.arange(num_tokens), (3, 1))
    return np.concatenate([*_pieces(num_tokens, media, merge_size)], 1)[:, :num_tokens]


def _pieces(num_tokens: int, media: Sequence[PlacedMedia], merge_size: int) -> Iterator[NDArray[np.int64]]:
    place = position = 0
    for each in media:
        yield np.tile(np.arange(each.start - place) + position, (3, 1))
        position += each.start - place
        time, height, width = each.grid[0], each.grid[1] // merge_size, each.grid[2] // merge_size
        yield np.indices((time, height, width)).reshape(3, -1) + position
        position += max(height, width)
        place = each.start + each.num_tokens
    yield np.tile(np.arange(max(num_tokens - place, 0)) + position, (3, 1))
