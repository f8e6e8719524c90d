"""InternVL: a decoder of another family, and a ViT over tiles of one size before it.

Its files have the names of transformers' older versions, which newer ones still write and vLLM reads. A key
of `vision_config` that is not known here is refused, since it may change what the tower computes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from yatt.models.config_types import config_size, flag_of, refused_config, refused_model
from yatt.models.rows import WeightRow
from yatt.models.shape import Shape, TiledVision, Vision
from yatt.models.towers.tower import TowerKind, TowerRows

Values = Mapping[str, Any]
MERGE = 2
"""Patches of a token's side: `downsample_ratio` is 0.5."""

_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "attention_bias": False,
    "use_qk_norm": False, "intermediate_size": 4096, "norm_type": "layer_norm", "image_size": 448,
    "patch_size": 14, "use_mean_pooling": True,
}  # fmt: skip
_NEEDED: dict[str, Any] = {
    "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_dropout": 0.0, "projection_dropout": 0.0,
    "dropout": 0.0, "drop_path_rate": 0.0, "num_channels": 3, "use_mask_token": False,
    "use_absolute_position_embeddings": True,
}  # fmt: skip
_NEEDED_ABOVE: dict[str, Any] = {
    "downsample_ratio": 0.5, "projector_hidden_act": "gelu", "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}  # fmt: skip
_META = frozenset({
    "model_type", "initializer_range", "dtype", "torch_dtype", "transformers_version", "architectures",
    "layer_norm_eps", "layer_scale_init_value", "initializer_factor",
})  # fmt: skip


def _tiled_tower(prefix: str, vision: Vision, out_size: int) -> Iterator[WeightRow]:
    """The tower and its connector."""
    assert isinstance(vision, TiledVision), "read by `read_tiled`"
    rows, hidden = TowerRows(prefix), vision.hidden_size
    norm = rows.scale if vision.has_rms_norm else rows.layer_norm
    patch = vision.patch_size
    yield rows.weight("vision_tower.embeddings.cls_token", 1, 1, hidden)
    yield rows.weight("vision_tower.embeddings.position_embeddings", 1, vision.num_positions, hidden)
    yield rows.weight("vision_tower.embeddings.patch_embeddings.projection.weight", hidden, 3, patch, patch)
    yield rows.weight("vision_tower.embeddings.patch_embeddings.projection.bias", hidden)
    for index in range(vision.depth):
        block = f"vision_tower.encoder.layer.{index}."
        for each in ("q_proj", "k_proj", "v_proj"):
            own = rows.linear if vision.has_qkv_bias else rows.matrix
            yield from own(f"{block}attention.{each}", hidden, hidden)
        yield from rows.linear(f"{block}attention.projection_layer", hidden, hidden)
        for each in ("q_norm", "k_norm") if vision.has_qk_norm else ():
            yield from rows.scale(f"{block}attention.{each}", hidden)
        yield from norm(f"{block}layernorm_before", hidden)
        yield from norm(f"{block}layernorm_after", hidden)
        yield rows.weight(f"{block}lambda_1", hidden)
        yield rows.weight(f"{block}lambda_2", hidden)
        yield from rows.linear(f"{block}mlp.fc1", vision.mlp_size, hidden)
        yield from rows.linear(f"{block}mlp.fc2", hidden, vision.mlp_size)
    if vision.has_last_norm:
        yield from rows.layer_norm("vision_tower.layernorm", hidden)
    yield from rows.layer_norm("multi_modal_projector.layer_norm", vision.merged_size)
    yield from rows.linear("multi_modal_projector.linear_1", out_size, vision.merged_size)
    yield from rows.linear("multi_modal_projector.linear_2", out_size, out_size)


INTERN = TowerKind(
    activation="gelu", text="language_model.model.", head="language_model.", tower="", rows=_tiled_tower,
    keys=frozenset({*_DEFAULTS, *_NEEDED}), marks=("image_token_id",),
    has_tiles=True,
)  # fmt: skip


def read_tiled(values: Values, readers: Mapping[str, Callable[[Values], Shape]]) -> Shape:
    """Shape of a decoder with a tower for tiles.

    Args:
        values: content of config.json.
        readers: of the decoder's part, by its model type; the first one is transformers' default.

    Raises:
        ConfigError: a key has a value that is not implemented, or is not known.
    """
    for key, wanted in _NEEDED_ABOVE.items():
        _need(values, key, wanted, key)
    text = values.get("text_config")
    if not isinstance(text, Mapping):
        raise refused_model("config.json has no text_config.")
    kind = str(text.get("model_type", next(iter(readers))))
    if kind not in readers:
        raise refused_config(f"says text_config.model_type={kind!r}; it needs one of {', '.join(readers)}.")
    if text.get("tie_word_embeddings") and values.get("tie_word_embeddings") is False:
        raise refused_config(
            "says tie_word_embeddings=False, and its text_config says True: vLLM would not use "
            "the output matrix of the files. Write the same in both places, as the files are."
        )
    shape = readers[kind](_without_dynamic_rope({**text, "model_type": kind}))
    vision = _tiled_vision(values.get("vision_config"), shape.hidden_size)
    tokens = (vision.num_positions - 1) // MERGE**2
    _need({"image_seq_length": 256, **values}, "image_seq_length", tokens, "image_seq_length")
    return replace(shape, vision=vision)


def tile_size(values: object) -> tuple[int, int]:
    """Returns the sides in pixels of a tile and of a patch, from `vision_config`.

    Raises:
        ConfigError: they are missing, no squares, or a tile has no whole number of tokens.
    """
    found = {**_DEFAULTS, **(values if isinstance(values, Mapping) else {})}
    sides = []
    for key in ("image_size", "patch_size"):
        size = found[key]
        if isinstance(size, list | tuple):
            if len(size) != 2 or size[0] != size[1]:
                raise refused_config(f"says vision_config.{key}={size!r}; it needs a square.")
            size = size[0]
        sides.append(config_size({key: size}, key))
    tile, patch = sides
    if tile % (patch * MERGE):
        raise refused_config(
            f"says vision_config.image_size={tile}; it needs a multiple of {patch * MERGE}, the "
            "side of a token."
        )
    return tile, patch


def _tiled_vision(found: object, out_size: int) -> TiledVision:
    if not isinstance(found, Mapping):
        raise refused_model("config.json has no vision_config.")
    if unknown := sorted(found.keys() - INTERN.keys - _META):
        raise refused_config(f"says vision_config.{unknown[0]}={found[unknown[0]]!r}, which is not known.")
    for key, wanted in _NEEDED.items():
        _need(found, key, wanted, f"vision_config.{key}")
    filled = {**_DEFAULTS, **found}
    norm, hidden = filled["norm_type"], config_size(filled, "hidden_size")
    if norm not in ("layer_norm", "rms_norm"):
        raise refused_config(f"says vision_config.norm_type={norm!r}; it needs layer_norm or rms_norm.")
    if hidden % config_size(filled, "num_attention_heads"):
        raise refused_model("config.json: vision_config.num_attention_heads does not divide its hidden_size.")
    (tile, patch), depth = tile_size(found), config_size(filled, "num_hidden_layers")
    mlp, merged = config_size(filled, "intermediate_size"), hidden * MERGE**2
    return TiledVision(
        depth=depth, hidden_size=hidden, mlp_size=mlp, patch_size=patch, frames=1, merge_size=MERGE,
        num_positions=(tile // patch) ** 2 + 1, levels=(), num_whole=depth,
        matrices=(4 * hidden**2 + 2 * hidden * mlp, merged * out_size + out_size**2),
        has_qkv_bias=flag_of(filled, "attention_bias"), has_qk_norm=flag_of(filled, "use_qk_norm"),
        has_rms_norm=norm == "rms_norm", has_last_norm=not flag_of(filled, "use_mean_pooling"),
    )  # fmt: skip


def _need(values: Values, key: str, wanted: object, name: str) -> None:
    if key in values and values[key] != wanted:
        raise refused_config(f"says {name}={values[key]!r}; it needs {wanted!r}.")


def _without_dynamic_rope(text: dict[str, Any]) -> dict[str, Any]:
    """Released files have a scaling that begins beyond `max_position_embeddings`, where no run gets."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = text.get(key)
        if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) != "dynamic":
            continue
        if other := sorted(rope.keys() - {"rope_type", "type", "factor", "rope_theta"}):
            raise refused_config(f"says text_config.{key} with {other[0]}, which is not known.")
        text[key] = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else None
    return text
