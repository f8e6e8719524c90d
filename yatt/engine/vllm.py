"""The vLLM engine: a V1 `LLMEngine` in this process, called step by step.

Input and output are token ids. Log-probs are those of the sampled distribution (after temperature, top-p,
top-k): `logprobs_mode="processed_logprobs"`. vLLM is imported in `start`, after `yatt.engine.environment` has
set its environment variables. Only calls that exist in vLLM 0.26 to 0.33 are used; where versions differ, the
code checks for the method or the name, not the version. `make older-vllm` tests version 0.26.

On CPU, `sleep` frees no memory, because vLLM's CPU build ignores it.
"""

import contextlib
import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from yatt.config.engine_keys import unknown_option
from yatt.config.sections.ranges import EngineValue
from yatt.engine.protocol import (
    CPU_KV_CACHE_BYTES,
    UNLOADED,
    Comparison,
    EngineOptions,
    WatchedRows,
    begin_watching,
    prompt_and_room,
    waits_for_weights,
)
from yatt.engine.spanning.exchange import rank_exchange
from yatt.engine.weights.published import read_publication
from yatt.errors import ConfigError, WorkerFailed, error_line
from yatt.models.quantized import KEY
from yatt.records import message as m

ENDED = "vLLM has ended it; if it has a structure, the model's vocabulary may be unable to write it"
"""The error of a request that was admitted and could not be completed."""

LEAST_TEMPERATURE = 0.01
"""vLLM takes lower ones above 0 for this."""


