"""Memory plans of models that no test machine has."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.findings import words_by_key
from tests.packages import trainer_module
from tests.runs import HANG_S
from tests.unit.models.test_seeing import QWEN2_5_7B as QWEN2_5_VL_7B, QWEN3_8B as QWEN3_VL_8B
from yatt.config.load import load_run_config
from yatt.forecast.memory.fit import GIB, memory_faults, memory_plan
from yatt.forecast.memory.parameters import chunk_buffers, table_of
from yatt.forecast.memory.ranks import RankLayout, in_flight, model_chunks, planned_layout
from yatt.forecast.memory.trainer import (
    NUM_SLOTS,
    PART_BYTES,
    OtherModels,
    TrainerMemory,
    stage_buffers,
    trainer_demand,
)
from yatt.models.model import read_model
from yatt.models.rows import OUTPUT
from yatt.models.towers.tower import trains_parameter

ROOT = Path(__file__).parents[3]
QWEN3_8B = str(ROOT / "configs/recipes/models/Qwen3-8B")
LONG = [
    f"model.path={QWEN3_8B}", "model.dtype=bfloat16", "data.train_files=[x]", "launch.gpus_per_node=8",
    "data.max_prompt_tokens=2048", "rollout.max_response_tokens=30720", "rollout.kv_cache_bytes=0",
    "trainer.max_tokens_per_micro_batch=32768", "trainer.recompute=full", "trainer.train_batch_size=128",
    "trainer.mini_batch_size=64", "trainer.tensor_model_parallel_size=2",
]  # fmt: skip


def config_of(*more: str):
    return load_run_config([ROOT / "configs/gsm8k.yaml"], [*LONG, *more])


def plan_of(*more: str):
    config = config_of(*more)
    return memory_plan(config, {"rollout": read_model(config.model.path)})


@pytest.mark.parametrize("cp", [1, 2])
def test_qwen3_8b_trains_at_32k_tokens_on_eight_gpus(cp):
    """TP 2 x DP 4, and TP 2 x CP 2 x DP 2, on GPUs of 80 GiB."""
    plan = plan_of(f"trainer.context_parallel_size={cp}")
    assert list(memory_faults(plan)) == []
    assert 40 * GIB < plan.trainer_peak < 76 * GIB
    assert plan.worst.weights + plan.worst.gradients == pytest.approx(6 * 8.19e9 / 2, rel=0.01)
    assert plan.worst.optimizer == pytest.approx(12 * 8.19e9 / 8, rel=0.01)


def test_scores_of_context_parallel_attention_in_plain_torch_fit_only_where_a_kernel_needs_none():
    cp2 = "trainer.context_parallel_size=2"
    plain, fused = plan_of(cp2, "model.spec=torch"), plan_of(cp2)
    assert not list(memory_faults(plain))
    assert plain.trainer_peak == pytest.approx(fused.trainer_peak, rel=0.05)
    single = plan_of(cp2, "model.spec=torch", "model.dtype=float32")
    assert single.worst.layer > 20 * plain.worst.layer
    assert "training needs" in words_by_key(memory_faults(single))["trainer"]


def test_a_reference_model_costs_its_weights():
    with_kl = plan_of("algorithm.kl_in=loss")
    assert with_kl.trainer_peak - plan_of().trainer_peak == with_kl.worst.weights
    assert with_kl.hosts[0].others.reference == 8 * with_kl.worst.weights


def test_a_critic_costs_weights_gradients_and_an_optimizer_of_its_own():
    """It is as large as the policy but for its head, which has one row."""
    gae = "algorithm.adv_estimator=gae"
    plain, found = plan_of(), plan_of(gae)
    head = 151936 * 4096 // 2
    others, policy = found.worst.others, found.worst
    assert others.critic_weights == pytest.approx(policy.weights - 2 * head, rel=1e-3)
    assert others.critic_gradients == pytest.approx(policy.gradients - 4 * head, rel=1e-3)
    assert others.critic_optimizer == pytest.approx(policy.optimizer - 12 * head // 4, rel=1e-3)
    added = others.critic_weights + others.critic_gradients + others.critic_optimizer
    assert found.trainer_peak - plain.trainer_peak == added
    host = found.hosts[0].total - plain.hosts[0].total
    assert host == pytest.approx(8 * (others.critic_weights + others.critic_optimizer), rel=1e-6)
    assert any("needs" in each.says for each in memory_faults(found)), "two models do not fit on 80 GiB"


def test_a_critics_optimizer_in_host_memory_is_not_on_the_gpu():
    gae, away = "algorithm.adv_estimator=gae", "trainer.offload_optimizer=true"
    here, there = plan_of(gae).worst, plan_of(gae, away).worst
    assert here.kept - there.kept == here.optimizer + here.others.critic_optimizer
    smaller = plan_of(gae, "critic.optimizer={lr: 1.0e-5, kind: sgd, sgd_momentum: 0.0}").worst.others
    assert smaller.critic_optimizer == pytest.approx(here.others.critic_optimizer / 3, rel=1e-6)


@pytest.mark.parametrize("more", [(), ("trainer.offload_optimizer=true",), ("algorithm.kl_in=loss",)])
def test_policy_and_critic_in_turns_need_the_larger_one(more):
    gae, sgd = "algorithm.adv_estimator=gae", "critic.optimizer={lr: 1.0e-5, kind: sgd, sgd_momentum: 0.0}"
    for others in ((), (sgd,)):
        both, found = plan_of(gae, *more, *others), plan_of(gae, "critic.swap=true", *more, *others)
        assert found.trainer_peak == plan_of(*more).trainer_peak, "the critic has no logits"
        assert found.worst.others.critic_turn < found.worst.peak < both.worst.peak
        assert found.hosts == both.hosts
    policy = plan_of(gae, "critic.swap=true", "optimizer={lr: 1.0e-6, kind: sgd, sgd_momentum: 0.0}").worst
    assert policy.peak == policy.others.critic_turn, "here the critic is the larger one"


def test_an_engine_without_room_for_one_sequence_is_named():
    faults = words_by_key(memory_faults(plan_of("rollout.gpu_memory_utilization=0.25")))
    assert "one sequence of 32768 tokens" in faults["rollout.tp_size"]


JUDGE = f"{{name: j, model: {QWEN3_8B}, %s}}"
TEXT, SCALAR, TEACHER = (
    JUDGE % more for more in ("template: '{prompt}'", "kind: scalar, chat: true", "kind: teacher%s")
)


def judge_of(section: str):
    config = config_of(f"genrms=[{section}]")
    plan = memory_plan(config, dict.fromkeys(("rollout", "genrm:j"), read_model(QWEN3_8B)))
    return plan.engines[1], words_by_key(memory_faults(plan))


def test_a_scalar_reward_model_has_no_head_of_tokens():
    text, scalar = judge_of(TEXT)[0], judge_of(SCALAR)[0]
    assert text.weights - scalar.weights == 2 * 151_936 * 4096
    assert text.peak == scalar.peak and text.logits == scalar.logits == 0, "vLLM fills its share"


@pytest.mark.parametrize(
    ("batched", "tokens", "before"),
    [(4096, 4096, 0), (40_000, 32_768, 7232), (80_000, 32_768, 32_768), (None, 16_384, 0), ("x", 16_384, 0)],
)
def test_a_teacher_has_logits_beside_its_share_of_the_gpu(batched, tokens, before):
    """Of one request (in bfloat16, and log-probs of them in float32), and log-probs of the request before. A
    value that vLLM refuses counts as none."""
    more = "" if batched is None else f", engine_args: {{max_num_batched_tokens: {batched}}}"
    engine, faults = judge_of(TEACHER % more)
    assert engine.logits == 151_936 * (6 * tokens + 4 * before)
    assert engine.peak - judge_of(TEXT)[0].peak == engine.logits
    assert ("genrms[0].engine_args" in faults) is (batched != 4096)
    said = "".join(faults.values())
    assert batched == 4096 or f"logits need {engine.logits / GIB:.1f} GiB" in said, said


def test_likeliest_tokens_of_a_teacher_need_memory_of_the_trainer_only():
    """Ids and log-probs at each of 32,768 rows, and 17 bytes of each of a chunk's 220 rows."""
    said = ("", ", top_k: 64", ", top_k: 128")
    engines = [judge_of(TEACHER % more)[0] for more in said]
    assert engines[0] == engines[1] == engines[2]
    heads = [plan_of(f"genrms=[{TEACHER % more}]").worst.head for more in said]
    assert heads[1] - heads[0] == heads[2] - heads[1] == 64 * (8 * 32_768 + 17 * 220)
    hosts = [plan_of(f"genrms=[{TEACHER % more}]").hosts[0] for more in said]
    batch = 8 * 64 * 128 * config_of().rollout.n * 30_720
    assert hosts[1].total - hosts[0].total == 2 * batch + 3 * 8 * batch // 4, "TP 2 x DP 4 on one node"
    away = plan_of("algorithm.adv_estimator=gae", f"genrms=[{TEACHER % said[1]}]").worst.others
    assert away == plan_of("algorithm.adv_estimator=gae").worst.others, "a critic has none"


