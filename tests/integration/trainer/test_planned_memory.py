"""Planned bytes against those that a real trainer holds, counted by a dispatch mode."""

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.integration.trainer.conftest import make_model, run_world
from tests.integration.trainer.program import make_config
from yatt.forecast.memory.activations import TokenShare
from yatt.forecast.memory.parameters import table_of
from yatt.forecast.memory.ranks import planned_layout
from yatt.forecast.memory.trainer import INDEX_BYTES, ITEM_BYTES, TrainerDemand, TrainerMemory, trainer_memory
from yatt.models.model import read_model, with_value_head
from yatt.trainer.forward import logprobs

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("counting.py")
SIZES = {"hidden_size": 128, "intermediate_size": 320, "vocab_size": 64, "max_position_embeddings": 4096}
EXPERTS = {"num_hidden_layers": 2, "num_experts": 8, "moe_intermediate_size": 96, "num_experts_per_tok": 4}
MODELS = {
    "qwen3": ("qwen3", False, {}),
    "tied": ("qwen3", True, {}),
    "wide": ("qwen3", False, {"num_hidden_layers": 2, "intermediate_size": 1280}),
    "vocabulary": ("qwen3", False, {"num_hidden_layers": 1, "vocab_size": 32000}),
    "thin": ("qwen3", False, {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}),
    "qwen2": ("qwen2", False, {"num_hidden_layers": 3}),
    "experts": ("qwen3_moe", False, EXPERTS),
    "shared": ("qwen2_moe", False, EXPERTS | {"shared_expert_intermediate_size": 160}),
    "narrow": ("mistral", False, {"num_hidden_layers": 2, "sliding_window": 64}),
    "after": ("olmo2", False, {"num_hidden_layers": 2, "pad_token_id": None, "eos_token_id": 2}),
}
LATENT = {
    "num_hidden_layers": 2, "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "head_dim": 16, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 96,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MODELS["latent"] = ("deepseek_v3", False, LATENT)
BIAS_BYTES = {"latent": 8 * 4}
"""The router's bias, a buffer: host copies have it, the plan does not count it."""

TP, SP = {"tensor_model_parallel_size": 2}, {"sequence_parallel": True}
CP, EP = {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
RECOMPUTE, FLOAT32, BF16 = {"recompute": "full"}, {"dtype": "float32"}, {"dtype": "bfloat16"}
TAUGHT = {"top_k": 48}
ONE, FOUR = [[1024]], [[1024]] * 4


@dataclass(frozen=True)
class Counted:
    """A job's plan and counts, by pipeline stage and rank."""

    planned: list[TrainerMemory]
    ranks: list[dict]

    def of_rank(self, rank: int) -> TrainerMemory:
        return self.planned[rank // (len(self.ranks) // len(self.planned))]


JOBS = {
    1: [
        ("qwen3", {}, ONE), ("qwen3", RECOMPUTE, ONE), ("qwen3", FLOAT32, ONE), ("wide", RECOMPUTE, ONE),
        ("wide", RECOMPUTE | FLOAT32, ONE), ("qwen3", {}, [[500, 524]]), ("qwen2", {}, ONE),
        ("tied", {}, ONE), ("vocabulary", RECOMPUTE, ONE), ("experts", {}, ONE), ("experts", RECOMPUTE, ONE),
        ("experts", FLOAT32, ONE), ("shared", {}, ONE), ("latent", {}, ONE), ("latent", RECOMPUTE, ONE),
        ("qwen3", RECOMPUTE | {"recompute_layers": 1}, ONE), ("narrow", {}, ONE), ("narrow", RECOMPUTE, ONE),
        ("thin", TAUGHT, ONE), ("vocabulary", RECOMPUTE | TAUGHT, ONE),
        ("after", {}, ONE), ("after", FLOAT32, ONE), ("after", RECOMPUTE, ONE),
    ],
    2: [
        ("qwen3", {}, ONE), ("qwen3", TP, ONE), ("qwen3", TP | SP, ONE), ("qwen3", TP | SP | RECOMPUTE, ONE),
        ("qwen3", CP, [[2048]]), ("qwen3", CP | RECOMPUTE, [[2048]]), ("qwen3", PP, FOUR),
        ("qwen3", PP | RECOMPUTE, FOUR), ("tied", PP, FOUR), ("experts", TP | SP, ONE),
        ("experts", EP, ONE), ("experts", EP | RECOMPUTE, ONE),
        ("experts", TP | SP | EP | {"expert_tensor_parallel_size": 1}, ONE),
        ("qwen3", PP | {"virtual_pipeline_model_parallel_size": 2}, FOUR), ("after", TP | SP, ONE),
    ],
}  # fmt: skip
WITH_CRITIC = {
    1: [("qwen3", {}), ("tied", FLOAT32), ("latent", {})],
    2: [("qwen3", TP), ("tied", PP), ("experts", TP | SP), ("experts", EP), ("qwen3", CP)],
}
NAMES = [(world, index) for world, jobs in JOBS.items() for index in range(len(jobs))]


def name_of(key: tuple[int, int]) -> str:
    model, layout, micro = JOBS[key[0]][key[1]]
    said = "-".join(f"{name.split('_')[0]}{value}" for name, value in layout.items())
    return f"{key[0]}-{model}-{said or 'plain'}-{len(micro[0])}"


@pytest.fixture(scope="session")
def counted(tmp_path_factory) -> dict[tuple[int, int], Counted]:
    root = tmp_path_factory.mktemp("counted")
    for name, (kind, is_tied, values) in MODELS.items():
        make_model(root / name, kind, is_tied=is_tied, **SIZES | values)
    found = {}
    for world, jobs in JOBS.items():
        listed = [
            {"name": str(at), "model": str(root / m), "layout": BF16 | layout, "micro_batches": micro}
            for at, (m, layout, micro) in enumerate(jobs)
        ]  # fmt: skip
        done = run_world(root / f"world-{world}", world, listed, program=PROGRAM)
        found |= {
            (world, at): Counted(plan_of(job, world), done[job["name"]].notes)
            for at, job in enumerate(listed)
        }
    return found


def plan_of(job: dict, world: int) -> list[TrainerMemory]:
    config, model = make_config(job["model"], job["layout"]), read_model(job["model"])
    layout, micro = planned_layout(config.trainer, world), job["micro_batches"][0]
    tokens = sum(micro) // layout.cp
    share = TokenShare(
        num_tokens=tokens, longest=max(micro), item_bytes=ITEM_BYTES[config.model.dtype],
        is_packed=len(micro) > 1, kernels="cpu", layout=layout,
        imbalance=1.0,  # this router is random
    )  # fmt: skip
    demand = TrainerDemand(
        shape=model.shape, parameters=table_of(model), section=config.trainer, share=share, num_rows=tokens,
        num_moments=config.optimizer.num_moments, has_reference=False, top_k=job["layout"].get("top_k", 0),
    )  # fmt: skip
    if job.get("has_critic"):
        critic = with_value_head(model)
        demand = replace(demand, critic=replace(demand, shape=critic.shape, parameters=table_of(critic)))
    return trainer_memory(demand)


@pytest.mark.parametrize("world", WITH_CRITIC)
def test_what_a_critic_keeps_is_exact(world, tmp_path):
    """Its head is whole on each tensor-parallel rank; a policy's tied embeddings are not tied in it."""
    listed = []
    for at, (name, layout) in enumerate(WITH_CRITIC[world]):
        kind, is_tied, values = MODELS[name]
        model = make_model(tmp_path / f"{at}", kind, is_tied=is_tied, **SIZES | values)
        listed.append(
            {"name": f"job-{at}", "model": str(model), "layout": BF16 | layout, "micro_batches": ONE,
             "has_critic": True}
        )  # fmt: skip
    done = run_world(tmp_path / "world", world, listed, program=PROGRAM)
    for job, (name, _) in zip(listed, WITH_CRITIC[world], strict=True):
        case, states = Counted(plan_of(job, world), done[job["name"]].notes), defaultdict(int)
        for rank, got in enumerate(case.ranks):
            plan = case.of_rank(rank)
            others, bias = plan.others, BIAS_BYTES.get(name, 0)
            assert (plan.weights, others.critic_weights) == (got["weights"] - bias, got["critic"] - bias)
            assert plan.gradients + others.critic_gradients == got["gradients"]
            states[plan.stage] += got["optimizer"]
        each = world // len(case.planned)
        for plan in case.planned:
            planned = each * (plan.optimizer + plan.others.critic_optimizer)
            assert states[plan.stage] == pytest.approx(planned, abs=8 * each)


@pytest.mark.parametrize("key", NAMES, ids=name_of)
def test_weights_gradients_and_optimizer_are_exact(counted, key):
    case, optimizer = counted[key], defaultdict(list)
    for rank, got in enumerate(case.ranks):
        plan = case.of_rank(rank)
        bias = BIAS_BYTES.get(JOBS[key[0]][key[1]][0], 0)
        assert (plan.weights, plan.gradients) == (got["weights"] - bias, got["gradients"])
        assert plan.optimizer == pytest.approx(got["optimizer"], rel=1e-3)
        optimizer[plan.stage].append(got["optimizer"])
    for stage, sizes in optimizer.items():
        assert sum(sizes) == case.planned[stage].optimizer * len(sizes)


@pytest.mark.parametrize("key", NAMES, ids=name_of)
def test_the_peak_of_activations_and_logits_is_within_five_percent(counted, key):
    case = counted[key]
    for rank, got in enumerate(case.ranks):
        plan = case.of_rank(rank)
        assert plan.peak - plan.kept == pytest.approx(got["peak"], rel=0.05)


def test_a_layer_keeps_what_is_planned(counted):
    """One layer's forward pass adds what it keeps and its output; the first job's layers are alike."""
    plan, got = counted[1, 0].planned[0], counted[1, 0].ranks[0]
    output = SIZES["hidden_size"] * 2 * 1024
    indices = 1024 * (INDEX_BYTES + 16 * 4)
    assert len(set(got["layers"])) == 1
    assert sum(got["layers"]) == plan.activations - indices + len(got["layers"]) * output


def test_the_chunks_of_the_head_are_the_trainers():
    from yatt.forecast.memory import trainer

    planned = (trainer.CHUNK_BYTES, trainer.MIN_CHUNK, trainer.MAX_CHUNK)
    assert planned == (logprobs.CHUNK_BYTES, logprobs.MIN_CHUNK, logprobs.MAX_CHUNK)
