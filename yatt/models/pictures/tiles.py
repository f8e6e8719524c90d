"""How InternVL writes pictures into prompts: tiles of one size, and after several of them the whole picture
once more, as small as a tile.

Source: transformers' `get_optimal_tiled_canvas` of GOT-OCR 2.0, whose processor InternVL uses; a test
compares tiles and ids.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from yatt.models.config_types import refused_model
from yatt.models.folder import CONFIG
from yatt.models.pictures.processor_files import read_processor, refuse_beyond, whole_number
from yatt.models.towers.tiled import MERGE, tile_size
from yatt.plain_files import read_json_object

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
MOST_TILES = 1024
_AROUND = {"start_image_token": "<img>", "end_image_token": "</img>"}
"""Keys of the tokenizer's config with the tokens around a picture, and their values if they are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTokens:
    """How pictures that are cut into tiles become tokens. A chat template writes the placeholder alone.

    Attributes:
        begin_id, end_id: the tokens before and after those of a picture.
        patch: pixels of a patch's side.
        tile: pixels of a tile's side.
        min_tiles, max_tiles: without the small picture.
    """

    image_token_id: int
    begin_id: int
    end_id: int
    patch: int
    tile: int
    min_tiles: int
    max_tiles: int

    @property
    def mark_ids(self) -> tuple[int, ...]:
        """What a chat template writes for a picture."""
        return (self.image_token_id,)

    @property
    def largest_size(self) -> tuple[int, int]:
        """Width and height of a picture with the most tokens."""
        columns, rows = _arrangements(self.min_tiles, self.max_tiles)[-1]
        return columns * self.tile, rows * self.tile

    def grid_of(self, width: int, height: int) -> tuple[int, int, int]:
        """Returns the number of tiles, and of patches in the height and width of a tile."""
        columns, rows = self.arrangement_of(width, height)
        number, side = columns * rows, self.tile // self.patch
        return number + (number > 1), side, side

    def arrangement_of(self, width: int, height: int) -> tuple[int, int]:
        """Returns how many tiles are side by side and below each other: those whose ratio is nearest, and of
        equal ones the most, as long as they have less than twice the picture's pixels."""
        ratio, pixels = width / height, width * height
        least, best = float("inf"), (1, 1)
        for columns, rows in _arrangements(self.min_tiles, self.max_tiles):
            far = abs(ratio - columns / rows)
            if far < least or (far == least and pixels > 0.5 * self.tile**2 * columns * rows):
                least, best = far, (columns, rows)
        return best

    def placeholder_ids(self, grid: tuple[int, int, int]) -> list[int]:
        """Returns one token for each square of patches, between those that begin and end a picture."""
        tiles, height, width = grid
        number = tiles * height * width // MERGE**2
        return [self.begin_id, *[self.image_token_id] * number, self.end_id]

    def probe_grid(self, height: int, width: int) -> tuple[int, int, int]:  # noqa: ARG002
        """The grid of a small picture: one tile, whatever its height and width in tokens are to be."""
        side = self.tile // self.patch
        return 1, side, side


@lru_cache(maxsize=16)
def _arrangements(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """Columns and rows of tiles, those of fewer tiles first."""
    sides = range(1, most + 1)
    found = [(columns, rows) for columns in sides for rows in sides if least <= columns * rows <= most]
    return tuple(sorted(found, key=lambda sizes: sizes[0] * sizes[1]))


def read_tiles(folder: Path, config: dict[str, Any], min_pixels: int, max_pixels: int) -> TileTokens:
    """Reads how the model in a folder cuts pictures into tiles.

    Args:
        config: content of its config.json.
        min_pixels, max_pixels: of all tiles together, instead of the folder's numbers of tiles; 0: as there.

    Raises:
        ConfigError: a file is missing or lacks a value.
        OSError: a transient error.
    """
    file, processor = read_processor(folder, "size")
    tile, patch = tile_size(config.get("vision_config"))
    sizes = processor["size"]
    if not isinstance(sizes, dict) or [sizes.get("height"), sizes.get("width")] != [tile, tile]:
        raise refused_model(
            f"{file} says size={sizes!r}; it needs the height and width of a tile, {tile} "
            "(vision_config.image_size)."
        )
    least = -(-min_pixels // tile**2) or whole_number({"min_patches": 1, **processor}, "min_patches", file)
    most = max_pixels // tile**2 if max_pixels else 0
    if not max_pixels:
        most = whole_number({"max_patches": 12, **processor}, "max_patches", file)
    image = whole_number(config, "image_token_id", folder / CONFIG, least=0)
    begin, end = _ids_around(folder)
    refuse_beyond(folder, config, {"image_token_id": image, "<img>": begin, "</img>": end})
    return TileTokens(
        image_token_id=image,
        begin_id=begin,
        end_id=end,
        patch=patch,
        tile=tile,
        min_tiles=min(least, MOST_TILES),
        max_tiles=min(max(most, least, 1), MOST_TILES),
    )


def _ids_around(folder: Path) -> tuple[int, int]:
    """The ids of the tokens before and after a picture."""
    settings = read_json_object(folder / TOKENIZER_CONFIG) or {}
    added = (read_json_object(folder / TOKENIZER) or {}).get("added_tokens")
    more = settings.get("extra_special_tokens")
    names = {**settings, **(more if isinstance(more, dict) else {})}
    known = {
        each.get("content"): each.get("id")
        for each in (added if isinstance(added, list) else [])
        if isinstance(each, dict) and isinstance(each.get("content"), str)
    }
    found = []
    for key, usual in _AROUND.items():
        name = names.get(key, usual)
        number = known.get(name) if isinstance(name, str) else None
        if type(number) is not int:
            raise refused_model(
                f"{folder / TOKENIZER} has no added token {name!r}, which stands around pictures ({key} of "
                f"{TOKENIZER_CONFIG}); copy the model's folder with its tokenizer."
            )
        found.append(number)
    return found[0], found[1]