def test_host_memory_that_is_too_small_is_named():
    plan = plan_of()
    assert "host memory" in words_by_key(memory_faults(plan, 100 * GIB))["launch.nodes"]
    (host,) = plan.hosts
    assert host.in_shm == host.weights + host.optimizer < host.total
    (fault,) = memory_faults(plan, 200 * GIB)
    assert fault.key == "launch.shm_dir" and "which has 100.0 GiB" in fault.says, (
        "Linux makes it half of memory"
    )
    assert not list(memory_faults(plan, 200 * GIB, host.in_shm))
    (fault,) = memory_faults(plan, 0, host.in_shm - 1)
    assert fault.key == "launch.shm_dir" and "each trainer node holds" in fault.says
    assert "remount,size" in fault.says and "more nodes" in fault.says
    assert not list(memory_faults(plan))


def test_prepared_pictures_are_in_the_memory_filesystem_too():
    plain, seeing = plan_of().hosts[0], plan_of(f"media.cache_bytes={GIB}").hosts[0]
    assert seeing.in_shm - plain.in_shm == GIB == seeing.total - plain.total


@pytest.mark.parametrize("pp", [1, 2, 5, 7])
@pytest.mark.parametrize("tied", [False, True])
def test_stages_have_every_parameter(pp, tied, tmp_path):
    values = json.loads((Path(QWEN3_8B) / "config.json").read_text()) | {"tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = config_of(
        f"model.path={tmp_path}",
        f"trainer.pipeline_model_parallel_size={pp}",
        f"launch.gpus_per_node={2 * pp}",
    )
    model = read_model(str(tmp_path))
    demand = trainer_demand(config, model.shape, table_of(model))
    found = sum(stage_buffers(demand, stage).state for stage in range(pp))
    row_of = {row.name: row for row in model.rows}
    copied = row_of["embedding.word_embeddings.weight"].full_shape if tied and pp > 1 else (0, 0)
    total = sum(_numel(row) for row in model.rows) + copied[0] * copied[1]
    cut = sum(_numel(row) for row in model.rows if "norm" not in row.name) + copied[0] * copied[1]
    assert (OUTPUT in row_of) is not tied
    assert found == cut // 2 + (total - cut)