@dataclass(slots=True)
class Running:
    """One request in an engine and its partial completion."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    watched: WatchedRows | None = None

    def take(self, completion: Any) -> None:
        """Adds what a step has sampled."""
        ids, rows = completion.token_ids, completion.logprobs or ()
        self.token_ids.extend(ids)
        if self.watched is not None:
            for row in [*rows, *({} for _ in ids[len(rows) :])]:
                found = (row.get(token) for token in self.watched.ids)
                self.watched.add([None if entry is None else entry.logprob for entry in found])
        if self.watched is None or not self.watched.fault:
            self.logprobs.extend(chosen_logprobs(rows, ids))


class VllmEngine:
    """See yatt.engine.protocol.Engine."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._llm: Any = None
        self._running: dict[str, Running] = {}
        self._policy_version = 0
        self._has_weights = False
        self._has_kv_cache = False
        self._exchange = contextlib.ExitStack()
        self._pictures: Any = None

    @property
    def is_busy(self) -> bool:
        """Whether requests are running."""
        return bool(self._running)

    def start(self) -> None:
        """Builds the engine. On CPU this takes a few seconds, mostly for imports."""
        if self._options.expert_parallel and self._options.device == "cpu":
            raise ConfigError("expert_parallel needs CUDA: vLLM's workers on CPU end with it; remove it.")
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        from yatt.engine.vllm_pictures import PictureInputs, check_pictures, picture_arguments

        arguments = engine_arguments(self._options) | self._more_arguments()
        known = {item.name for item in dataclasses.fields(EngineArgs)}
        arguments |= picture_arguments(self._options, known)
        refuse_unknown(arguments, known, self._options)
        if self._options.num_ranks > 1:
            self._exchange.enter_context(rank_exchange())
        # The context decides how many tokens of prompts a step computes: 16,384 on an H100 for vLLM's own LLM
        # class, 2,048 for the default context of this call, which has no entry in vLLM's table.
        written = written_arguments(arguments, self._options, UsageContext.LLM_CLASS)
        self._llm = LLMEngine.from_engine_args(written, UsageContext.LLM_CLASS)
        check_pictures(self._llm, self._options)
        if self._options.most_pictures:
            self._pictures = PictureInputs(self._options)
        self._llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
        self._has_weights, self._has_kv_cache = not waits_for_weights(self._options), True

    def _more_arguments(self) -> dict[str, Any]:
        """vLLM's EngineArgs of a kind of engine."""
        return {}

    def add(self, sample: m.SampleRequest) -> None:
        """See Engine.add."""
        if sample.request_id in self._running:
            return
        self._refuse_without_weights()
        prompt_ids, max_tokens = prompt_and_room(sample, self._options)
        watched = begin_watching(sample, self._options, self._vocab_size()) if sample.watched else None
        prompt = self._prompt(sample, prompt_ids)
        parameters = _sampling_parameters(sample, self._options, max_tokens=max_tokens)
        try:
            self._llm.add_request(sample.request_id, prompt, parameters)
        except vllm_refusals() as error:  # a ValueError in some versions only
            raise ValueError(str(error)) from error
        self._running[sample.request_id] = Running(watched=watched)

    def _vocab_size(self) -> int:
        return int(self._llm.model_config.get_vocab_size())

    def _prompt(self, sample: m.SampleRequest, prompt_ids: list[int]) -> Any:
        if not sample.media:
            return {"prompt_token_ids": prompt_ids}
        if len(sample.media) > self._options.most_pictures:
            raise ValueError(
                f"the prompt has {len(sample.media)} pictures; this engine takes "
                f"{self._options.most_pictures}"
            )
        return self._pictures.input_of(sample, prompt_ids)

    def abort(self, request_ids: tuple[str, ...] | None = None) -> list[m.Completed]:
        """See Engine.abort."""
        wanted = tuple(self._running) if request_ids is None else request_ids
        ending = [request_id for request_id in wanted if request_id in self._running]
        if ending:
            self._llm.abort_request(ending)
        return [self._complete(request_id, "abort") for request_id in ending]

    def step(self) -> list[m.Completed]:
        """See Engine.step."""
        if not self._running:
            return []
        finished = []
        for output in self._llm.step():
            running = self._running.get(output.request_id)
            if running is None:
                continue
            completion = output.outputs[0]
            running.take(completion)
            if output.finished:
                finished.append(self._complete(output.request_id, completion.finish_reason))
        return finished

    def idle(self) -> None:
        """Does nothing."""

    def sleep(self) -> None:
        """Sleeps at level 2 if the weights will be replaced, otherwise at 1, which keeps them on the host."""
        assert not self._running, "requests are aborted before sleep"
        drops_weights = self._options.weights_are_replaced and self._options.device == "cuda"
        self._llm.sleep(level=2 if drops_weights else 1)
        self._has_weights, self._has_kv_cache = not drops_weights, False

    def wake(self) -> None:
        """Allocates the weights, and the KV cache only with weights loaded, to leave memory for an update."""
        self._llm.wake_up(["weights", "kv_cache"] if self._has_weights else ["weights"])
        self._has_kv_cache = self._has_weights

    def load_weights(self, policy_version: int, folder: str) -> None:
        """See Engine.load_weights."""
        from yatt.engine.weights.compare import published_checksums

        assert not self._running, "requests are aborted before an update"
        publication = read_publication(folder, policy_version)
        published_checksums(publication)  # refuses what is not there before the engine's weights change
        self._has_weights = False  # until the update is complete: a partial one must not be sampled from
        self._llm.collective_rpc("start_weight_update")
        update = {
            "stems": list(map(str, publication.stems)), "attempt": publication.stamp.attempt,
            "policy_version": policy_version, "sums": publication.here,
            "part": publication.part,
        }  # fmt: skip
        self._llm.collective_rpc("update_weights", kwargs={"update_info": update})
        self._llm.collective_rpc("finish_weight_update")
        self._llm.collective_rpc("yatt_check_read")
        if not self._has_kv_cache:
            self._llm.wake_up(["kv_cache"])
        self._has_weights, self._has_kv_cache, self._policy_version = True, True, policy_version
        self._reset_caches()

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """See Engine.score."""
        assert not self._running, "the probe has the engine to itself"
        self._refuse_without_weights()
        from vllm import SamplingParams

        asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        for index, ids in enumerate(sequences):
            self._llm.add_request(f"probe-{index}", self._probe_prompt(ids), asked)
        scores: list[list[float]] = [[] for _ in sequences]
        while self._llm.has_unfinished_requests():
            for output in self._llm.step():
                if output.finished:
                    index = int(output.request_id.removeprefix("probe-"))
                    scores[index] = chosen_logprobs(output.prompt_logprobs[1:], sequences[index][1:])
        return scores

    def _probe_prompt(self, ids: list[int]) -> Any:
        if not self._options.most_pictures:
            return {"prompt_token_ids": ids}
        return self._pictures.probe_input(ids)

    def compare_weights(self, policy_version: int, folder: str) -> Comparison:
        """See Engine.compare_weights. Under tensor parallelism, compares only weights that are not sliced."""
        from yatt.engine.weights.compare import published_checksums

        checksums = published_checksums(read_publication(folder, policy_version))
        ranks: list[Comparison] = self._llm.collective_rpc("yatt_compare_weights", args=(checksums,))
        return Comparison(
            differing=tuple(dict.fromkeys(name for rank in ranks for name in rank.differing)),
            num_compared=min(rank.num_compared for rank in ranks),
            num_readable=min(rank.num_readable for rank in ranks),
        )

    def close(self) -> None:
        """Ends vLLM's executor and its process group; another engine can be built afterwards."""
        if self._llm is None:
            return
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._llm.engine_core.shutdown()
        self._llm = None
        cleanup_dist_env_and_memory()
        self._exchange.close()

    def _complete(self, request_id: str, reason: str) -> m.Completed:
        running = self._running.pop(request_id)
        completed = m.Completed(
            request_id=request_id,
            token_ids=m.pack_ids(running.token_ids),
            logprobs=m.pack_floats(running.logprobs),
            finish_reason=reason,
            policy_version=self._policy_version,
            error=ENDED if reason == "error" else "",
        )
        return completed if running.watched is None else running.watched.added_to(completed)

    def _refuse_without_weights(self) -> None:
        if not self._has_weights:
            raise WorkerFailed(
                "this engine has no whole weights: it dropped them when it went to sleep, or an update "
                "failed; send LoadWeights"
            )

    def _reset_caches(self) -> None:
        """Clears caches, because their content was computed with the old weights."""
        self._llm.reset_prefix_cache()
        self._llm.reset_mm_cache()
        if hasattr(self._llm, "reset_encoder_cache"):
            self._llm.reset_encoder_cache()


