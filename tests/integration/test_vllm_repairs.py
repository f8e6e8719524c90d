"""Each repair of vLLM on CPU is still needed: without it an update leaves log-probs wrong.

A test here that fails on a new vLLM says that the repair can go.
"""

import pytest
from packaging.version import Version

from tests.contract.test_engine import (
    PROMPT,
    largest_difference,
    options_for,
    run,
    sample,
    transformers_logprobs,
)
from tests.packages import needs, version_of
from tests.tiny_models import make_qwen3, make_sigmoid_moe, publish
from yatt.engine.build import build_engine
from yatt.engine.environment import prepare_environment
from yatt.records.message import pack_ids

pytestmark = needs("vllm")

IS_OLDEST = version_of("vllm") < Version("0.27")
BEFORE_THE_FAULT = pytest.mark.skipif(IS_OLDEST, reason="vLLM 0.26 does not have this fault")
LATENT_ATTENTION = pytest.mark.skipif(IS_OLDEST, reason="vLLM 0.26 has no latent attention on CPU")


@pytest.fixture(autouse=True)
def engine_environment():
    prepare_environment(device="cpu", threads=1)


def error_after_update(tmp_path, *, experts: int, kind: str = "") -> float:
    models = [
        make_sigmoid_moe(tmp_path / name, kind, seed=seed)
        if kind
        else make_qwen3(tmp_path / name, tied=True, seed=seed, experts=experts)
        for seed, name in enumerate("ab")
    ]
    engine = build_engine("vllm", options_for(models[0]))
    engine.start()
    engine.load_weights(1, publish(tmp_path / "v1", model=models[1], policy_version=1))
    scored = engine.score([PROMPT])[0]
    engine.close()
    return largest_difference(scored, transformers_logprobs(models[1], PROMPT))


@BEFORE_THE_FAULT
@pytest.mark.slow
def test_a_tied_head_stays_old_without_its_repair(tmp_path, monkeypatch):
    import yatt.engine.weights.transfer

    monkeypatch.setattr(yatt.engine.weights.transfer, "repack_tied_heads", lambda model: None)
    assert error_after_update(tmp_path, experts=0) > 1e-2


@BEFORE_THE_FAULT
@pytest.mark.slow
def test_experts_are_laid_out_wrong_without_their_repair(tmp_path, monkeypatch):
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod as Method,
    )

    import yatt.engine.weights.transfer  # noqa: F401 - makes the repair

    original = Method._setup_kernel.__closure__[0].cell_contents
    monkeypatch.setattr(Method, "_setup_kernel", original)
    assert error_after_update(tmp_path, experts=4) > 1e-3


@LATENT_ATTENTION
@pytest.mark.slow
def test_latent_attention_has_wrong_positions_without_its_repair(tmp_path, monkeypatch):
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    import yatt.engine.weights.transfer  # noqa: F401 - makes the repair

    original = RotaryEmbedding.forward_cpu.__closure__[0].cell_contents
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", original)
    assert error_after_update(tmp_path, experts=8, kind="deepseek_v3") > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", pytest.param("deepseek_v3", marks=LATENT_ATTENTION)])
def test_with_all_repairs_an_update_is_exact(tmp_path, kind):
    assert error_after_update(tmp_path, experts=4, kind=kind) < 1e-4


def sample_more_prompts_than_fit_into_a_turn(tmp_path) -> list[str]:
    """48 prompts of 100 tokens: more than the 4,096 that vLLM computes in one turn."""
    model = make_qwen3(tmp_path / "model", tied=True)
    engine = build_engine("vllm", options_for(model, deterministic=False, max_num_seqs=64))
    engine.start()
    try:
        prompts = [pack_ids([40 + index] * 100) for index in range(48)]
        asked = [
            sample(f"{index}", prompt_ids=ids, seed=index + 1, max_tokens=2, ignore_eos=True)
            for index, ids in enumerate(prompts)
        ]
        return [each.finish_reason for each in run(engine, *asked).values()]
    finally:
        engine.close()


@pytest.mark.slow
def test_a_prompt_in_two_turns_breaks_seeded_sampling_on_cpu(tmp_path, monkeypatch):
    import yatt.engine.vllm

    whole = yatt.engine.vllm.engine_arguments
    monkeypatch.setattr(
        yatt.engine.vllm,
        "engine_arguments",
        lambda options: whole(options) | {"enable_chunked_prefill": True},
    )
    with pytest.raises(RuntimeError, match="offset"):
        sample_more_prompts_than_fit_into_a_turn(tmp_path)


@pytest.mark.slow
def test_more_prompts_than_fit_into_a_turn_are_all_completed(tmp_path):
    assert sample_more_prompts_than_fit_into_a_turn(tmp_path) == ["length"] * 48