@pytest.mark.parametrize("config", [QWEN2_5_VL_7B, QWEN3_VL_8B])
@pytest.mark.parametrize("train", ["none", "connector", "all"])
def test_the_first_stage_has_the_tower_and_what_is_trained_of_it_has_a_state(config, train, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = [f"model.path={tmp_path}", "trainer.pipeline_model_parallel_size=4", f"vision.train={train}"]
    without, plan = plan_of(*given[:2], "vision.train=none"), plan_of(*given)
    tower = [row for row in read_model(str(tmp_path)).rows if row.is_tower]
    trained = sum(_numel(row) for row in tower if trains_parameter(row.name, train))
    assert (trained > 0) is (train != "none") and (trained == sum(map(_numel, tower))) is (train == "all")
    first, plain = plan.trainer[0], without.trainer[0]
    assert plain.weights > plan.trainer[1].weights + 2 * sum(map(_numel, tower))
    assert first.weights == pytest.approx(plain.weights, rel=1e-5)
    assert first.gradients - plain.gradients == pytest.approx(4 * trained, rel=1e-3, abs=1)
    assert plan.trainer[1:] == without.trainer[1:]
    referred = plan_of(*given, "algorithm.kl_in=loss", "algorithm.kl_coef=0.1").trainer[0].others.reference
    policys = 0 if train != "none" else 2 * sum(map(_numel, tower))
    assert referred == pytest.approx(first.weights - policys, rel=1e-5), "a frozen tower is the policy's"


def _numel(row) -> int:
    return row.num_rows * (row.width or 1)


def test_layers_of_interleaved_stages_are_megatrons():
    layout = config_of(
        "trainer.pipeline_model_parallel_size=2", "trainer.virtual_pipeline_model_parallel_size=3"
    ).trainer
    assert [model_chunks(36, layout, stage) for stage in (0, 1)] == [
        [range(0, 6), range(12, 18), range(24, 30)], [range(6, 12), range(18, 24), range(30, 36)],
    ]  # fmt: skip
    assert [in_flight(planned_layout(layout, 8), stage) for stage in (0, 1)] == [7, 5]


MOE = {
    "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "head_dim": 16, "num_key_value_heads": 4, "num_experts": 8, "moe_intermediate_size": 32,
    "num_experts_per_tok": 2, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(("ep", "etp"), [(1, 2), (2, 1), (4, 2), (8, 1)])
def test_experts_are_divided_over_ep_and_etp_and_their_state_over_the_other_ranks(tmp_path, ep, etp):
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    model = read_model(str(tmp_path))
    rows, layout = model.rows, RankLayout(world_size=16, tp=2, ep=ep, etp=etp)
    kinds = table_of(model).chunk(range(model.shape.num_layers), is_tied=False)
    sizes = chunk_buffers(kinds, layout, has_copy=False)
    experts = sum(_numel(row) for row in rows if row.is_expert)
    whole = sum(_numel(row) for row in rows if "norm" in row.name or "router" in row.name)
    dense = (sum(_numel(row) for row in rows) - experts - whole) // 2 + whole
    shards = 16 // (ep * etp) if ep > 1 else 8
    assert sizes.numel == pytest.approx(dense + experts / (ep * etp), rel=0.02)
    assert sizes.state == pytest.approx(dense / 8 + experts / (ep * etp) / shards, abs=1)


def test_the_command_prints_bytes_for_programs():
    command = [sys.executable, "-m", "yatt.cli.main", "plan", "configs/gsm8k.yaml", *LONG, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    parts = found["bytes"]["GPU that trains, pipeline stage 0 of 1"]
    assert found["fits"] and parts["peak"] == plan_of().trainer_peak


def test_the_command_ends_with_the_users_code_where_nothing_fits():
    command = [sys.executable, "-m", "yatt.cli.main", "plan", "configs/gsm8k.yaml", *LONG, "--gpu-gib", "24"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=HANG_S)
    assert done.returncode == 2
    assert "does not fit: trainer: training needs" in done.stdout


def test_an_optimizer_that_is_away_shares_its_place_with_activations():
    at = {
        "stage": 0,
        "weights": 2,
        "gradients": 4,
        "others": OtherModels(reference=1),
        "activations": 10,
        "head": 3,
        "layer": 5,
    }
    at |= {"optimizer": 40, "step": 6}
    assert TrainerMemory(**at).peak == 7 + 40 + 15
    assert TrainerMemory(**at, slots=8).peak == 7 + 15
    assert TrainerMemory(**at, slots=12).peak == 7 + 12 + 6


def test_the_step_needs_parts_only():
    kept = plan_of("trainer.offload_optimizer=true").worst
    assert 0 < kept.slots <= 3 * (512 << 20) < kept.optimizer / 6
    parted_step = trainer_module("mcore.parted_step")
    assert (PART_BYTES, NUM_SLOTS) == (parted_step.PART_BYTES, parted_step.NUM_SLOTS)


@pytest.mark.parametrize(("recipe", "layout", "peak_gib"), [
    ("deepseek-v3", (12, 8, 12, 8, 32), 50.6), ("qwen3-235b-a22b", (4, 4, 8, 4, 16), 54.1),
])  # fmt: skip
def test_the_largest_models_fit_where_the_optimizer_comes_in_parts(recipe, layout, peak_gib):
    nodes, tp, pp, ep, engine = layout
    changes = {
        "launch.nodes": nodes, "trainer.tensor_model_parallel_size": tp,
        "trainer.pipeline_model_parallel_size": pp, "trainer.expert_model_parallel_size": ep,
        "rollout.tp_size": engine, "run.dir": "x",
    }  # fmt: skip

    def planned(*, is_away):
        found = changes | {"trainer.offload_optimizer": str(is_away).lower()}
        given = [f"{key}={value}" for key, value in found.items()]
        config = load_run_config([ROOT / f"configs/recipes/{recipe}.yaml"], given)
        model = read_model(str(ROOT / config.model.path))
        return memory_plan(config, {"rollout": model}, gpu_bytes=96 * GIB)

    away, here = planned(is_away=True), planned(is_away=False)
    assert away.trainer_peak / GIB == pytest.approx(peak_gib, abs=0.05)
    assert list(memory_faults(away)) == []
    assert "training needs" in words_by_key(memory_faults(here))["trainer"]
