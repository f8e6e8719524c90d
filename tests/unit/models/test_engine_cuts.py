"""The slices of each node of an engine, for every number of ranks, heads and nodes."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.sliced_weights import boxes_of_rank, rows_of_rank, spanning_config
from tests.unit.core.test_placement import config as shared_nodes
from yatt.config.schema import RunConfig
from yatt.core.gpus.placement import placement_of
from yatt.models import cuts as module
from yatt.models.cuts import engine_cuts, engine_split, gives_weight
from yatt.models.model import Model, model_of
from yatt.models.rows import Part, matrix_row

HEAD = 4


def qwen3(heads: int, kv_heads: int, **more: Any) -> Model:
    return model_of({
        "model_type": "qwen3", "vocab_size": 130, "hidden_size": 32, "num_hidden_layers": 1,
        "intermediate_size": 96, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": HEAD, "max_position_embeddings": 64, "tie_word_embeddings": True, **more,
    })  # fmt: skip


def ranges_of_rank(heads: int, kv_heads: int, rank: int, tp: int) -> dict[str, tuple[int, int]]:
    """The rows of vLLM's rank, by `QKVParallelLinear` and `VocabParallelEmbedding`."""
    if kv_heads >= tp:
        kv = kv_heads // tp * rank, kv_heads // tp * (rank + 1)
    else:
        kv = rank // (tp // kv_heads), rank // (tp // kv_heads) + 1
    each = 192 // tp  # 130 rows padded to 192
    return {
        "q_proj": (heads // tp * rank * HEAD, heads // tp * (rank + 1) * HEAD),
        "k_proj": (kv[0] * HEAD, kv[1] * HEAD),
        "v_proj": (kv[0] * HEAD, kv[1] * HEAD),
        "o_proj": (heads // tp * rank * HEAD, heads // tp * (rank + 1) * HEAD),
        "gate_proj": (96 // tp * rank, 96 // tp * (rank + 1)),
        "down_proj": (96 // tp * rank, 96 // tp * (rank + 1)),
        "embed_tokens": (min(each * rank, 130), min(each * (rank + 1), 130)),
    }


def test_a_node_has_the_rows_of_its_ranks_and_no_others() -> None:
    walked = 0
    for nodes, node_ranks, groups, kv_heads in itertools.product(
        (2, 3, 4, 8), (1, 2, 4), (1, 2, 4), (1, 2, 4, 8)
    ):
        heads, tp = groups * kv_heads, nodes * node_ranks
        if heads % tp or (kv_heads % tp and tp % kv_heads) or 96 % tp:
            continue  # vLLM refuses it
        model = qwen3(heads, kv_heads)
        config = spanning_config("m", tp_size=tp, node_ranks=node_ranks)
        found = engine_cuts(config, model.rows, model.shape)
        assert not found.unknown
        for name, cut in found.cuts.items():
            key = name.split(".")[-2]
            for node, span in enumerate(cut.spans):
                ranks = range(node * node_ranks, (node + 1) * node_ranks)
                each = [ranges_of_rank(heads, kv_heads, rank, tp).get(key) for rank in ranks]
                rows = {row for found in each if found for row in range(*found)}
                assert key == "up_proj" or rows == set(range(*span)), (name, tp, node)
            assert cut.dim == (key in ("o_proj", "down_proj"))
            walked += 1
        whole = {"input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm"}
        names = {name.split(".")[-2] for row in model.rows for name in row.hf_names}
        assert names - whole == {name.split(".")[-2] for name in found.cuts}
    assert walked > 150


def test_heads_that_are_dealt_like_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: keys and values of fewer heads than ranks are cut evenly."""
    even = module._even_cut
    monkeypatch.setattr(module, "_head_cut", lambda rows, heads, split: even(0, rows, split))
    with pytest.raises(AssertionError, match=r"k_proj"):
        test_a_node_has_the_rows_of_its_ranks_and_no_others()


def unknown_of(config: RunConfig, model: Model) -> frozenset[str]:
    found = engine_cuts(config, model.rows, model.shape)
    assert not found.unknown & found.cuts.keys()
    return found.unknown


def test_what_is_not_known_is_whole() -> None:
    config, model = spanning_config("m", tp_size=4), qwen3(8, 4)
    every = {name for row in model.rows for name in row.hf_names}
    assert unknown_of(config, model) == frozenset()
    own = replace(config, model=replace(config.model, family="own.py"))
    assert unknown_of(own, model) == every and not engine_cuts(own, model.rows, model.shape).cuts
    uneven = qwen3(8, 4, intermediate_size=90)
    assert {name.split(".")[-2] for name in unknown_of(config, uneven)} == {
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    fused = matrix_row("decoder.layers.0.self_attention.linear_qkv.weight", [Part("qkv", 8)] * 3, 32, 4)
    assert unknown_of(config, replace(model, rows=(fused,))) == {"qkv"}
    tower = replace(fused, name="vision.blocks.0.attn.qkv.weight", parts=(Part("tower", 24),))
    assert unknown_of(config, replace(model, rows=(tower,))) == {"tower"}


def test_engines_that_fit_a_node_and_runs_that_say_so_have_no_cuts() -> None:
    model, spanning = qwen3(8, 4), spanning_config("m", tp_size=4)
    whole = replace(spanning, placement=replace(spanning.placement, send_slices=False))
    narrow = spanning_config("m", tp_size=4, node_ranks=4)
    for config in (whole, narrow, shared_nodes(4, 4, 1, 0)):
        found = engine_cuts(config, model.rows, model.shape)
        assert (engine_split(config), found.cuts, found.unknown) == (None, {}, frozenset())


@pytest.mark.parametrize("experts", [0, 8])
def test_of_the_ranks_from_which_a_node_fetches_one_gives_each_element(experts: int) -> None:
    more = {
        "model_type": "qwen3_moe", "num_experts": experts, "moe_intermediate_size": 16,
        "num_experts_per_tok": 2, "intermediate_size": 96,
    }  # fmt: skip
    model, walked = qwen3(8, 4, **(more if experts else {})), 0
    for tp, etp, ep, copies in itertools.product((1, 2, 4), (1, 2), (1, 2, 4) if experts else (1,), (1, 2)):
        if not experts and etp != tp:
            continue
        settings = {
            "tensor_model_parallel_size": tp, "expert_tensor_parallel_size": etp,
            "expert_model_parallel_size": ep,
        }  # fmt: skip
        config = spanning_config("m", tp_size=4, trainer=settings)
        given = boxes_given(config, model, copies)
        for row in model.rows:
            for name in row.hf_names:
                found = sum(_numel(shape) for _, shape in given[name])
                height = sum(part.num_rows for part in row.parts if part.name == name)
                assert found == height * (row.width or 1) and len(set(given[name])) == len(given[name])
        walked += 1
    assert walked >= 2


def boxes_given(config: RunConfig, model: Model, copies: int) -> dict[str, list[tuple[tuple[int, ...], ...]]]:
    """Boxes of each tensor that a node gets, if it fetches from different copies of the model."""
    section = config.trainer
    whole, given = section.whole_stage, dict[str, list[tuple[tuple[int, ...], ...]]]()
    for place in range(whole):
        rank = place + whole * (place % copies)
        for row in rows_of_rank(config, model, rank, whole * copies):
            if gives_weight(row, rank, whole * copies, section):
                size = section.expert_tp_size if row.is_expert else section.tensor_model_parallel_size
                for name, boxes in boxes_of_rank(row, rank % size, size).items():
                    given.setdefault(name, []).extend(boxes)
    return given


def _numel(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


@pytest.mark.parametrize("num_engines", [1, 2, 3])
@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
def test_a_node_is_in_one_chain_of_equal_slices_for_each_rank_that_it_fetches(
    mode: str, num_engines: int
) -> None:
    if mode == "disaggregated":
        config = spanning_config("m", tp_size=8, node_ranks=2, num_engines=num_engines, trainer={"ranks": 4})
    else:
        config = shared_nodes(4 * num_engines, 2, 1, 0)
        config = replace(config, rollout=replace(config.rollout, tp_size=8))
    placement = placement_of(config)
    for tp, pp in ((1, 1), (2, 1), (4, 1), (2, 2), (1, 4)):
        if placement.world_size % (tp * pp):
            continue
        chains = placement.weight_chains(tp, pp, in_parts=True)
        nodes = sorted(placement.pools["rollout"])
        parts = {node: placement.weight_part(node) for node in nodes}
        assert [parts[node] for node in nodes] == [0, 1, 2, 3] * num_engines
        for node in nodes:
            remote = [r for r in placement.weight_ranks(node, tp, pp) if placement.node_of(r) != node]
            mine = [(rank, part) for (rank, part), chain in chains.items() if node in chain]
            assert sorted(mine) == sorted((rank, parts[node]) for rank in remote)
        assert all(list(chain) == sorted(chain) for chain in chains.values())
        whole = placement.weight_chains(tp, pp)
        assert {part for _, part in whole} <= {0}
        assert {rank: set(chain) for (rank, _), chain in whole.items()} == {
            rank: {node for (r, _), chain in chains.items() if r == rank for node in chain}
            for rank, _ in chains
        }


def test_the_nodes_of_an_engine_are_counted_from_its_first_one() -> None:
    judged = spanning_config("m", tp_size=4, node_ranks=2, num_engines=2)
    placement = placement_of(judged)
    assert [placement.weight_part(node) for node in range(1, 5)] == [0, 1, 0, 1]
    for node in range(1, 5):
        (slab,) = placement.slabs_by_node[node]
        assert placement.nodes_of(slab, "rollout")[placement.weight_part(node)] == node
