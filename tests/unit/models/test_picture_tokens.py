"""Grids and placeholder tokens by size alone, compared with transformers' processor."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_processors import write_processor
from yatt.errors import ConfigError
from yatt.models.pictures.tokens import picture_tokens, unlimited_tokens

IDS = {"vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": 5}


def folder_of(
    folder: Path, processor: dict[str, Any], name: str = "preprocessor_config.json", kind: str = "qwen3_vl"
) -> str:
    folder.mkdir(exist_ok=True)
    ids = (
        {key.replace("vision_", "image_"): each for key, each in IDS.items()} if kind == "glm4v_moe" else IDS
    )
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "vision_config": {}, **ids}))
    (folder / name).write_text(json.dumps(processor))
    return str(folder)


@pytest.mark.parametrize(
    ("kind", "patch", "limits"),
    [
        ("qwen2_5_vl", 14, (3136, 50_000)), ("qwen3_vl", 16, (65_536, 1_000_000)),
        ("glm4v_moe", 14, (12_544, 50_001)), ("glm4v_moe", 14, (100_001, 2_000_000)),
    ],
)  # fmt: skip
def test_every_grid_is_that_of_the_processor(
    tmp_path: Path, kind: str, patch: int, limits: tuple[int, int]
) -> None:
    from transformers import Glm4vImageProcessor, Qwen2VLImageProcessor

    sizes = {"shortest_edge": limits[0], "longest_edge": limits[1]}
    make = Glm4vImageProcessor if kind == "glm4v_moe" else Qwen2VLImageProcessor
    processor = make(patch_size=patch, merge_size=2, size=sizes)
    processor.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    tokens = picture_tokens(folder_of(tmp_path / "model", settings, kind=kind))
    draw, refused = random.Random(patch), 0
    for _ in range(400):
        width, height = (round(2 ** draw.uniform(0, 12)) for _ in range(2))
        try:
            expected = processor.get_number_of_image_patches(height, width, {})
        except ValueError:
            refused += 1
            with pytest.raises(ValueError, match="no side may be more than 200 times the other"):
                tokens.grid_of(width, height)
        else:
            grid = tokens.grid_of(width, height)
            assert grid[0] * grid[1] * grid[2] == expected, (width, height)
            assert len(tokens.placeholder_ids(grid)) == expected // 4
    assert 0 < refused < 200


def test_who_asks_for_no_sizes_needs_no_limits(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", {"patch_size": 16, "merge_size": 2})
    assert unlimited_tokens(folder).mark_ids == (3, 5, 4)
    with pytest.raises(ConfigError, match="min_pixels is missing"):
        picture_tokens(folder)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "my_vl"}, "pictures are taken by models of the types qwen2_5_vl, .* not 'my_vl'"),
        ({"model_type": "qwen3"}, "not 'qwen3'"),
        ({"vocab_size": 5}, "image_token_id is 5, beyond the 5 tokens of vocab_size"),
        (None, "has no config.json; name a Hugging Face model folder"),
    ],
)
def test_a_folder_whose_pictures_cannot_become_tokens_is_refused(
    tmp_path: Path, config: dict[str, Any] | None, says: str
) -> None:
    folder = folder_of(tmp_path / "model", {"patch_size": 16, "merge_size": 2})
    file = Path(folder, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | (config or {})))
    if config is None:
        file.unlink()
    with pytest.raises(ConfigError, match=says):
        unlimited_tokens(folder)


def test_limits_of_the_run_take_the_place_of_the_folders(tmp_path: Path) -> None:
    sizes = {"size": {"shortest_edge": 1024, "longest_edge": 1 << 20}}
    folder = folder_of(tmp_path / "model", {"patch_size": 16, "merge_size": 2, **sizes})
    assert picture_tokens(folder).grid_of(640, 640) == (1, 40, 40)
    assert picture_tokens(folder, 0, 320 * 320).grid_of(640, 640) == (1, 20, 20)
    assert picture_tokens(folder, 640 * 640, 0).grid_of(64, 64) == (1, 40, 40)
    glm = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, **sizes}
    other = folder_of(tmp_path / "other", glm, kind="glm4v_moe")
    assert picture_tokens(other).grid_of(1024, 1024) == (1, 44, 44), "two frames of it count"
    assert picture_tokens(other, 0, 320 * 320).grid_of(640, 640) == (1, 20, 20)


@pytest.mark.parametrize(
    ("processor", "says"),
    [
        ({}, "has no preprocessor_config.json or processor_config.json with a patch_size"),
        ({"patch_size": "16"}, "patch_size is missing, or no whole number"),
        ({"patch_size": 16}, "merge_size is missing"),
        ({"patch_size": 16, "merge_size": 0}, "merge_size is missing, or no whole number of 1 or more"),
        ({"patch_size": 16, "merge_size": 2}, "min_pixels is missing"),
        ({"patch_size": 16, "merge_size": 2, "min_pixels": 1, "max_pixels": True}, "max_pixels is missing"),
        ({"patch_size": 16, "merge_size": 2, "size": 3}, "min_pixels is missing"),
    ],
)
def test_a_processor_without_a_value_is_refused(tmp_path: Path, processor: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        picture_tokens(folder_of(tmp_path / "model", processor))


def test_older_names_and_the_newer_file_are_read(tmp_path: Path) -> None:
    old = {"patch_size": 14, "merge_size": 2, "min_pixels": 784, "max_pixels": 7840}
    new = {
        "image_processor": {
            "patch_size": 14,
            "merge_size": 2,
            "size": {"shortest_edge": 784, "longest_edge": 7840},
        }
    }
    first = picture_tokens(folder_of(tmp_path / "old", old))
    assert picture_tokens(folder_of(tmp_path / "new", new, "processor_config.json")) == first
    assert (first.image_token_id, first.mark_ids) == (5, (3, 5, 4))


def test_another_type_of_model_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", {"patch_size": 16})
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    with pytest.raises(ConfigError, match=r"pictures are taken by models of the types .*, not 'gemma3'"):
        picture_tokens(folder)


def tiles_in(folder: Path, **changes: Any) -> str:
    return str(write_processor(folder, "internvl", **changes))


@pytest.mark.parametrize(("least", "most"), [(1, 12), (1, 1), (2, 6), (3, 40)])
def test_every_picture_has_the_tiles_of_the_processor(tmp_path: Path, least: int, most: int) -> None:
    from transformers import AutoImageProcessor

    folder = tiles_in(tmp_path, min_patches=least, max_patches=most)
    processor, tokens = AutoImageProcessor.from_pretrained(folder), picture_tokens(folder)
    draw = random.Random(most)
    sizes = [[round(2 ** draw.uniform(0, 12)) for _ in range(2)] for _ in range(400)]
    sizes += [[56 * columns, 56 * rows] for columns in range(1, 9) for rows in range(1, 9)]
    for width, height in sizes:
        expected = processor.get_number_of_image_patches(height, width, {})
        if most > 1:  # for one tile the processor does not ask how many there are
            assert tokens.grid_of(width, height) == (expected, 4, 4), (width, height)
        assert tokens.placeholder_ids(tokens.grid_of(width, height)) == [3, *[5] * (4 * expected), 4]
    largest = tokens.placeholder_ids(tokens.grid_of(*tokens.largest_size))
    assert len(largest) == 2 + 4 * (most + (most > 1))


def test_limits_of_the_run_are_numbers_of_tiles(tmp_path: Path) -> None:
    folder, tile = tiles_in(tmp_path), 56 * 56
    limits = {(0, 0): (1, 4), (0, 3 * tile): (1, 3), (0, tile - 1): (1, 1), (tile + 1, 0): (2, 4)}
    for (least, most), expected in limits.items():
        tokens = picture_tokens(folder, least, most)
        assert (tokens.min_tiles, tokens.max_tiles) == expected
    assert unlimited_tokens(folder).max_tiles == 1024


def test_a_folder_whose_tiles_cannot_become_tokens_is_refused(tmp_path: Path) -> None:
    folder = Path(tiles_in(tmp_path))
    tokenizer, plain = folder / "tokenizer.json", (folder / "tokenizer.json").read_text()
    for wrong in ("{}", '{"added_tokens": 3}', '{"added_tokens": [{"id": "3", "content": "<img>"}, 4]}'):
        tokenizer.write_text(wrong)
        with pytest.raises(ConfigError, match=r"tokenizer.json has no added token '<img>'"):
            unlimited_tokens(str(folder))
    tokenizer.write_text(plain)
    names = {"start_image_token": "<begin>", "extra_special_tokens": {"end_image_token": "</img>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    with pytest.raises(ConfigError, match=r"no added token '<begin>', .* \(start_image_token"):
        unlimited_tokens(str(folder))
    (folder / "tokenizer_config.json").unlink()
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"text_config": {"vocab_size": 4}}))
    with pytest.raises(ConfigError, match=r"image_token_id is 5, beyond the 4 tokens"):
        unlimited_tokens(str(folder))
    with pytest.raises(ConfigError, match="it needs the height and width of a tile, 56"):
        unlimited_tokens(tiles_in(tmp_path / "other", size={"height": 56, "width": 28}))
    with pytest.raises(ConfigError, match="it needs the height and width of a tile, 56"):
        unlimited_tokens(tiles_in(tmp_path / "list", size={"height": [56], "width": {}}))
