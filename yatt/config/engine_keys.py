"""Options of vLLM that a run file may pass to its engines (`engine_args`), and why it may not pass others.

An option is passed if it is listed here. vLLM has some 250 of them, with new ones in every release: which of
them break what yatt guarantees (weights that are replaced, engines that sleep, log-probs of the sampled
distribution, one writer of caches) has to be decided for each.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches

from yatt.config.schema import GenRMSection, RolloutSection, RunConfig
from yatt.config.sections.ranges import EngineValue
from yatt.config.widths import engine_sections
from yatt.errors import Finding, mistake_in

PASSED = frozenset(
    """
    all2all_backend async_scheduling attention_backend attention_config block_size compilation_config
    cudagraph_capture_sizes disable_cascade_attn disable_custom_all_reduce enable_chunked_prefill
    enable_flashinfer_autotune enable_prefix_caching expert_placement_strategy gdn_prefill_backend
    kda_decode_backend kda_prefill_backend kernel_config kv_cache_dtype kv_cache_dtype_skip_layers
    linear_backend long_prefill_token_threshold mamba_backend mamba_block_size mamba_cache_dtype
    mamba_cache_mode mamba_ssm_cache_dtype max_cudagraph_capture_size max_num_batched_tokens
    max_num_partial_prefills mm_encoder_attn_backend mm_encoder_tp_mode moe_backend optimization_level
    performance_mode quantization quantization_config speculative_config use_fp64_gumbel
    """.split()  # noqa: SIM905 - shorter to read and to change
)
"""Options that are passed as they are written."""

SPECULATION = "speculative_config"

_KEYS = {
    "model": "it is model.path",
    "tokenizer": "it is model.path",
    "dtype": "it is model.dtype",
    "max_model_len": "it follows from data.max_prompt_tokens and rollout.max_response_tokens",
    "seed": "each request has its own; write run.seed",
    "structured_outputs_config": "write verdict.choices or verdict.json_schema",
    "limit_mm_per_prompt": "write media.most_per_prompt",
    **{
        name: f"write {key} of this section"
        for name, key in {
            "max_num_seqs": "max_num_seqs",
            "enforce_eager": "enforce_eager",
            "tensor_parallel_size": "tp_size",
            "gpu_memory_utilization": "gpu_memory_utilization",
            "kv_cache_memory_bytes": "kv_cache_bytes",
            "enable_expert_parallel": "expert_parallel",
        }.items()
    },
}
"""Options that have a key of yatt."""

_REASONS = (
    (
        r"load_format|hf_overrides|weight_transfer_config|model_loader_.*|model_weights|revision|code_revision"
        r"|tokenizer_.*|config_format|hf_config_path|model_impl|model_class_overrides|download_dir|convert|runner"
        r"|pt_load_map_location|ignore_patterns",
        "yatt loads and replaces the weights",
    ),
    (
        r"worker_cls|worker_extension_cls|distributed_executor_backend|(pipeline|data|prefill_context|"
        r"decode_context)_parallel_.*|dcp_.*|nnodes|node_rank|master_.*|device_ids|numa_.*|ray_.*"
        r"|enable_elastic_ep|elastic_.*|.*fault_tolerance.*",
        "processes and ranks of engines are yatt's",
    ),
    (
        r"enable_sleep_mode|sleep_.*|enable_cumem_allocator|cpu_offload_.*|offload_.*|num_gpu_blocks_override"
        r"|kv_cache_metrics.*|swap_space",
        "engines hand their memory over when they sleep",
    ),
    (
        r"logprobs_mode|max_logprobs|generation_config|override_generation_config|scheduler_cls|"
        r"scheduling_policy|logits_processors|skip_tokenizer_init|watermark.*|return_.*|enable_prompt_embeds"
        r"|stream_interval|max_num_queued_.*|enable_trace_replay",
        "log-probs have to be those of the distribution that the run file describes",
    ),
    (
        r"kv_transfer_config|kv_offloading_.*|kv_events_config|ec_.*|kv_sharing_.*",
        "a cache outside of the engine would outlive a weight update",
    ),
    (r"enable_lora|.*lora.*", "adapters are no part of a run yet"),
    (
        r"trust_remote_code|allowed_.*|hf_token|.*plugin|.*endpoint|io_processor.*|additional_config",
        "code and addresses of strangers are not taken (adr/0064)",
    ),
    (r"mm_.*|media_io_kwargs|.*_mm_.*|video_.*|language_model_only", "pictures are prepared by yatt"),
)


def unpassed_reason(name: str) -> str:
    """Returns why an option is not passed, and what to do; empty if it is passed."""
    if name in PASSED:
        return ""
    if name in _KEYS:
        return f"{_KEYS[name]}; remove it here."
    reason = next((why for pattern, why in _REASONS if re.fullmatch(pattern, name)), "")
    if reason:
        return f"{reason}; remove it."
    near = get_close_matches(name, PASSED, n=1)
    hint = f"Did you mean '{near[0]}'?" if near else f"Options that are: {', '.join(sorted(PASSED))}."
    return f"no option that yatt passes to vLLM. {hint}"


def unknown_option(name: str, known: Iterable[str]) -> str:
    """Returns the mistake of an option that the installed vLLM does not have."""
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean '{near[0]}'?" if near else "remove it, or install another version."
    return f"the installed vLLM has no such option; {hint}"


def engine_faults(config: RunConfig) -> Iterator[Finding]:
    """Faults of `engine_args`, of the policy's engines and of GenRMs'."""
    for section, engine in engine_sections(config):
        if engine.engine_args:
            yield from _section_faults(f"{section}.engine_args", engine, config)
    for index, genrm in enumerate(config.genrms):
        if genrm.engine_args and genrm.api.url:
            yield mistake_in(
                f"genrms[{index}].engine_args", "has no effect on a judge behind a URL; remove it."
            )
        if genrm.is_policy and genrm.verdict.read == "soft" and SPECULATION in config.rollout.engine_args:
            yield mistake_in(
                f"genrms[{index}].verdict.read",
                f"soft: with rollout.engine_args.{SPECULATION} vLLM gives no log-probs of words; write word.",
            )
    if "quantization" in config.rollout.engine_args and config.algorithm.correction.rule == "none":
        yield mistake_in(
            "algorithm.correction.rule",
            "is none, but rollout.engine_args.quantization makes the engine's log-probs differ from the "
            "trainer's; write another rule.",
        )


def _section_faults(key: str, engine: RolloutSection | GenRMSection, config: RunConfig) -> Iterator[Finding]:
    for name, value in engine.engine_args.items():
        if reason := unpassed_reason(name) or _value_fault(name, value):
            yield mistake_in(f"{key}.{name}", reason)
    if engine.engine not in ("auto", "vllm"):
        yield mistake_in(key, f"needs engine vllm, not {engine.engine}; remove it.")
    if config.run.deterministic:
        says = "with run.deterministic a seed alone decides a completion, which no option is known to keep"
        yield mistake_in(key, f"{says}; remove it.")
    if SPECULATION in engine.engine_args and config.launch.device == "cpu":
        yield mistake_in(f"{key}.{SPECULATION}", SPECULATION_ON_CPU)


SPECULATION_ON_CPU = "vLLM's CPU build gives wrong log-probs of speculated tokens; remove it."


def _value_fault(name: str, value: EngineValue) -> str:
    """Returns the mistake in an option's value; empty without one."""
    if name == SPECULATION:
        if not isinstance(value, Mapping):
            return "has to be a section: method, num_speculative_tokens, and what the method needs."
        model = value.get("model", "")
        if isinstance(model, str) and model and not model.startswith("/"):
            return f"model: '{model}' is no absolute path of a folder; models are not downloaded."
    return ""
