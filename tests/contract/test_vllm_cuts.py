"""Each rank's cut in vLLM's own layers, for more ranks than a test can start, is within its node's slices."""

import itertools
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.packages import needs
from tests.sliced_weights import packed_copy, rank_plan, spanning_config, write_rank
from yatt.adapters.node_local.host_segment import Stamp
from yatt.config.schema import RunConfig
from yatt.models.cuts import engine_cuts
from yatt.models.model import Model, model_of
from yatt.weights.published import PublishedWeights

pytestmark = needs("vllm")
HIDDEN, HEAD = 32, 8


@pytest.fixture
def of_rank(monkeypatch):
    """Makes vLLM's layers believe that this process is a rank of so many; no group is joined."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    def believe(rank: int, size: int) -> tuple[ModuleType, ModuleType]:
        for module in (linear, vocab_parallel_embedding, parameter):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size)
        return linear, vocab_parallel_embedding

    with set_current_vllm_config(VllmConfig()):
        yield believe


def qwen2(heads: int, kv_heads: int, vocabulary: int) -> Model:
    return model_of({
        "model_type": "qwen2", "vocab_size": vocabulary, "hidden_size": heads * HEAD, "num_hidden_layers": 1,
        "intermediate_size": 64, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": 64, "tie_word_embeddings": False,
    })  # fmt: skip


def loaded(layers: tuple[ModuleType, ModuleType], model: Model, weights: dict) -> list[torch.Tensor]:
    """What vLLM's layers take of these weights on this rank."""
    linear, vocabulary = layers
    attention, hidden = model.shape.attention, model.shape.hidden_size
    own, found = "model.layers.0.self_attn.", list[torch.Tensor]()

    def load(module: torch.nn.Module, part: str, tensor: torch.Tensor, *shard: object) -> None:
        weight = getattr(module, part)
        weight.weight_loader(weight, tensor, *shard)
        found.append(weight.detach())

    exact = {"params_dtype": torch.float32}
    qkv = linear.QKVParallelLinear(
        hidden, HEAD, attention.num_heads, attention.num_kv_heads, bias=True, **exact
    )
    for name in "qkv":
        for part in ("weight", "bias"):
            load(qkv, part, weights[f"{own}{name}_proj.{part}"], name)
    load(
        linear.RowParallelLinear(hidden, hidden, bias=False, **exact),
        "weight",
        weights[f"{own}o_proj.weight"],
    )
    mlp = "model.layers.0.mlp."
    fused = linear.MergedColumnParallelLinear(hidden, [64, 64], bias=False, **exact)
    for index, name in enumerate(("gate", "up")):
        load(fused, "weight", weights[f"{mlp}{name}_proj.weight"], index)
    load(
        linear.RowParallelLinear(64, hidden, bias=False, **exact), "weight", weights[f"{mlp}down_proj.weight"]
    )
    vocab_size = model.shape.vocab_size
    embedding = vocabulary.VocabParallelEmbedding(vocab_size, hidden, **exact)
    load(embedding, "weight", weights["model.embed_tokens.weight"])
    load(vocabulary.ParallelLMHead(vocab_size, hidden, **exact), "weight", weights["lm_head.weight"])
    return found


def sliced(folder: Path, config: RunConfig, model: Model, tensors: dict, part: int) -> dict:
    ranks = config.launch.gpus_per_node
    for rank in range(ranks):
        plan, size_bytes = rank_plan(config, model, rank, ranks)
        if not (folder / f"rank-{rank}.weights").exists():
            write_rank(folder / f"rank-{rank}", plan, size_bytes, tensors).complete(Stamp(1, 1))
        packed_copy(folder / f"rank-{rank}", folder / f"part-{part}-{rank}", part, Stamp(1, 1))
    stems = [folder / f"part-{part}-{rank}" for rank in range(ranks)]
    return dict(PublishedWeights(stems, Stamp(1, 1), part=part))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp_size", "node_ranks", "vocabulary", "trainer_tp"),
    [
        (8, 2, 8, 2, 90, 2), (8, 8, 8, 4, 64, 1), (16, 4, 16, 4, 1000, 4), (4, 1, 4, 1, 30, 1),
        (16, 8, 4, 2, 129, 2),
    ],
)  # fmt: skip
def test_layers_load_the_same_from_slices(
    tmp_path, of_rank, heads, kv_heads, tp_size, node_ranks, vocabulary, trainer_tp
):
    """The seconds are the import of vLLM. A whole run, or an engine, has at most four ranks here."""
    model, chance = qwen2(heads, kv_heads, vocabulary), torch.Generator().manual_seed(1)
    trainer = {"ranks": trainer_tp, "tensor_model_parallel_size": min(trainer_tp, kv_heads)}
    config = spanning_config("m", tp_size=tp_size, node_ranks=node_ranks, trainer=trainer)
    tensors = {
        planned.name: torch.randn(planned.shape, generator=chance)
        for rank in range(trainer_tp)
        for planned in rank_plan(config, model, rank, trainer_tp)[0].weights
    }
    parts = {part: sliced(tmp_path, config, model, tensors, part) for part in range(tp_size // node_ranks)}
    for rank in range(tp_size):
        layers = of_rank(rank, tp_size)
        expected = loaded(layers, model, tensors)
        found = loaded(layers, model, parts[rank // node_ranks])
        assert len(found) == 12
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), f"rank {rank}"


def test_experts_are_dealt_to_ranks_as_in_vllm():
    """The seconds are the import of vLLM. No whole run has experts of a rank: vLLM's CPU build does not."""
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    for experts, (tp_size, node_ranks) in itertools.product((8, 10, 13), ((4, 2), (8, 2), (6, 3), (8, 4))):
        model = experts_of(experts)
        config = spanning_config("m", tp_size=tp_size, node_ranks=node_ranks, expert_parallel=True)
        cuts = engine_cuts(config, model.rows, model.shape).cuts
        for rank in range(tp_size):
            local = determine_expert_map(
                ep_size=tp_size, ep_rank=rank, global_num_experts=experts, expert_placement_strategy="linear"
            )[1]
            for number in range(experts):
                cut = cuts[f"model.layers.0.mlp.experts.{number}.down_proj.weight"]
                begin, end = cut.spans[rank // node_ranks]
                assert end - begin == 32 or int(local[number]) < 0, "it has the experts of its ranks"
        for number in range(experts):
            cut = cuts[f"model.layers.0.mlp.experts.{number}.up_proj.weight"]
            assert sorted(end - begin for begin, end in cut.spans)[-2:] == [0, 16], "on one node each"


def experts_of(count: int) -> Model:
    return model_of({
        "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8, "num_experts": count,
        "moe_intermediate_size": 16, "num_experts_per_tok": 2, "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    })  # fmt: skip
