"""Models that take pictures: a decoder that another family reads, and a tower of transformers before it.

A key of `vision_config` that is not known here is refused, since it may change what the tower computes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from yatt.models.config_types import config_size, refused_config, refused_model
from yatt.models.rows import VISION, Part, WeightRow
from yatt.models.shape import RopeAxes, Shape, Vision

CONNECTORS = ("merger.", "deepstack_merger_list.", "downsample.", "multi_modal_projector.")
"""Begin the names of what makes tokens of a tower's features, after `VISION`."""

_SIZES = {
    "depth": "depth", "hidden_size": "hidden_size", "intermediate_size": "mlp_size",
    "patch_size": "patch_size", "temporal_patch_size": "frames", "spatial_merge_size": "merge_size",
}  # fmt: skip
_META = frozenset({
    "model_type", "num_heads", "initializer_range", "dtype", "torch_dtype", "transformers_version",
    "out_hidden_size", "hidden_act", "in_channels", "in_chans", "spatial_patch_size", "rope_parameters",
    "architectures",
})  # fmt: skip
_AXIAL = ({"rope_theta": 10000.0, "rope_type": "axial"}, {"rope_theta": 10000.0, "rope_type": "default"})


def trains_parameter(name: str, part: str) -> bool:
    """Whether a tower's parameter is trained, by `vision.train`; `VISION` may begin its name."""
    return part == "all" or (part == "connector" and name.removeprefix(VISION).startswith(CONNECTORS))


# ---- the towers' tables: each parameter under its own name, not cut -----------------------------


@dataclass(frozen=True, slots=True)
class TowerRows:
    """Makes rows of a tower; `prefix` begins the names of its tensors in files."""

    prefix: str

    def weight(self, name: str, num_rows: int, *tail: int) -> WeightRow:
        """A tensor [num_rows, *tail]."""
        width = 1 if tail else 0
        for each in tail:
            width *= each
        part = Part(self.prefix + name, num_rows)
        return WeightRow(name=VISION + name, parts=(part,), width=width, tail=tail if len(tail) > 1 else ())

    def matrix(self, name: str, num_rows: int, width: int) -> Iterator[WeightRow]:
        """A matrix without a bias."""
        yield self.weight(f"{name}.weight", num_rows, width)

    def scale(self, name: str, size: int) -> Iterator[WeightRow]:
        """A norm without a bias."""
        yield self.weight(f"{name}.weight", size)

    def linear(self, name: str, num_rows: int, width: int) -> Iterator[WeightRow]:
        """A matrix and its bias."""
        yield self.weight(f"{name}.weight", num_rows, width)
        yield self.weight(f"{name}.bias", num_rows)

    def swiglu(self, prefix: str, size: int, width: int) -> Iterator[WeightRow]:
        """Gate, up and the matrix back, without biases."""
        yield self.weight(f"{prefix}gate_proj.weight", size, width)
        yield self.weight(f"{prefix}up_proj.weight", size, width)
        yield self.weight(f"{prefix}down_proj.weight", width, size)

    def layer_norm(self, name: str, size: int) -> Iterator[WeightRow]:
        """A layer norm: scale and bias."""
        yield self.weight(f"{name}.weight", size)
        yield self.weight(f"{name}.bias", size)

    def patches(self, vision: Vision) -> WeightRow:
        """The convolution over patches."""
        sides = (3, vision.frames, vision.patch_size, vision.patch_size)
        return self.weight("patch_embed.proj.weight", vision.hidden_size, *sides)

    def attention(self, block: str, hidden: int) -> Iterator[WeightRow]:
        """Queries, keys and values in one matrix, and the one back."""
        yield from self.linear(f"{block}attn.qkv", 3 * hidden, hidden)
        yield from self.linear(f"{block}attn.proj", hidden, hidden)


