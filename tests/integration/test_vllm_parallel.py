"""An engine over two tensor-parallel worker processes takes weights like one of one."""

import pytest

from tests.contract.test_engine import (
    PROMPT,
    ids_of,
    largest_difference,
    options_for,
    run,
    sample,
    transformers_logprobs,
)
from tests.tiny_models import make_qwen3, publish
from yatt.engine.build import build_engine
from yatt.engine.environment import prepare
from yatt.records import message as m

pytest.importorskip("vllm")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_tensor_parallel_workers_serve_updated_weights(tmp_path):
    prepare(device="cpu", threads=1)
    models = [make_qwen3(tmp_path / name, tied=True, seed=seed) for seed, name in enumerate("ab")]
    engine = build_engine("vllm", options_for(models[0], tp_size=2))
    engine.start()
    completed = run(engine, sample("one", ignore_eos=True))["one"]
    ids = PROMPT + ids_of(completed)
    engine.load_weights(1, publish(tmp_path / "v1", model=models[1], policy_version=1))
    scored = engine.score([ids])[0]
    engine.close()
    before = transformers_logprobs(models[0], ids)[len(PROMPT) - 1 :]
    assert largest_difference(m.unpack_floats(completed.logprobs), before) < 1e-4
    assert largest_difference(scored, transformers_logprobs(models[1], ids)) < 1e-4
