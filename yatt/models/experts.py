"""Reads the Hugging Face config of a decoder with mixtures of experts, with Qwen's or DeepSeek's keys."""

from collections.abc import Iterable
from dataclasses import replace

from yatt.models.config_types import Values, config_count, config_size, flag_of, positive_of, refused_config
from yatt.models.rows import Stacked, WeightRow
from yatt.models.shape import Experts, Shape, SigmoidRouter

SIGMOID_ALLOWED = {
    "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
}  # fmt: skip
"""Values with which such a router is what the trainer builds; released models have the last three keys."""


def with_experts(values: Values, dense: Shape, defaults: Values, *, is_shared: bool = False) -> Shape:
    """The shape with experts in place of the dense feed-forward parts of the layers that have some.

    Args:
        values: content of config.json.
        dense: the shape as if no layer had experts.
        defaults: the family's defaults of the keys about experts.
        is_shared: whether there is a shared expert, with a gate.

    Raises:
        ConfigError: a key has a value that is not implemented, or is no size.
    """
    filled = {**defaults, **{key: value for key, value in values.items() if value is not None}}
    shared = config_size(filled, "shared_expert_intermediate_size") if is_shared else 0
    experts = Experts(
        num_experts=_num_experts(filled), top_k=config_size(filled, "num_experts_per_tok"),
        size=config_size(filled, "moe_intermediate_size"), normalizes=flag_of(filled, "norm_topk_prob"),
        shared_size=shared, has_shared_gate=is_shared,
    )  # fmt: skip
    if experts.top_k > experts.num_experts:
        raise refused_config(
            f"says num_experts_per_tok={experts.top_k}, more than the {experts.num_experts} experts."
        )
    plain, every = _plain_layers(filled, dense.num_layers), config_size(filled, "decoder_sparse_step")
    layers = [
        layer if index in plain or (index + 1) % every else replace(layer, feed_forward=experts)
        for index, layer in enumerate(dense.layers)
    ]
    return replace(dense, layers=tuple(layers))


def with_sigmoid_experts(values: Values, dense: Shape, defaults: Values) -> Shape:
    """The shape with experts in all layers but the first ones, and routers with sigmoids and a bias, as in
    DeepSeek-V3 and GLM-4.5.

    Args:
        values: content of config.json.
        dense: the shape as if no layer had experts.
        defaults: the family's defaults of the keys about experts.

    Raises:
        ConfigError: a key has a value that is not implemented, or is no size.
    """
    filled = {**defaults, **{key: value for key, value in values.items() if value is not None}}
    for key, wanted in SIGMOID_ALLOWED.items():
        if filled.get(key, wanted) != wanted:
            raise refused_config(
                f"says {key}={filled[key]!r}, which the trainer cannot do; it needs {wanted!r}."
            )
    size = config_size(filled, "moe_intermediate_size")
    router = SigmoidRouter(
        scale=positive_of(filled, "routed_scaling_factor"), num_groups=config_size(filled, "n_group"),
        top_groups=config_size(filled, "topk_group"),
    )  # fmt: skip
    experts = Experts(
        num_experts=config_size(filled, "n_routed_experts"), top_k=config_size(filled, "num_experts_per_tok"),
        size=size, normalizes=True, shared_size=config_count(filled, "n_shared_experts") * size,
        sigmoid=router,
    )  # fmt: skip
    _check_choice(experts, router)
    first = config_count(filled, "first_k_dense_replace")
    layers = [
        layer if index < first else replace(layer, feed_forward=experts)
        for index, layer in enumerate(dense.layers)
    ]
    extra = config_count(filled, "num_nextn_predict_layers")
    return replace(dense, layers=tuple(layers), num_extra_layers=extra)


def with_stacked_experts(rows: Iterable[WeightRow], count: int) -> list[WeightRow]:
    """The rows of a model whose files have all `count` experts of a layer in two tensors: one of gate and up,
    and one of the matrix back."""
    return [_stacked(row, count) if row.is_expert else row for row in rows]


def _stacked(row: WeightRow, count: int) -> WeightRow:
    layer, _, rest = row.parts[0].name.partition(".experts.")
    leaf = "gate_up_proj" if len(row.parts) == 2 else "down_proj"
    number = int(rest.partition(".")[0])
    return replace(row, stacked=Stacked(f"{layer}.experts.{leaf}", number, count))


def _check_choice(experts: Experts, router: SigmoidRouter) -> None:
    """Refuses a choice of experts that megatron-core makes otherwise: it takes a group's best top_k /
    top_groups scores, DeepSeek the best two."""
    chosen, groups, top = experts.top_k, router.num_groups, router.top_groups
    if groups > 1 and (experts.num_experts % groups or top > groups or chosen != 2 * top):
        raise refused_config(
            f"says n_group={groups}, topk_group={top} with {experts.num_experts} experts and "
            f"num_experts_per_tok={chosen}; groups need to divide the experts, and num_experts_per_tok to "
            "be twice topk_group."
        )
    if not 1 < chosen <= experts.num_experts:
        raise refused_config(
            f"says num_experts_per_tok={chosen} with {experts.num_experts} experts; it needs 2 "
            "or more, at most all."
        )


def _num_experts(filled: Values) -> int:
    """transformers 5 writes Qwen3-MoE's number under another key than released models have."""
    key = "num_local_experts" if "num_local_experts" in filled else "num_experts"
    return config_size(filled, key)


def _plain_layers(filled: Values, num_layers: int) -> frozenset[int]:
    """The layers that have no experts, by `mlp_only_layers`.

    Raises:
        ConfigError: it is no list of layers.
    """
    listed = filled.get("mlp_only_layers") or []
    is_list = isinstance(listed, list | tuple)
    if not is_list or any(type(index) is not int or not 0 <= index < num_layers for index in listed):
        raise refused_config(
            f"says mlp_only_layers={listed!r}; it needs a list of layers, 0 to {num_layers - 1}."
        )
    return frozenset(listed)