def vllm_refusals() -> type[Exception]:
    """The exception that vLLM raises for a request that it cannot serve."""
    import vllm.exceptions

    return getattr(vllm.exceptions, "VLLMClientError", ValueError)


def engine_arguments(options: EngineOptions) -> dict[str, Any]:
    """vLLM's EngineArgs for these options. What the run file passes comes after yatt's defaults and before
    what a run relies on."""
    arguments: dict[str, Any] = {
        "enable_prefix_caching": not options.deterministic,
        **attention_arguments(options),
        **{name: _plain(value) for name, value in options.arguments.items()},
        "model": options.model,
        "dtype": options.dtype,
        "max_model_len": options.max_model_tokens,
        "max_num_seqs": 1 if options.deterministic else options.max_num_seqs,
        "tensor_parallel_size": options.tp_size,
        "enforce_eager": options.enforce_eager or options.device == "cpu",
        "logprobs_mode": "processed_logprobs",
        # Otherwise the model's generation_config.json overrides the run file's sampling settings.
        "generation_config": "vllm",
        "weight_transfer_config": {"backend": "yatt_shm"},
        "worker_extension_cls": "yatt.engine.weights.transfer.WorkerExtension",
        "disable_log_stats": True,
        "seed": 0,
    }
    if waits_for_weights(options):
        arguments |= {"load_format": UNLOADED, "hf_overrides": {KEY: None}}
    if options.expert_parallel:
        arguments["enable_expert_parallel"] = True
    if options.num_ranks > 1:
        arguments["distributed_executor_backend"] = "external_launcher"
    if options.device == "cpu":
        # Chunked prefill rewinds a request's seeded generator, which torch's CPU generator cannot do: every
        # request in the engine would fail. So a prompt that does not fit into a step waits for the next.
        arguments["enable_chunked_prefill"] = False
        arguments["kv_cache_memory_bytes"] = options.kv_cache_bytes or CPU_KV_CACHE_BYTES
        return arguments
    arguments["enable_sleep_mode"] = True
    arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
    if options.kv_cache_bytes:
        arguments["kv_cache_memory_bytes"] = options.kv_cache_bytes
    return arguments


