"""Sequences of the sync probe: random tokens, and one with a picture where prompts have pictures.

The picture is noise that engine and trainer make by themselves. Its place is that of the placeholder tokens:
a probe has no others.
"""

import hashlib
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from yatt.models.folder import CONFIG, decoder_config
from yatt.models.pictures.tokens import FamilyTokens, unlimited_tokens
from yatt.records.episode import MediaRef, PlacedMedia

HEIGHT, WIDTH = 4, 6
"""Tokens of the picture; its axes differ, so that a mistake about positions shows."""

NAME = hashlib.sha256(b"yatt sync probe").hexdigest()
"""Digest of the picture, for caches of features."""


@dataclass(frozen=True, slots=True)
class ProbeTokens:
    """The tokens of which sequences are made; `pictures` is None where prompts have none."""

    vocab_size: int
    pictures: FamilyTokens | None

    def sequences(self, draw: random.Random, num_prompts: int, num_tokens: int, most: int) -> list[list[int]]:
        """Returns `num_prompts` sequences of text, and one with a picture and at most as much text, unless
        the picture alone is too long for engines.

        Args:
            most: tokens of the longest sequence that engines take.
        """
        rows = [[draw.randrange(self.vocab_size) for _ in range(num_tokens)] for _ in range(num_prompts)]
        if (tokens := self.pictures) is None:
            return rows
        picture = _written_picture(tokens)
        begin, pad = picture[0], tokens.image_token_id
        rows = [[begin if token == pad else token for token in row] for row in rows]
        room = min(num_tokens, most - len(picture))
        if not rows or room < 0:
            return rows
        before, after = rows[0][: room // 2], rows[-1][: room - room // 2]
        return [*rows, [*before, *picture, *after]]


def read_probe_tokens(model: str, *, has_pictures: bool) -> ProbeTokens:
    """Reads a model folder.

    Raises:
        ConfigError: it does not say how pictures become tokens.
        OSError: a transient error.
    """
    values = json.loads((Path(model) / CONFIG).read_text())
    return ProbeTokens(
        int(decoder_config(values)["vocab_size"]), unlimited_tokens(model) if has_pictures else None
    )


def probe_media(ids: Sequence[int], tokens: FamilyTokens) -> tuple[PlacedMedia, ...]:
    """Returns the picture of a probe's sequence with its place; nothing for one of text."""
    if (number := list(ids).count(tokens.image_token_id)) == 0:
        return ()
    start = list(ids).index(tokens.image_token_id)
    return (
        PlacedMedia(MediaRef("", NAME, *_size_of(tokens)), start, number, _grid_of(tokens), prepared=NAME),
    )


def noise_patches(tokens: FamilyTokens) -> tuple[tuple[int, int, int], bytes]:
    """Returns the picture's grid, and its patches as bytes: [rows, 3 * patch * patch]."""
    grid = _grid_of(tokens)
    size = math.prod(grid) * 3 * tokens.patch**2
    return grid, hashlib.shake_256(NAME.encode()).digest(size)


def _written_picture(tokens: FamilyTokens) -> list[int]:
    """The picture as a prompt has it; the first token is none of its placeholders."""
    inner = tokens.placeholder_ids(_grid_of(tokens))
    marks = ([mark] if mark != tokens.image_token_id else inner for mark in tokens.mark_ids)
    return [token for mark in marks for token in mark]


def _size_of(tokens: FamilyTokens) -> tuple[int, int]:
    _, height, width = _grid_of(tokens)
    return width * tokens.patch, height * tokens.patch


def _grid_of(tokens: FamilyTokens) -> tuple[int, int, int]:
    return tokens.probe_grid(HEIGHT, WIDTH)
