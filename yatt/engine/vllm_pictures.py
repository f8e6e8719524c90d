"""vLLM's input for prompts with prepared pictures: token ids with placeholders, and patches as bytes.

vLLM never sees a picture file: it would expand ids a second time, and prepare pixels by its own settings. It
normalises the bytes on the device (`mm_device_do_normalize`), so engines without that are refused; but for
tiles its code cannot, so they are normalised here. The hash of a picture names file and preparation: vLLM
keeps features by it. Each pair of a video's frames is a picture for vLLM: it asks for places and grids, and
not which placeholder token stands there.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch

from yatt.adapters.node_local.prepared_media import PreparedMedia, as_tiles, noise_picture, with_frames
from yatt.engine.media import prepared_picture
from yatt.engine.protocol import EngineOptions
from yatt.errors import ConfigError
from yatt.models.model import read_config
from yatt.models.pictures.probe import probe_media
from yatt.models.pictures.tiles import TileTokens
from yatt.models.pictures.tokens import FamilyTokens, PixelScale, pixel_scale, unlimited_tokens
from yatt.records import message as m

ON_DEVICE = "mm_device_do_normalize"


def picture_arguments(options: EngineOptions, known: set[str]) -> dict[str, Any]:
    """Returns vLLM's EngineArgs about pictures; without pictures it builds no encoder memory.

    Args:
        known: names of the EngineArgs that this version has.

    Raises:
        ConfigError: it cannot take prepared pictures.
    """
    if not options.takes_pictures:
        return {}
    if not options.most_pictures:
        return {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    if ON_DEVICE not in known:
        raise ConfigError(
            f"this vLLM takes no prepared pictures (it has no {ON_DEVICE}); install 0.32 or later."
        )
    arguments: dict[str, Any] = {
        "limit_mm_per_prompt": {"image": options.most_pictures, "video": 0},
        "mm_processor_cache_gb": 0,  # a node keeps prepared pictures in files
        ON_DEVICE: not isinstance(unlimited_tokens(options.model), TileTokens),
    }
    if options.device == "cpu":
        return arguments | {"skip_mm_profiling": True}
    return arguments | ({"mm_encoder_tp_mode": "data"} if options.tp_size > 1 else {})


def check_pictures(llm: Any, options: EngineOptions) -> None:
    """Checks that an engine normalises pictures itself, but for tiles: vLLM only warns if its model's code
    cannot.

    Raises:
        ConfigError: it does not.
    """
    if not options.most_pictures:
        return
    normalises = bool(getattr(llm.vllm_config.model_config.multimodal_config, ON_DEVICE, False))
    if normalises == isinstance(unlimited_tokens(options.model), TileTokens):
        raise ConfigError(f"{options.model}: vLLM's code of this model takes no prepared pictures.")


class PictureInputs:
    """Makes vLLM's inputs for prompts with pictures.

    The completions of a prompt share the pixels of its pictures: an item is used again as long as a request
    in the engine has it. Its key names its content, so it is never out of date.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options, self._tokens = options, unlimited_tokens(options.model)
        self._made = item_maker(options.model, self._tokens)
        self._items: WeakValueDictionary[tuple[str, tuple[int, int, int], int], Any] = WeakValueDictionary()

    def input_of(self, sample: m.SampleRequest, prompt_ids: list[int]) -> Any:
        """Returns vLLM's input for a request; its `prompt_ids` have placeholder tokens.

        Raises:
            WorkerFailed: a prepared file cannot be read.
        """
        return _input_of(prompt_ids, sample.media, [self._item(each) for each in sample.media])

    def probe_input(self, ids: list[int]) -> Any:
        """Returns vLLM's input for a sequence of the sync probe."""
        if not (media := probe_media(ids, self._tokens)):
            return {"prompt_token_ids": ids}
        return _input_of(ids, media, [self._made(noise_picture(self._tokens))])

    def _item(self, media: m.PlacedMedia) -> Any:
        key = media.prepared, media.file_grid, media.part
        item = self._items.get(key)
        if item is None:
            item = self._items[key] = self._made(prepared_picture(media, self._options))
        return item


def _input_of(ids: list[int], media: Sequence[m.PlacedMedia], items: Sequence[Any]) -> Any:
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    places = [PlaceholderRange(offset=each.start, length=each.num_tokens) for each in media]
    hashes = [f"{each.prepared}.{each.part}" if each.ref.is_video else each.prepared for each in media]
    return mm_input(ids, MultiModalKwargsItems({"image": items}), {"image": hashes}, {"image": places})


def item_maker(model: str, tokens: FamilyTokens) -> Callable[[PreparedMedia], Any]:
    """Returns what makes vLLM's item of a prepared picture.

    Raises:
        ConfigError: the model's folder does not say how its tower wants pixels.
    """
    if isinstance(tokens, TileTokens):
        return partial(_tile_item, tokens, pixel_scale(model))
    return partial(_patch_item, frames_of(model))


def _patch_item(frames: int, picture: PreparedMedia) -> Any:
    """`frames`: how often a still picture's frame is repeated."""
    from vllm.multimodal.inputs import MultiModalFieldConfig

    grids = torch.tensor([picture.grid])
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    return _item_of(
        {"pixel_values": torch.from_numpy(with_frames(picture, frames)), "image_grid_thw": grids}, fields
    )


def _tile_item(tokens: TileTokens, scale: PixelScale, picture: PreparedMedia) -> Any:
    from vllm.multimodal.inputs import MultiModalFieldConfig

    numbers = torch.tensor([picture.grid[0]])
    mean, deviation = (torch.tensor(each)[:, None, None] for each in (scale.mean, scale.deviation))
    pixels = torch.from_numpy(as_tiles(picture)).float() * scale.factor
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", numbers),
        "image_num_patches": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        "image_token_id": MultiModalFieldConfig.shared("image", 1, keep_on_cpu=True),
    }
    values = {
        "pixel_values": (pixels - mean) / deviation,
        "image_num_patches": numbers,
        "image_token_id": torch.tensor(tokens.image_token_id),
    }
    return _item_of(values, fields)


def _item_of(values: dict[str, torch.Tensor], fields: dict[str, Any]) -> Any:
    from vllm.multimodal.inputs import MultiModalKwargsItems

    return MultiModalKwargsItems.from_hf_inputs(values, fields)["image"][0]


def frames_of(model: str) -> int:
    """Returns `temporal_patch_size` of a model folder.

    Raises:
        ConfigError: its config.json has none.
    """
    vision = read_config(model).get("vision_config")
    found = vision.get("temporal_patch_size") if isinstance(vision, dict) else None
    if type(found) is not int or not 1 <= found <= 64:
        raise ConfigError(f"model.path: {model}: config.json says no vision_config.temporal_patch_size.")
    return found
