"""Each repair of vLLM on CPU is still needed: without it an update leaves log-probs wrong.

A test here that fails on a new vLLM says that the repair can go.
"""

import pytest

from tests.contract.test_engine import PROMPT, largest_difference, options_for, transformers_logprobs
from tests.tiny_models import make_qwen3, publish
from yatt.engine.build import build_engine
from yatt.engine.environment import prepare

pytest.importorskip("vllm")


@pytest.fixture(autouse=True)
def engine_environment():
    prepare(device="cpu", threads=1)


def error_after_update(tmp_path, *, experts: int) -> float:
    models = [
        make_qwen3(tmp_path / name, tied=True, seed=seed, experts=experts) for seed, name in enumerate("ab")
    ]
    engine = build_engine("vllm", options_for(models[0]))
    engine.start()
    engine.load_weights(1, publish(tmp_path / "v1", model=models[1], policy_version=1))
    scored = engine.score([PROMPT])[0]
    engine.close()
    return largest_difference(scored, transformers_logprobs(models[1], PROMPT))


@pytest.mark.slow
def test_a_tied_head_stays_old_without_its_repair(tmp_path, monkeypatch):
    import yatt.engine.transfer

    monkeypatch.setattr(yatt.engine.transfer, "repack_tied_heads", lambda model: None)
    assert error_after_update(tmp_path, experts=0) > 1e-2


@pytest.mark.slow
def test_experts_are_laid_out_wrong_without_their_repair(tmp_path, monkeypatch):
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod as Method,
    )

    import yatt.engine.transfer  # noqa: F401 - makes the repair

    original = Method._setup_kernel.__closure__[0].cell_contents
    monkeypatch.setattr(Method, "_setup_kernel", original)
    assert error_after_update(tmp_path, experts=4) > 1e-3


@pytest.mark.slow
def test_with_both_repairs_an_update_is_exact(tmp_path):
    assert error_after_update(tmp_path, experts=4) < 1e-4