def _plain(value: EngineValue) -> Any:
    """Returns an option with lists where the config has tuples."""
    if isinstance(value, Mapping):
        return {name: _plain(child) for name, child in value.items()}
    return list(value) if isinstance(value, tuple) else value


def refuse_unknown(arguments: Mapping[str, Any], known: Collection[str], options: EngineOptions) -> None:
    """Raises ConfigError if the installed vLLM lacks one of the arguments."""
    if not (unknown := sorted(arguments.keys() - known)):
        return
    if name := next((name for name in unknown if name in options.arguments), ""):
        raise ConfigError(f"engine_args.{name}: {unknown_option(name, known)}")
    raise ConfigError(
        f"this vLLM does not know {', '.join(unknown)}; install a version yatt was made for (see the engine "
        "extra in pyproject.toml)."
    )


def written_arguments(arguments: Mapping[str, Any], options: EngineOptions, context: Any) -> Any:
    """Returns vLLM's EngineArgs.

    Raises:
        ConfigError: vLLM refuses options that the run file passes, and takes the others.
    """
    from vllm.engine.arg_utils import EngineArgs

    if not options.arguments:
        return EngineArgs(**arguments)
    try:
        EngineArgs(**arguments).create_engine_config(context)
    except (ValueError, TypeError, NotImplementedError) as error:
        plain = engine_arguments(replace(options, arguments={}))
        EngineArgs(**plain).create_engine_config(context)  # what it refuses without them is not their fault
        names = ", ".join(options.arguments)
        raise ConfigError(f"engine_args: vLLM refuses {names}: {error_line(error)}") from error
    return EngineArgs(**arguments)


def attention_arguments(options: EngineOptions) -> dict[str, Any]:
    """vLLM's EngineArgs for latent attention, by version. vLLM ignores them for other models."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    # Version 0.26 has no latent attention on CPU, and refuses the name for every model.
    if options.device == "cpu" and "CPU_MLA" in AttentionBackendEnum.__members__:
        # The kernels of CPUs with AMX take bfloat16 only, and keep copies of weights.
        return {"attention_backend": "CPU_MLA"}
    return {}


def _sampling_parameters(sample: m.SampleRequest, options: EngineOptions, *, max_tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    if sample.watched and 0 < sample.temperature < LEAST_TEMPERATURE:
        says = f"temperature {sample.temperature:g} with watched tokens: vLLM takes {LEAST_TEMPERATURE:g}"
        raise ValueError(f"{says} instead; write 0, or at least that")
    wanted = {"logprob_token_ids": list(sample.watched)} if sample.watched else {"logprobs": 0}
    structure = StructuredOutputsParams(**json.loads(sample.structure)) if sample.structure else None
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=sample.temperature,
        top_p=sample.top_p,
        top_k=sample.top_k,
        seed=sample.seed,
        **wanted,
        stop=list(sample.stop),
        stop_token_ids=[*sample.stop_ids, *(() if sample.ignore_eos else options.eos_ids)],
        ignore_eos=sample.ignore_eos,
        detokenize=bool(sample.stop),
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=structure,
    )


def chosen_logprobs(rows: Any, token_ids: Any) -> list[float]:
    """Log-prob of each token from vLLM's table per position."""
    return [float(row[token].logprob) for row, token in zip(rows or (), token_ids, strict=True)]
