"""The interface of an inference engine, and its settings.

Every implementation passes `tests/contract/test_engine.py`. One thread uses an engine: `add` and `abort`
only queue, `step` computes. Weights change only while no request is running, so one `Completed` never mixes
policy versions. To continue a completion after an update, send prompt + partial completion as a new prompt.

On CPU, `sleep` need not free memory: vLLM's CPU build keeps its weights and KV cache. The arbiter counts
them as declared sleeping memory.
"""

import array
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from yatt.adapters.inputs.model_family import has_turned_experts
from yatt.adapters.inputs.tokenizer import eos_ids
from yatt.config.engine_keys import SPECULATION
from yatt.config.schema import GenRMSection, RunConfig
from yatt.config.sections.ranges import EngineValue
from yatt.config.sizes import rollout_context
from yatt.errors import WorkerFailed
from yatt.models.folder import takes_pictures
from yatt.models.model import read_config
from yatt.models.quantized import KEY
from yatt.records.message import MOST_WATCHED, Completed, SampleRequest, unpack_ids

EngineKind = Literal["vllm", "transformers", "scripted"]
CPU_KV_CACHE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Published weights that differ in the engine (the first few), and the number of compared weights.

    `num_readable`: those whose bits the engine has, whether or not their published checksum is known.
    """

    differing: tuple[str, ...] = ()
    num_compared: int = 0
    num_readable: int = 0


class RanksLost(WorkerFailed):
    """The ranks of an engine of several processes cannot go on together: one has ended, or they differ. All
    of them end, and are started again."""


class Engine(Protocol):
    """Samples completions, with the guarantees in this module's docstring."""

    @property
    def is_busy(self) -> bool:
        """Whether requests are waiting or running, so that `step` has work."""

    def start(self) -> None:
        """Loads the model of the options' folder as policy version 0."""

    def add(self, sample: SampleRequest) -> None:
        """Queues one request; an id that is already running is ignored.

        Raises:
            ValueError: this request cannot be served (for example, its prompt is too long).
        """

    def abort(self, request_ids: tuple[str, ...] | None = None) -> list[Completed]:
        """Ends these requests (None: all) and returns their partial completions with reason 'abort'."""

    def step(self) -> list[Completed]:
        """Computes one step; returns the requests that finished in it. Empty and cheap when idle."""

    def idle(self) -> None:
        """Called instead of `step`, about 20 times a second, while the engine is awake without requests."""

    def sleep(self) -> None:
        """Frees the device. Running requests must have been aborted."""

    def wake(self) -> None:
        """Allocates the device memory again after `sleep`."""

    def load_weights(self, policy_version: int, folder: str) -> None:
        """Loads the weights published in `folder` (see yatt.engine.weights.published) and clears the caches.

        Raises:
            WorkerFailed: the folder is not a publication of that policy version, or the weights were changed
                while they were read.
        """

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-prob of each token but the first, at temperature 1, for the sync probe."""

    def compare_weights(self, policy_version: int, folder: str) -> Comparison:
        """Compares, bit by bit, weights in the engine with the published ones whose checksums are known.

        Repacked weights (vLLM's linear layers on CPU) and slices under tensor parallelism are left out.
        """

    def close(self) -> None:
        """Releases everything; the engine cannot be used again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Settings of an engine, the same for every implementation."""

    model: str
    """Hugging Face folder."""

    dtype: Literal["float32", "bfloat16"]
    device: Literal["cpu", "cuda"]
    eos_ids: tuple[int, ...]
    """Tokens that end a completion, from the model folder."""

    max_model_tokens: int
    """Maximum number of tokens of prompt and completion together."""

    max_num_seqs: int = 256
    tp_size: int = 1
    num_ranks: int = 1
    """Number of processes of the engine: 1, or `tp_size` if it spans nodes."""

    kv_cache_bytes: int = 0
    gpu_memory_utilization: float = 0.85
    enforce_eager: bool = False
    expert_parallel: bool = False
    """Each GPU has whole experts, not a part of every expert."""

    deterministic: bool = False
    """One request at a time and no prefix cache: a completion depends on weights, prompt and seed only."""

    takes_pictures: bool = False
    """Whether the model's folder is one that takes pictures."""

    most_pictures: int = 0
    """Maximum number of pictures of a request; 0: the run has none."""

    media_folder: str = ""
    """Folder of prepared pictures on this node."""

    label: int = -1
    """Of a scalar reward model: which number of its head is the score of a text; -1: it has none."""

    is_teacher: bool = False
    """It gives the tokens of completions log-probs, and samples none."""

    num_likeliest: int = 0
    """Of a teacher: number of likeliest tokens that it gives too, where each token is scored."""

    arguments: Mapping[str, EngineValue] = field(default_factory=dict)
    """Options of the engine's library: `engine_args` of the run file."""

    weights_are_replaced: bool = False
    """New weights are loaded after every wake, so sleep need not keep the old ones."""


UNLOADED = "yatt_unloaded"
"""vLLM's name of the way to load a model whose weights come later (`yatt.engine.weights.transfer`)."""


def waits_for_weights(options: EngineOptions) -> bool:
    """Whether engines cannot load the folder's weights, and the trainer can: they are quantised, or experts
    are the other way round than released. The engine starts without any; its first ones are published."""
    is_quantised = bool(read_config(options.model).get(KEY))
    return options.weights_are_replaced and (is_quantised or has_turned_experts(options.model))


def refuse_structure(sample: SampleRequest) -> None:
    """Refuses a request whose answer must have a structure, for engines that cannot keep to one.

    Raises:
        ValueError: it has one.
    """
    if sample.structure:
        raise ValueError("verdict.choices and verdict.json_schema need the vllm engine")


def prompt_and_room(sample: SampleRequest, options: EngineOptions) -> tuple[list[int], int]:
    """The prompt's token ids, and the maximum number of tokens that this request may sample.

    Raises:
        ValueError: the prompt is empty, or leaves no room for a completion.
    """
    prompt_ids = unpack_ids(sample.prompt_ids)
    room = options.max_model_tokens - len(prompt_ids)
    if not prompt_ids or room < 1:
        raise ValueError(
            f"the prompt has {len(prompt_ids)} tokens; this engine takes 1 to "
            f"{options.max_model_tokens - 1} (max_model_tokens {options.max_model_tokens})"
        )
    return prompt_ids, min(sample.max_tokens, room)


@dataclass(slots=True)
class WatchedRows:
    """Log-probs of a request's watched tokens, and what is wrong with them, which is told at its end: the
    ranks of an engine go on alike."""

    ids: tuple[int, ...]
    rows: "array.array[float]" = field(default_factory=lambda: array.array("f"))
    fault: str = ""

    def add(self, row: Sequence[float | None]) -> None:
        """Adds the log-probs at the next sampled token; None: the library has left it out."""
        for token, logprob in zip(self.ids, row, strict=True):
            if logprob is None:
                self.fault = self.fault or f"the engine has left out the log-prob of watched token {token}"
            elif math.isnan(logprob):
                self.fault = self.fault or (
                    f"the log-prob of watched token {token} is not a number: no token fits the structure, or "
                    "the weights are not finite"
                )
            self.rows.append(math.nan if logprob is None else logprob)

    def added_to(self, completed: Completed) -> Completed:
        """Returns the completion with these log-probs, or, if they are at fault, refused."""
        if self.fault:
            reason = "abort" if completed.finish_reason == "abort" else "error"
            return msgspec.structs.replace(
                completed, token_ids=b"", logprobs=b"", finish_reason=reason, error=self.fault
            )
        return msgspec.structs.replace(completed, watched=self.rows.tobytes())


def begin_watching(sample: SampleRequest, options: EngineOptions, vocab_size: int) -> WatchedRows:
    """Returns what collects the log-probs of a request's watched tokens.

    Raises:
        ValueError: this engine cannot give them.
    """
    if options.label >= 0 or options.is_teacher:
        raise ValueError("this engine samples no tokens, so it has no log-probs of watched ones")
    if len(sample.watched) > MOST_WATCHED:
        raise ValueError(f"{len(sample.watched)} watched tokens; an engine takes {MOST_WATCHED} at most")
    if SPECULATION in options.arguments:
        raise ValueError(
            f"with engine_args.{SPECULATION} vLLM gives no log-probs of watched tokens; remove it"
        )
    if (wrong := next((each for each in sample.watched if not 0 <= each < vocab_size), None)) is not None:
        raise ValueError(
            f"watched token {wrong} is not in the model's vocabulary ({vocab_size} entries): "
            "tokenizer and model do not fit"
        )
    return WatchedRows(sample.watched)


def rollout_options(config: RunConfig, device: Literal["cpu", "cuda"]) -> EngineOptions:
    """Settings of the engines that sample the policy."""
    rollout = config.rollout
    return EngineOptions(
        model=config.model.path,
        dtype=config.model.dtype,
        device=device,
        eos_ids=eos_ids(config.model.path),
        max_model_tokens=rollout_context(config),
        max_num_seqs=rollout.max_num_seqs,
        tp_size=rollout.tp_size,
        kv_cache_bytes=rollout.kv_cache_bytes,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        expert_parallel=rollout.expert_parallel,
        arguments=rollout.engine_args,
        deterministic=config.run.deterministic,
        takes_pictures=takes_pictures(config.model.path),
        most_pictures=config.media.most_per_prompt if config.data.media_store else 0,
        weights_are_replaced=config.trains,
    )


def genrm_options(
    genrm: GenRMSection, *, device: Literal["cpu", "cuda"], deterministic: bool, most_pictures: int = 0
) -> EngineOptions:
    """Settings of the engines of one GenRM."""
    return EngineOptions(
        model=genrm.model,
        dtype=genrm.dtype,
        device=device,
        eos_ids=eos_ids(genrm.model),
        max_model_tokens=genrm.max_model_tokens,
        max_num_seqs=genrm.max_num_seqs,
        tp_size=genrm.tp_size,
        kv_cache_bytes=genrm.kv_cache_bytes,
        gpu_memory_utilization=genrm.gpu_memory_utilization,
        enforce_eager=genrm.enforce_eager,
        expert_parallel=genrm.expert_parallel,
        arguments=genrm.engine_args,
        label=genrm.label if genrm.kind == "scalar" else -1,
        is_teacher=genrm.kind == "teacher",
        num_likeliest=genrm.top_k,
        deterministic=deterministic,
        takes_pictures=takes_pictures(genrm.model),
        most_pictures=most_pictures,
    )
