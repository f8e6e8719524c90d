"""Options of vLLM in a run file: which are passed, and the sentence about each of the others."""

from pathlib import Path

import pytest

from tests.unit.config.test_load import GOOD, mistakes, write
from yatt.config.engine_keys import PASSED, unpassed_reason
from yatt.config.load import load_run_config, parse_resolved, resolved_text
from yatt.errors import ConfigError
from yatt.launch.checks import preflight
from yatt.launch.checks.preflight import check_engine_args

JUDGES = "genrms: [{name: j, model: m, template: '{completion}', engine_args: {block_size: 32}, %s}]\n"
OPTIONS = (
    "rollout:\n  engine_args:\n    quantization: fp8\n    cudagraph_capture_sizes: [1, 2, 4]\n"
    "    speculative_config: {method: ngram, num_speculative_tokens: 3, layers: [1]}\n"
)


def test_options_of_any_form_are_read_and_sealed(tmp_path: Path) -> None:
    config = load_run_config([write(tmp_path, GOOD + OPTIONS)], [])
    assert config.rollout.engine_args == {
        "quantization": "fp8",
        "cudagraph_capture_sizes": (1, 2, 4),
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "layers": (1,)},
    }
    assert parse_resolved(resolved_text(config)) == config


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("tensor_parallel_size: 2", "tensor_parallel_size: write tp_size of this section; remove it here."),
        ("seed: 2", "seed: each request has its own; write run.seed; remove it here."),
        ("model: /m", "model: it is model.path; remove it here."),
        ("load_format: dummy", "load_format: yatt loads and replaces the weights; remove it."),
        ("hf_overrides: {a: 1}", "hf_overrides: yatt loads and replaces the weights; remove it."),
        ("worker_cls: x", "worker_cls: processes and ranks of engines are yatt's; remove it."),
        ("data_parallel_size: 2", "data_parallel_size: processes and ranks of engines are yatt's"),
        ("enable_sleep_mode: false", "enable_sleep_mode: engines hand their memory over when they sleep"),
        ("logprobs_mode: raw_logits", "logprobs_mode: log-probs have to be those of the distribution"),
        ("generation_config: auto", "generation_config: log-probs have to be those of the distribution"),
        ("trust_remote_code: true", "trust_remote_code: code and addresses of strangers are not taken"),
        ("otlp_traces_endpoint: x", "otlp_traces_endpoint: code and addresses of strangers are not taken"),
        ("kv_transfer_config: {a: 1}", "kv_transfer_config: a cache outside of the engine would outlive"),
        ("max_lora_rank: 8", "max_lora_rank: adapters are no part of a run yet"),
        ("mm_processor_kwargs: {a: 1}", "mm_processor_kwargs: pictures are prepared by yatt; remove it."),
        ("quantisation: fp8", "no option that yatt passes to vLLM. Did you mean 'quantization'?"),
        ("disable_log_stats: true", "no option that yatt passes to vLLM. Options that are: all2all_backend,"),
        (
            "block_size: 2020-01-01",
            "engine_args.block_size: datetime.date(2020, 1, 1) is not text or a whole",
        ),
        ("block_size: [[1]]", "rollout.engine_args.block_size[0]: a list is not text or a whole number"),
        ("speculative_config: ngram", "speculative_config: has to be a section: method, num_speculative_"),
        ("speculative_config: {model: eagle}", "model: 'eagle' is no absolute path of a folder"),
    ],
)
def test_what_is_not_passed_has_its_reason(tmp_path: Path, option: str, says: str) -> None:
    assert says in mistakes(tmp_path, f"{GOOD}rollout: {{engine_args: {{{option}}}}}\n")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            JUDGES % "api: {url: 'http://j:1/v1'}",
            "genrms[0].engine_args: has no effect on a judge behind a URL",
        ),
        (JUDGES % "engine: transformers", "genrms[0].engine_args: needs engine vllm, not transformers"),
        (
            "rollout: {engine_args: {block_size: 32}, engine: scripted}\n",
            "rollout.engine_args: needs engine vllm, not scripted; remove it.",
        ),
        (
            "rollout: {engine_args: {quantization: fp8}}\nalgorithm: {correction: {rule: none}}\n",
            "algorithm.correction.rule: is none, but rollout.engine_args.quantization makes",
        ),
        (OPTIONS + "launch: {device: cpu}\n", "engine_args.speculative_config: vLLM's CPU build gives wrong"),
    ],
)
def test_options_that_cannot_be_together(tmp_path: Path, more: str, says: str) -> None:
    assert says in mistakes(tmp_path, GOOD + more)


def test_a_deterministic_run_has_no_options(tmp_path: Path) -> None:
    said = mistakes(tmp_path, GOOD + OPTIONS, "run.deterministic=true")
    assert "rollout.engine_args: with run.deterministic a seed alone decides a completion" in said


def test_every_option_of_the_installed_vllm_is_passed_or_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = preflight._vllm_options()
    assert len(known) > 100
    assert len(known & PASSED) > 20
    unnamed = [name for name in known - PASSED if "no option that yatt passes" in unpassed_reason(name)]
    assert len(unnamed) < len(known) / 3, "the others have a reason"
    config = load_run_config([write(tmp_path, GOOD + OPTIONS)], [])
    check_engine_args(config)
    monkeypatch.setattr(
        preflight, "_vllm_options", lambda: known - {"quantization"} | {"quantization_config"}
    )
    with pytest.raises(
        ConfigError, match=r"rollout\.engine_args\.quantization: the installed vLLM has no such"
    ):
        check_engine_args(config)