def _qwen2_5_tower(prefix: str, vision: Vision, out_size: int) -> Iterator[WeightRow]:
    """The tower of Qwen2.5-VL.

    Args:
        prefix: begins the names of its tensors in files.
        out_size: the decoder's hidden size.
    """
    rows, hidden, merged = TowerRows(prefix), vision.hidden_size, vision.merged_size
    yield rows.patches(vision)
    for index in range(vision.depth):
        block = f"blocks.{index}."
        yield rows.weight(f"{block}norm1.weight", hidden)
        yield rows.weight(f"{block}norm2.weight", hidden)
        yield from rows.attention(block, hidden)
        yield from rows.linear(f"{block}mlp.gate_proj", vision.mlp_size, hidden)
        yield from rows.linear(f"{block}mlp.up_proj", vision.mlp_size, hidden)
        yield from rows.linear(f"{block}mlp.down_proj", hidden, vision.mlp_size)
    yield rows.weight("merger.ln_q.weight", hidden)
    yield from rows.linear("merger.mlp.0", merged, merged)
    yield from rows.linear("merger.mlp.2", out_size, merged)


def _qwen3_tower(prefix: str, vision: Vision, out_size: int) -> Iterator[WeightRow]:
    """The tower of Qwen3-VL, as `_qwen2_5_tower`."""
    rows, hidden, merged = TowerRows(prefix), vision.hidden_size, vision.merged_size
    yield rows.patches(vision)
    yield rows.weight("patch_embed.proj.bias", hidden)
    yield rows.weight("pos_embed.weight", vision.num_positions, hidden)
    for index in range(vision.depth):
        block = f"blocks.{index}."
        yield from rows.layer_norm(f"{block}norm1", hidden)
        yield from rows.layer_norm(f"{block}norm2", hidden)
        yield from rows.attention(block, hidden)
        yield from rows.linear(f"{block}mlp.linear_fc1", vision.mlp_size, hidden)
        yield from rows.linear(f"{block}mlp.linear_fc2", hidden, vision.mlp_size)
    mergers = [
        ("merger", hidden),
        *((f"deepstack_merger_list.{i}", merged) for i in range(len(vision.levels))),
    ]
    for name, normed in mergers:
        yield from rows.layer_norm(f"{name}.norm", normed)
        yield from rows.linear(f"{name}.linear_fc1", merged, merged)
        yield from rows.linear(f"{name}.linear_fc2", out_size, merged)


def _glm4v_tower(prefix: str, vision: Vision, out_size: int) -> Iterator[WeightRow]:
    """The tower of GLM-4.5V, as `_qwen2_5_tower`. A block's feed-forward part is as wide as the decoder; the
    connector's is as wide as `intermediate_size` says."""
    rows, hidden, wide = TowerRows(prefix), vision.hidden_size, vision.mlp_size
    yield rows.weight("embeddings.position_embedding.weight", vision.num_positions, hidden)
    yield rows.patches(vision)
    yield rows.weight("patch_embed.proj.bias", hidden)
    for index in range(vision.depth):
        block = f"blocks.{index}."
        yield rows.weight(f"{block}norm1.weight", hidden)
        yield rows.weight(f"{block}norm2.weight", hidden)
        yield rows.weight(f"{block}attn.qkv.weight", 3 * hidden, hidden)
        yield rows.weight(f"{block}attn.proj.weight", hidden, hidden)
        yield from rows.swiglu(f"{block}mlp.", out_size, hidden)
    yield rows.weight("merger.proj.weight", out_size, out_size)
    yield from rows.layer_norm("merger.post_projection_norm", out_size)
    yield from rows.swiglu("merger.", wide, out_size)
    yield rows.weight("post_conv_layernorm.weight", hidden)
    yield rows.weight("downsample.weight", out_size, hidden, vision.merge_size, vision.merge_size)
    yield rows.weight("downsample.bias", out_size)
    yield rows.weight("post_layernorm.weight", hidden)


