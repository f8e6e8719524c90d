"""The run file's sections about scores: reward functions, GenRMs, and how a GenRM's text becomes a number.

The other sections, and the whole, are in `yatt.config.schema`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from yatt.config.operation import rule
from yatt.config.ranges import (
    COUNT,
    COUNT_OR_NONE,
    FILE,
    FINITE,
    FREE,
    LINE,
    SECONDS,
    SHARE,
    SIZE_BYTES,
    Free,
    between,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSection:
    """A reward function: `compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)`."""

    name: Annotated[str, LINE]
    """Of the score in metrics."""

    path: Annotated[str, FILE]
    """A Python file, or `builtin:NAME` for one that ships with yatt."""

    function: Annotated[str, LINE] = "compute_score"
    """Its name in the file. async functions are awaited."""

    style: Literal["verl", "trl"] = "verl"
    """trl: `fn(prompts, completions, **columns) -> list[float]`."""

    weight: Annotated[float, FINITE] = 1.0
    """In the sum that is the reward. 0 only measures, and what fails then costs no prompt group."""

    kwargs: dict[str, Free] = field(default_factory=dict)
    """Keyword arguments that each call gets."""

    timeout_s: Annotated[float, SECONDS] = 60.0
    """Longest time one call may take."""

    def __post_init__(self) -> None:
        rule(bool(self.name), "name is empty.")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictSection:
    """How a GenRM's text becomes a score."""

    pattern: Annotated[str, FREE]
    """Regular expression; the *last* match counts, and its group 1 is the verdict."""

    scores: dict[str, Annotated[float, FINITE]] = field(default_factory=dict)
    """Verdict to score. Empty: the verdict is itself a plain decimal number."""

    minimum: Annotated[float, FINITE] = -1000.0
    """A number below this is no verdict."""

    maximum: Annotated[float, FINITE] = 1000.0
    """A number above this is no verdict."""

    timeout_s: Annotated[float, SECONDS] = 5.0
    """How long the pattern may search one text."""

    def __post_init__(self) -> None:
        rule(self.minimum <= self.maximum, f"minimum {self.minimum:g} is above maximum {self.maximum:g}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenRMSection:
    """A generative reward model: an engine whose text is parsed into a verdict."""

    name: Annotated[str, LINE]
    """Name of the GenRM in metrics and reports."""

    model: Annotated[str, FILE]
    """Hugging Face folder."""

    template: Annotated[str, FREE] = ""
    """Text with {prompt}, {completion}, {ground_truth}, {data_source}. Empty when `path` is given."""

    chat: bool = False
    """Send the rendered text as a user's message through the model's chat template."""

    path: Annotated[str, FILE] = ""
    """A Python file with a function that is handed a GenRM client, instead of template and verdict."""

    function: Annotated[str, LINE] = "compute_score"
    """Name of the function in the file."""

    timeout_s: Annotated[float, SECONDS] = 60.0
    """How long the function may take for one completion, beside waiting for the GenRM."""

    verdict: VerdictSection = field(default_factory=lambda: VerdictSection(pattern=""))
    weight: Annotated[float, FINITE] = 1.0
    """Factor of its score in the reward."""

    max_tokens: Annotated[int, COUNT] = 512
    """Longest verdict, in tokens."""

    temperature: Annotated[float, between(0, 100)] = 0.0
    """Sampling temperature of verdicts; 0 is greedy."""

    max_model_tokens: Annotated[int, COUNT_OR_NONE] = 0
    """Prompt and verdict together; 0 is the model's own limit, filled in when the run starts."""

    stop: tuple[Annotated[str, FREE], ...] = ()
    """Texts that end a verdict."""

    retries: Annotated[int, COUNT_OR_NONE] = 1
    """How often an unreadable verdict, or one cut at max_tokens, is asked for again, with another seed."""

    retry_temperature: Annotated[float, between(0, 100)] = 0.6
    """Of these retries where `temperature` is lower: the same question at 0 gets the same answer."""

    on_unparsable: Literal["drop_group", "score"] = "drop_group"
    """After the retries: leave the prompt group out, or give `unparsable_score`. Counted either way."""

    unparsable_score: Annotated[float, FINITE] = 0.0
    """Score of a verdict that cannot be read."""

    engine: Literal["auto", "vllm", "transformers", "scripted"] = "auto"
    """The inference library; auto takes vLLM where it supports the model."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the engine's weights."""

    tp_size: Annotated[int, COUNT] = 1
    """GPUs of one engine."""

    max_num_seqs: Annotated[int, COUNT] = 256
    """Most sequences that one engine runs at a time."""

    kv_cache_bytes: Annotated[int, SIZE_BYTES] = 0
    """Size of the KV cache; 0 lets the engine choose."""

    gpu_memory_utilization: Annotated[float, SHARE] = 0.85
    """Share of GPU memory that one engine may use."""

    enforce_eager: bool = False
    """Run without CUDA graphs."""

    def __post_init__(self) -> None:
        rule(bool(self.name), "name is empty.")
        rule(
            bool(self.template) != bool(self.path),
            "give either template (with verdict) or path (a Python function), not both and not neither.",
        )
