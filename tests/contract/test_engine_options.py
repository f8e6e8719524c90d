"""Options of vLLM that a run file passes on: what vLLM refuses, and wrong log-probs, are found."""

import sys
from collections.abc import Iterator

import pytest

from tests.contract.test_engine import options_for, run, sample
from tests.tiny_models import make_qwen3
from yatt.engine.build import build_engine
from yatt.engine.protocol import WatchedRows
from yatt.engine.vllm import VllmEngine, engine_arguments, refuse_unknown, written_arguments
from yatt.engine.worker import decoded_difference
from yatt.errors import ConfigError
from yatt.records import message as m

NGRAM = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1,
}  # fmt: skip


@pytest.fixture(scope="module", params=["qwen3"])
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("vllm")
    return make_qwen3(tmp_path_factory.mktemp("options") / "model", seed=0, tied=True)


@pytest.fixture
def without_numba() -> Iterator[None]:
    """Hides afterwards what n-grams have imported: at each start vLLM looks at every object of every module,
    and fails at a wrapper of llvmlite's library."""
    yield
    for name in [name for name in sys.modules if name.startswith("llvmlite.binding")]:
        del sys.modules[name]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("without_numba")
def test_wrong_log_probs_of_speculated_tokens_are_found(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU build has them, so it is refused there. In a whole run they would be taken for noise. Those
    of watched tokens are left out by every build, which is found out even if nobody has refused it."""
    options = options_for(model, deterministic=False, arguments={"speculative_config": NGRAM})
    with pytest.raises(ConfigError, match="speculative_config: vLLM's CPU build gives wrong log-probs"):
        build_engine("vllm", options)
    engine = VllmEngine(options)
    engine.start()
    try:
        assert decoded_difference(engine, options, [*range(40, 56)]) > 0.1
        prompt = m.pack_ids([*range(40, 48)] * 3)
        asked = sample("one", prompt_ids=prompt, max_tokens=16, ignore_eos=True, watched=(5, 6))
        with pytest.raises(ValueError, match=r"with engine_args.speculative_config vLLM gives no log-probs"):
            engine.add(asked)
        monkeypatch.setattr("yatt.engine.vllm.begin_watching", lambda *_: WatchedRows((5, 6)))
        completed = run(engine, asked)["one"]
        assert completed.finish_reason == "error" and not completed.watched
        assert "log-prob of watched token 5" in completed.error
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"kv_cache_dtype": "fp9"}, "engine_args: vLLM refuses kv_cache_dtype: .*Input should be 'auto'"),
        ({"quantization": "int9"}, "engine_args: vLLM refuses quantization: .*Unknown quantization method"),
        ({"attention_backend": "NOPE"}, "engine_args: vLLM refuses attention_backend: ValueError: Unknown"),
        ({"compilation_config": {"wrong": 1}}, "engine_args: vLLM refuses compilation_config: .*wrong"),
        ({"block_size": (1, 2)}, "engine_args: vLLM refuses block_size"),
    ],
)
def test_what_vllm_refuses_is_a_mistake_in_the_run_file(model: str, option: dict, says: str) -> None:
    from vllm.usage.usage_lib import UsageContext

    options = options_for(model, deterministic=False, arguments=option)
    with pytest.raises(ConfigError, match=says):
        written_arguments(engine_arguments(options), options, UsageContext.LLM_CLASS)


def test_options_come_before_what_a_run_relies_on(model: str) -> None:
    mine = {"enable_prefix_caching": False, "logprobs_mode": "raw_logits", "cudagraph_capture_sizes": (1, 2)}
    options = options_for(model, deterministic=False, arguments=mine)
    arguments = engine_arguments(options)
    assert arguments["enable_prefix_caching"] is False
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["cudagraph_capture_sizes"] == [1, 2]
    assert engine_arguments(options_for(model))["enable_prefix_caching"] is False, "deterministic"
    with pytest.raises(ConfigError, match=r"engine_args\.cudagraph_capture_sizes: the installed vLLM has no"):
        refuse_unknown(arguments, arguments.keys() - {"cudagraph_capture_sizes"}, options)
    with pytest.raises(ConfigError, match="engine_args needs vllm, not transformers"):
        build_engine("transformers", options)
