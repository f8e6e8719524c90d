"""The run file's sections about scores: reward functions, GenRMs and their verdicts.

The other sections and the complete config are in `yatt.config.schema`.
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
    """Name of the score in metrics."""

    path: Annotated[str, FILE]
    """A Python file, or `builtin:NAME` for a function that ships with yatt."""

    function: Annotated[str, LINE] = "compute_score"
    """Name of the function in the file. Async functions are awaited."""

    style: Literal["verl", "trl"] = "verl"
    """trl: `fn(prompts, completions, **columns) -> list[float]`."""

    weight: Annotated[float, FINITE] = 1.0
    """Weight of the score in the reward. 0: measured only; its failures then drop no prompt group."""

    kwargs: dict[str, Free] = field(default_factory=dict)
    """Keyword arguments of each call."""

    timeout_s: Annotated[float, SECONDS] = 60.0
    """Time limit of one call."""

    def __post_init__(self) -> None:
        rule(bool(self.name), "name is empty.")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictSection:
    """How a GenRM's text is parsed into a score."""

    pattern: Annotated[str, FREE]
    """Regular expression; the *last* match counts, and its group 1 is the verdict."""

    scores: dict[str, Annotated[float, FINITE]] = field(default_factory=dict)
    """Maps verdicts to scores. Empty: the verdict itself is a plain decimal number."""

    minimum: Annotated[float, FINITE] = -1000.0
    """A number below this is not a valid verdict."""

    maximum: Annotated[float, FINITE] = 1000.0
    """A number above this is not a valid verdict."""

    timeout_s: Annotated[float, SECONDS] = 5.0
    """Time limit of the pattern search in one text."""

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
    """Send the rendered text as a user message through the model's chat template."""

    path: Annotated[str, FILE] = ""
    """A Python file with a function that gets a GenRM client, instead of template and verdict."""

    function: Annotated[str, LINE] = "compute_score"
    """Name of the function in the file."""

    timeout_s: Annotated[float, SECONDS] = 60.0
    """Time limit of the function for one completion, without the time that it waits for the GenRM."""

    verdict: VerdictSection = field(default_factory=lambda: VerdictSection(pattern=""))
    weight: Annotated[float, FINITE] = 1.0
    """Weight of its score in the reward."""

    max_tokens: Annotated[int, COUNT] = 512
    """Maximum length of a verdict, in tokens."""

    temperature: Annotated[float, between(0, 100)] = 0.0
    """Sampling temperature of verdicts; 0 is greedy."""

    max_model_tokens: Annotated[int, COUNT_OR_NONE] = 0
    """Tokens of prompt and verdict together; 0: the model's own limit, filled in when the run starts."""

    stop: tuple[Annotated[str, FREE], ...] = ()
    """Texts that end a verdict."""

    retries: Annotated[int, COUNT_OR_NONE] = 1
    """Number of retries, with another seed, for a verdict that is unreadable or truncated at max_tokens."""

    retry_temperature: Annotated[float, between(0, 100)] = 0.6
    """Temperature of these retries if `temperature` is lower: at 0, the verdict would be the same."""

    on_unparsable: Literal["drop_group", "score"] = "drop_group"
    """After the retries: drop the prompt group, or use `unparsable_score`. Both are counted."""

    unparsable_score: Annotated[float, FINITE] = 0.0
    """Score of a verdict that cannot be read."""

    engine: Literal["auto", "vllm", "transformers", "scripted"] = "auto"
    """The inference library; auto uses vLLM if it supports the model."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the engine's weights."""

    tp_size: Annotated[int, COUNT] = 1
    """GPUs per engine (tensor parallelism)."""

    max_num_seqs: Annotated[int, COUNT] = 256
    """Maximum number of sequences that one engine runs at the same time."""

    kv_cache_bytes: Annotated[int, SIZE_BYTES] = 0
    """Size of the KV cache; 0 lets the engine choose."""

    gpu_memory_utilization: Annotated[float, SHARE] = 0.85
    """Fraction of GPU memory that one engine may use."""

    enforce_eager: bool = False
    """Run without CUDA graphs."""

    def __post_init__(self) -> None:
        rule(bool(self.name), "name is empty.")
        rule(
            bool(self.template) != bool(self.path),
            "write either template (with verdict) or path (a Python function), exactly one of them.",
        )
