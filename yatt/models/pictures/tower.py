"""Models that take pictures: a decoder that another family reads, and a tower of transformers before it.

The tower's parameters are its own, one row each: it is not cut by tensor parallelism. A key of
`vision_config` that is not known here is refused, since it may change what the tower computes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from yatt.errors import ConfigError
from yatt.models.dense import config_size
from yatt.models.rows import VISION, Part, WeightRow
from yatt.models.shape import RopeAxes, Shape, Vision

CONNECTORS = ("merger.", "deepstack_merger_list.")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerKind:
    """A kind of tower.

    Args:
        activation: its `hidden_act`.
        keys: further keys of `vision_config`, which the tower itself reads.
        text: begins the names of the decoder's tensors in files, in place of `model.`.
        tower: begins the names of the tower's.
        is_interleaved: how the axes of positions share a head's elements.
    """

    activation: str
    keys: frozenset[str]
    text: str
    tower: str
    is_interleaved: bool


QWEN2_5 = TowerKind(
    activation="silu", text="model.", tower="visual.", is_interleaved=False,
    keys=frozenset({"window_size", "fullatt_block_indexes", "tokens_per_second"}),
)  # fmt: skip
QWEN3 = TowerKind(
    activation="gelu_pytorch_tanh", text="model.language_model.", tower="model.visual.", is_interleaved=True,
    keys=frozenset({"num_position_embeddings", "deepstack_visual_indexes"}),
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
    if sum(sections) * 2 != shape.attention.head_dim:
        raise ConfigError(
            f"model.path: config.json says mrope_section={list(sections)}; its sum has to be half of a "
            f"head's {shape.attention.head_dim} elements."
        )
    axes = RopeAxes(sections=sections, is_interleaved=kind.is_interleaved)
    return replace(shape, rope_axes=axes, vision=_vision(values.get("vision_config"), kind, shape))


def seeing_rows(shape: Shape, kind: TowerKind, text_rows: list[WeightRow]) -> list[WeightRow]:
    """The weight table: the decoder's rows under the names that files have, then the tower's."""
    assert shape.vision is not None, "read by `read_seeing`"
    renamed = [
        replace(row, parts=tuple(replace(p, name=_renamed(p.name, kind.text)) for p in row.parts))
        for row in text_rows
    ]
    tower = _qwen2_5_tower if kind is QWEN2_5 else _qwen3_tower
    return [*renamed, *tower(shape.vision, shape.hidden_size)]


def _renamed(name: str, prefix: str) -> str:
    return prefix + name.removeprefix("model.") if name.startswith("model.") else name


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
        raise ConfigError(
            f"model.path: config.json says mrope_section={found!r}; it needs a list of three whole numbers."
        )
    return found[0], found[1], found[2]


def _vision(found: object, kind: TowerKind, shape: Shape) -> Vision:
    if not isinstance(found, Mapping):
        raise ConfigError("model.path: config.json has no vision_config.")
    if unknown := sorted(found.keys() - _SIZES.keys() - _META - kind.keys):
        raise ConfigError(
            f"model.path: config.json says vision_config.{unknown[0]}={found[unknown[0]]!r}, which is not "
            "known."
        )
    wanted = {
        "hidden_act": (kind.activation,), "in_channels": (3,), "in_chans": (3,), "rope_parameters": _AXIAL,
        "out_hidden_size": (shape.hidden_size,), "spatial_patch_size": (found.get("patch_size"),),
    }  # fmt: skip
    for key, values in wanted.items():
        if key in found and found[key] not in values:
            raise ConfigError(
                f"model.path: config.json says vision_config.{key}={found[key]!r}; it needs {values[0]!r}."
            )
    sizes = {name: config_size({key: found.get(key)}, key) for key, name in _SIZES.items()}
    if sizes["hidden_size"] % config_size(found, "num_heads"):
        raise ConfigError("model.path: config.json: vision_config.num_heads does not divide its hidden_size.")
    whole = found.get("fullatt_block_indexes")
    return Vision(
        **sizes, num_positions=_positions(found, kind), levels=_levels(found, kind, shape),
        is_gated=kind is QWEN2_5, num_whole=len(whole) if isinstance(whole, list) else sizes["depth"],
    )  # fmt: skip


def _positions(found: Mapping[str, Any], kind: TowerKind) -> int:
    return config_size(found, "num_position_embeddings") if kind is QWEN3 else 0


def _levels(found: Mapping[str, Any], kind: TowerKind, shape: Shape) -> tuple[int, ...]:
    if kind is not QWEN3:
        return ()
    levels = found.get("deepstack_visual_indexes")
    depth = found.get("depth")
    is_list = isinstance(levels, list | tuple) and len(levels) <= shape.num_layers
    if not is_list or not all(type(each) is int and 0 <= each < int(depth or 0) for each in levels or ()):
        raise ConfigError(
            f"model.path: config.json says vision_config.deepstack_visual_indexes={levels!r}; it needs "
            "numbers of the tower's blocks, at most as many as the decoder has layers."
        )
    return tuple(levels or ())


# ---- the towers' tables -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rows:
    """Makes rows of a tower; `prefix` begins the names of its tensors in files."""

    prefix: str

    def weight(self, name: str, num_rows: int, *tail: int) -> WeightRow:
        """A tensor [num_rows, *tail]."""
        width = 1 if tail else 0
        for each in tail:
            width *= each
        part = Part(self.prefix + name, num_rows)
        return WeightRow(name=VISION + name, parts=(part,), width=width, tail=tail if len(tail) > 1 else ())

    def linear(self, name: str, num_rows: int, width: int) -> Iterator[WeightRow]:
        """A matrix and its bias."""
        yield self.weight(f"{name}.weight", num_rows, width)
        yield self.weight(f"{name}.bias", num_rows)

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


def _qwen2_5_tower(vision: Vision, out_size: int) -> Iterator[WeightRow]:
    rows, hidden, merged = _Rows(QWEN2_5.tower), vision.hidden_size, vision.merged_size
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


def _qwen3_tower(vision: Vision, out_size: int) -> Iterator[WeightRow]:
    rows, hidden, merged = _Rows(QWEN3.tower), vision.hidden_size, vision.merged_size
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