# ---- their configs ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerKind:
    """A kind of tower.

    Args:
        activation: its `hidden_act`.
        keys: further keys of `vision_config`, which the tower itself reads.
        text: begins the names of the decoder's tensors in files, in place of `model.`.
        head: begins the name of its output matrix.
        tower: begins the names of the tower's.
        rows: its weight table: from `tower`, sizes, and the decoder's hidden size.
        marks: keys of config.json with the tokens before, of and after a picture.
        is_interleaved: how the axes of positions share a head's elements.
        counts_frames: its processor's limits of pixels are those of a still picture's equal frames together.
        has_tiles: pictures are cut into tiles (`yatt.models.pictures.tiles`).
    """

    activation: str
    keys: frozenset[str]
    text: str
    tower: str
    rows: Callable[[str, Vision, int], Iterator[WeightRow]]
    head: str = ""
    marks: tuple[str, ...] = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    is_interleaved: bool = False
    counts_frames: bool = False
    has_tiles: bool = False


QWEN2_5 = TowerKind(
    activation="silu", text="model.", tower="visual.", rows=_qwen2_5_tower,
    keys=frozenset({"window_size", "fullatt_block_indexes", "tokens_per_second"}),
)  # fmt: skip
QWEN3 = TowerKind(
    activation="gelu_pytorch_tanh", text="model.language_model.", tower="model.visual.", rows=_qwen3_tower,
    keys=frozenset({"num_position_embeddings", "deepstack_visual_indexes"}), is_interleaved=True,
)  # fmt: skip
GLM4V = TowerKind(
    activation="silu", text="model.language_model.", tower="model.visual.", rows=_glm4v_tower,
    marks=("image_start_token_id", "image_token_id", "image_end_token_id"), counts_frames=True,
    keys=frozenset({
        "image_size", "attention_bias", "attention_dropout", "hidden_dropout_prob", "rms_norm_eps",
    }),
)  # fmt: skip


def read_seeing(
    values: Mapping[str, Any], kind: TowerKind, read_text: Callable[[Mapping[str, Any]], Shape]
) -> Shape:
    """Shape of a decoder with a tower.

    Args:
        values: content of config.json; older files have the decoder's keys at the top.
        read_text: reads the decoder's part.

    Raises:
        ConfigError: a key has a value that is not implemented, or is not known.
    """
    inner = values.get("text_config")
    text = dict(inner if isinstance(inner, Mapping) else values)
    text["model_type"] = values.get("model_type")
    tied = values.get("tie_word_embeddings")
    text["tie_word_embeddings"] = text.get("tie_word_embeddings", False) if tied is None else tied
    sections = _without_sections(text)
    shape = read_text(text)
    turned = int(shape.attention.head_dim * shape.rotary_share)
    if sum(sections) * 2 != turned:
        raise refused_config(
            f"says mrope_section={list(sections)}; its sum has to be half of the {turned} "
            "elements of a head that depend on positions."
        )
    axes = RopeAxes(sections=sections, is_interleaved=kind.is_interleaved)
    return replace(shape, rope_axes=axes, vision=_vision(values.get("vision_config"), kind, shape))


def seeing_rows(shape: Shape, kind: TowerKind, text_rows: list[WeightRow]) -> list[WeightRow]:
    """The weight table: the decoder's rows under the names that files have, then the tower's."""
    assert shape.vision is not None, "read by `read_seeing`"
    renamed = [_under_prefix(row, kind) for row in text_rows]
    return [*renamed, *kind.rows(kind.tower, shape.vision, shape.hidden_size)]


def _under_prefix(row: WeightRow, kind: TowerKind) -> WeightRow:
    """The row with the names that the files of a model with a tower have."""
    parts = tuple(replace(part, name=_renamed(part.name, kind)) for part in row.parts)
    own = row.stacked and replace(row.stacked, name=_renamed(row.stacked.name, kind))
    return replace(row, parts=parts, stacked=own)


def _renamed(name: str, kind: TowerKind) -> str:
    return kind.text + name.removeprefix("model.") if name.startswith("model.") else kind.head + name


def _without_sections(text: dict[str, Any]) -> tuple[int, int, int]:
    """Takes the sections of axes out of the decoder's settings of positions, and returns them."""
    found: Any = None
    for key in ("rope_parameters", "rope_scaling"):
        rope = text.get(key)
        if not isinstance(rope, Mapping):
            continue
        found = rope.get("mrope_section", found)
        plain = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
        for name in ("type", "rope_type"):
            if plain.get(name) == "mrope":
                plain[name] = "default"
        text[key] = plain
    is_list = isinstance(found, list | tuple) and len(found) == 3
    if not is_list or not all(type(each) is int and each > 0 for each in found):
        raise refused_config(f"says mrope_section={found!r}; it needs a list of three whole numbers.")
    return found[0], found[1], found[2]


def _vision(found: object, kind: TowerKind, shape: Shape) -> Vision:
    if not isinstance(found, Mapping):
        raise refused_model("config.json has no vision_config.")
    if unknown := sorted(found.keys() - _SIZES.keys() - _META - kind.keys):
        raise refused_config(f"says vision_config.{unknown[0]}={found[unknown[0]]!r}, which is not known.")
    wanted = {
        "hidden_act": (kind.activation,), "in_channels": (3,), "in_chans": (3,), "rope_parameters": _AXIAL,
        "out_hidden_size": (shape.hidden_size,), "spatial_patch_size": (found.get("patch_size"),),
        "attention_bias": (False,), "attention_dropout": (0.0,), "hidden_dropout_prob": (0.0,),
    }  # fmt: skip
    for key, values in wanted.items():
        if key in found and found[key] not in values:
            raise refused_config(f"says vision_config.{key}={found[key]!r}; it needs {values[0]!r}.")
    sizes = {name: config_size({key: found.get(key)}, key) for key, name in _SIZES.items()}
    if sizes["hidden_size"] % config_size(found, "num_heads"):
        raise refused_model("config.json: vision_config.num_heads does not divide its hidden_size.")
    whole, levels = found.get("fullatt_block_indexes"), _levels(found, kind, shape)
    return Vision(
        **sizes, num_positions=_positions(found, kind), levels=levels,
        num_whole=len(whole) if isinstance(whole, list) else sizes["depth"],
        matrices=_matrices(sizes, kind, 1 + len(levels), shape.hidden_size),
    )  # fmt: skip


def _matrices(sizes: Mapping[str, int], kind: TowerKind, num_mergers: int, out: int) -> tuple[int, int]:
    """Elements of the matrices of a block, and of those that a token passes after the blocks."""
    hidden, wide, merged = (
        sizes["hidden_size"],
        sizes["mlp_size"],
        sizes["hidden_size"] * sizes["merge_size"] ** 2,
    )
    if kind is GLM4V:
        return 4 * hidden**2 + 3 * hidden * out, merged * out + out**2 + 3 * out * wide
    block = 4 * hidden**2 + (3 if kind is QWEN2_5 else 2) * hidden * wide
    return block, num_mergers * merged * (merged + out)


def _positions(found: Mapping[str, Any], kind: TowerKind) -> int:
    if kind is GLM4V:
        image, patch = config_size(found, "image_size"), config_size(found, "patch_size")
        if image < patch:
            raise refused_config(f"says vision_config.image_size={image}, below patch_size={patch}.")
        return (image // patch) ** 2
    return config_size(found, "num_position_embeddings") if kind is QWEN3 else 0


def _levels(found: Mapping[str, Any], kind: TowerKind, shape: Shape) -> tuple[int, ...]:
    if kind is not QWEN3:
        return ()
    levels = found.get("deepstack_visual_indexes")
    depth = found.get("depth")
    is_list = isinstance(levels, list | tuple) and len(levels) <= shape.num_layers
    if not is_list or not all(type(each) is int and 0 <= each < int(depth or 0) for each in levels or ()):
        raise refused_config(
            f"says vision_config.deepstack_visual_indexes={levels!r}; it needs numbers of the "
            "tower's blocks, at most as many as the decoder has layers."
        )
    return tuple(levels or ())
