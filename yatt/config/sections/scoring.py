"""The run file's section about GenRMs.

The other sections and the complete config are in `yatt.config.schema`.
"""

from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Literal

from yatt.config.sections.judges import (
    ApiSection as ApiSection,
    JudgingSection as JudgingSection,
    RefreshSection as RefreshSection,
    ThinkSection as ThinkSection,
    VerdictSection as VerdictSection,
    check_curve_name,
)
from yatt.config.sections.operation import rule
from yatt.config.sections.ranges import (
    COUNT,
    COUNT_OR_NONE,
    FILE,
    FILLED,
    FINITE,
    FREE,
    LAYOUT,
    LINE,
    OPERATIONAL,
    SECONDS,
    SHARE,
    SIZE_BYTES,
    EngineValue,
    range_between,
)

MOST_LIKELIEST = 128
"""Most likeliest tokens of a teacher: a completion's have 8 bytes each, for each of its tokens."""

LEAST_SOFT = 0.01
"""Lowest temperature above 0 at which log-probs are of what was sampled."""

MEASURES = ("confidence", "elsewhere", "same", "longer_wins")
"""What soft verdicts and scores say of a judge: metrics like criteria."""

POLICY, POLICY_AT_START = "policy", "policy@start"
"""Names of models of GenRMs that are no folders."""

_OF_SCALARS = ("transform", "label")
_OF_TEACHERS = ("coef", "data_sources", "top_k")
_OF_TEXTS = (
    "judging",
    "votes",
    "path",
    "function",
    "timeout_s",
    "verdict",
    "think",
    "max_tokens",
    "temperature",
    "stop",
    "retries",
    "retry_temperature",
    "on_unparsable",
    "unparsable_score",
    "sees",
)
"""Keys of a GenRM that only one kind has."""

OF_ENGINES = (
    "engine",
    "dtype",
    "tp_size",
    "max_num_seqs",
    "kv_cache_bytes",
    "gpu_memory_utilization",
    "enforce_eager",
    "expert_parallel",
    "engine_args",
)
"""Keys of a GenRM's engine; all but `dtype` are keys of `rollout`, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenRMSection:
    """A generative reward model: an engine, or a judge behind a URL, whose text is parsed into a verdict.
    Or a reward model whose head gives a number, or a teacher: see `kind`."""

    name: Annotated[str, LINE]
    """Name of the GenRM in metrics and reports."""

    model: Annotated[str, FILE]
    """Hugging Face folder; with `api.url`, the model's name there. policy: the policy judges itself, with the
    weights that it samples with, on its own engines; the keys of an engine are those of `rollout`, and
    max_model_tokens must be written. policy@start: the folder `model.path`, with an engine of its own."""

    kind: Literal["text", "scalar", "teacher"] = "text"
    """text: it writes a verdict. scalar: its folder's class is named ...ForSequenceClassification; the score
    is the raw number that its head gives the text of `template`, or with `chat: true` the conversation.
    teacher: a model with the policy's tokenizer, whose log-probs the policy's tokens are rewarded by, or
    whose likeliest tokens the policy is brought to (`top_k`)."""

    transform: Literal["none", "sigmoid", "standardize"] = "none"
    """scalar: the score from the number. standardize: less the mean of the prompt's completions, divided by
    their standard deviation."""

    label: Annotated[int, COUNT_OR_NONE] = 0
    """scalar: which number, if the head has several."""

    coef: Annotated[float, FINITE] = 1.0
    """teacher: factor of what is added to each sampled token's advantage: the teacher's log-prob less the
    sampler's (distillation on the policy's own tokens). Its mean over a completion is the score, which has no
    weight in the reward. With `top_k`: factor of the loss."""

    top_k: Annotated[int, range_between(0, MOST_LIKELIEST)] = 0
    """teacher: 0: it rewards tokens, see `coef`. Above: instead, each sampled token's loss gains `coef` times
    the KL divergence of the policy from the teacher (forward KL) over so many of the teacher's likeliest
    tokens there, with all others as one."""

    data_sources: tuple[Annotated[str, LINE], ...] = ()
    """teacher: only for rows of these data sources; empty: for all."""

    api: ApiSection = field(default_factory=ApiSection)
    template: Annotated[str, FREE] = ""
    """Text with {prompt}, {completion}, {ground_truth}, {data_source}; pairwise with {completion_a} and
    {completion_b}, listwise with {completions}, instead of {completion}. Empty when `path` is given."""

    sees: Literal["none", "prompt", "all"] = "none"
    """Pictures that it is shown. prompt: those of the prompt, where {media} is in the template; without it,
    where they are in {prompt}; without that, before all. all: those of the environment's answers too;
    completions are then whole conversations, with the answers. The model has to take pictures. A judge behind
    a URL gets them as JPEG files in its messages."""

    judging: JudgingSection = field(default_factory=JudgingSection)
    votes: Annotated[int, COUNT] = 1
    """Verdicts per judgement, with different seeds; their mean counts."""

    chat: bool = False
    """Send the rendered text as a user message through the model's chat template. scalar: the prompt's
    messages and the completion as one conversation, without a template."""

    path: Annotated[str, FILE] = ""
    """A Python file with a function that gets a GenRM client, instead of template and verdict; with
    `judging.by: own`, with one that gives the way of judging."""

    function: Annotated[str, LINE] = "compute_score"
    """Name of the function in the file."""

    timeout_s: Annotated[float, SECONDS, OPERATIONAL] = 60.0
    """Time limit of the function for one completion, without the time that it waits for the GenRM. own: for
    the questions about a group, or its scores."""

    think: ThinkSection = field(default_factory=ThinkSection)
    refresh: RefreshSection = field(default_factory=RefreshSection)
    verdict: VerdictSection = field(default_factory=VerdictSection)
    weight: Annotated[float, FINITE] = 1.0
    """Weight of its score in the reward."""

    share: Annotated[float, SHARE] = 1.0
    """Share of the prompt groups that it judges, drawn by the prompt's number; of held-out rows all. Below 1
    only with weight: 0: an audit, which watches what the other scores lead to at a part of the price."""

    max_tokens: Annotated[int, COUNT] = 512
    """Maximum length of a verdict, in tokens, without the thought before it (`think`)."""

    temperature: Annotated[float, range_between(0, 100)] = 0.0
    """Sampling temperature of verdicts; 0 is greedy."""

    max_model_tokens: Annotated[int, COUNT_OR_NONE] = 0
    """Tokens of prompt, thought and verdict together; 0: the model's own limit, filled in when the run
    starts."""

    stop: tuple[Annotated[str, FILLED], ...] = ()
    """Texts that end a verdict."""

    retries: Annotated[int, COUNT_OR_NONE] = 1
    """Number of retries, with another seed, for a verdict that is unreadable or truncated at max_tokens."""

    retry_temperature: Annotated[float, range_between(0, 100)] = 0.6
    """Temperature of these retries if `temperature` is lower: at 0, the verdict would be the same."""

    on_unparsable: Literal["drop_group", "score"] = "drop_group"
    """After the retries: drop the prompt group, or use `unparsable_score`. Both are counted."""

    unparsable_score: Annotated[float, FINITE] = 0.0
    """Score of a verdict that cannot be read. A comparison without verdict counts as a tie instead."""

    engine: Annotated[Literal["auto", "vllm", "transformers", "scripted"], LAYOUT] = "auto"
    """The inference library; auto uses vLLM if it supports the model."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the engine's weights."""

    tp_size: Annotated[int, COUNT, LAYOUT] = 1
    """GPUs per engine (tensor parallelism). A divisor of the largest tp_size in the run file; where that is
    larger, several engines are side by side. A multiple of a node's GPUs: the engine spans nodes (vLLM)."""

    max_num_seqs: Annotated[int, COUNT, LAYOUT] = 256
    """Maximum number of sequences that one engine runs at the same time."""

    kv_cache_bytes: Annotated[int, SIZE_BYTES, LAYOUT] = 0
    """Size of the KV cache; 0 lets the engine choose."""

    gpu_memory_utilization: Annotated[float, SHARE, LAYOUT] = 0.85
    """Fraction of GPU memory that one engine may use."""

    enforce_eager: Annotated[bool, LAYOUT] = False
    """Run without CUDA graphs."""

    expert_parallel: Annotated[bool, LAYOUT] = False
    """Give each GPU of an engine whole experts; as in `rollout`."""

    engine_args: Annotated[dict[str, EngineValue], LAYOUT] = field(default_factory=dict)
    """Options of vLLM, by its names; as in `rollout`."""

    def __post_init__(self) -> None:
        check_curve_name(self.name)
        rule(
            self.share == 1 or (self.weight == 0 and self.kind != "teacher"),
            "share: a score that counts is needed of every prompt group; write weight: 0, or remove share.",
        )
        self._check_policy()
        rule(
            not self.refresh.url or (self.has_engine and self.kind == "text"),
            "refresh: is for a GenRM of kind: text with engines of its own; remove it.",
        )
        for kind, names in (("scalar", _OF_SCALARS), ("teacher", _OF_TEACHERS)):
            for name in names if self.kind != kind else ():
                rule(self._is_default(name), f"{name}: is for kind: {kind}; remove it.")
        if self.kind != "text":
            self._check_numbers()
            return
        is_own = self.judging.by == "own"
        rule(
            not is_own or bool(self.template and self.path),
            "judging.by: own needs path and function, which give the way of judging, and a template.",
        )
        rule(
            is_own or bool(self.template) != bool(self.path),
            "write either template (with verdict) or path (a Python function), exactly one of them.",
        )
        rule(
            self.judging.by == "pointwise" or bool(self.template),
            f"judging.by: {self.judging.by} needs a template; a function judges one completion at a time.",
        )
        rule(
            self.votes == 1 or self.temperature > 0,
            "votes: at temperature 0 all votes are the same; set temperature above 0.",
        )
        rule(
            self.sees == "none" or bool(self.template),
            "sees: needs a template; functions get text only.",
        )
        rule(
            self.verdict.read == "word" or self.judging.by != "listwise",
            "verdict.read: soft is for words; a ranking has none.",
        )
        rule(
            self.verdict.read == "word" or not any(0 < each < LEAST_SOFT for each in self._temperatures()),
            f"verdict.read: soft: a temperature above 0 and below {LEAST_SOFT:g} is none that vLLM samples "
            "with; write 0, or a larger one.",
        )
        rule(
            self.verdict.read == "word" or "speculative_config" not in self.engine_args,
            "verdict.read: soft: with speculative_config vLLM gives no log-probs of words; remove it.",
        )
        self._check_thinking()
        self._check_pairwise()

    def _check_policy(self) -> None:
        if not self.is_policy:
            return
        rule(self.kind != "scalar", "model: a policy has no head that gives numbers; name the folder of one.")
        for name in OF_ENGINES:
            rule(
                self._is_default(name),
                f"{name}: has no effect with model: policy, whose engines are those of rollout; remove it.",
            )
        rule(
            self.kind == "text" and not self.asks_by_client,
            "model: policy judges by a template; write model: policy@start for a teacher, or for a function "
            "with a client.",
        )
        rule(
            self.sees == "none",
            "sees: model: policy is shown no pictures to judge; write model: policy@start, or sees: none.",
        )
        rule(
            self.max_model_tokens > 0,
            "max_model_tokens: the policy's engines are built for the longest question with its answer; with "
            "model: policy write it.",
        )

    def _check_thinking(self) -> None:
        if not self.think.budget:
            return
        rule(
            not self.api.url,
            "think: a service cannot continue a text that it has begun; remove it, and write the service's "
            "own switch for reasoning into api.body.",
        )
        rule(
            not self.asks_by_client,
            "think: is for questions by template; a function's client asks one request at a time. Remove it.",
        )

    def _check_numbers(self) -> None:
        more = ("template", "chat", "weight") if self.kind == "teacher" else ()
        for name in (*_OF_TEXTS, *more):
            rule(self._is_default(name), f"{name}: has no effect with kind: {self.kind}; remove it.")
        rule(
            not self.api.url,
            f"kind: {self.kind} needs an engine of the run; a service gives text. Remove api.",
        )
        if self.kind == "teacher":
            rule(
                not self.top_k or self.coef > 0,
                f"coef: {self.coef:g} with top_k is no loss that brings the policy near the teacher; write a "
                "number above 0, or remove top_k.",
            )
            return
        rule(
            bool(self.template) != self.chat,
            "kind: scalar is shown the text of a template, such as '{prompt}{completion}', or with chat: "
            "true the conversation; write one of them.",
        )

    def _is_default(self, name: str) -> bool:
        known = next(each for each in fields(self) if each.name == name)
        default = known.default if known.default_factory is MISSING else known.default_factory()
        return bool(getattr(self, name) == default)

    def _temperatures(self) -> tuple[float, ...]:
        """Temperatures at which verdicts are sampled."""
        return self.temperature, *((self.retry_temperature,) if self.retries else ())

    def _check_pairwise(self) -> None:
        if self.judging.by == "rubric":
            self._check_rubric()
        if self.judging.by != "pairwise":
            return
        rule(
            all(0 <= share <= 1 for share in self.verdict.scores.values()),
            "judging.by: pairwise needs verdict.scores between 0 and 1: the share that the completion shown "
            "first has won.",
        )
        rule(
            bool(self.verdict.scores) or (self.verdict.minimum >= 0 and self.verdict.maximum <= 1),
            "judging.by: pairwise needs verdict.scores, such as {A: 1, B: 0}, or minimum 0 and maximum 1.",
        )

    def _check_rubric(self) -> None:
        verdict, known = self.verdict, VerdictSection()
        measured = [each.name for each in self.judging.criteria if each.name in MEASURES]
        rule(
            not measured,
            f"judging.criteria: {', '.join(MEASURES)} are names of a judge's own measures; write another.",
        )
        rule(verdict.read == "word" or self.judging.asks == "each", "read: soft needs judging.asks: each.")
        has_scale = known.minimum < verdict.minimum < verdict.maximum < known.maximum
        rule(
            all(0 <= value <= 1 for value in verdict.scores.values()) and (bool(verdict.scores) or has_scale),
            "judging.by: rubric needs verdict.scores between 0 and 1, such as {YES: 1, NO: 0}, or "
            "verdict.minimum and verdict.maximum, the scale of the numbers.",
        )
        rule(0 <= self.unparsable_score <= 1, "unparsable_score: of a criterion is from 0 to 1.")
        rule(
            self.judging.asks == "each" or not (verdict.pattern or verdict.choices or verdict.json_schema),
            "judging.asks: together has a form of its own, JSON with a value for each criterion; remove "
            "verdict.pattern, choices and json_schema.",
        )

    @property
    def asks_by_client(self) -> bool:
        """Whether a function of the user asks it, by a client."""
        return bool(self.path) and self.judging.by != "own"

    @property
    def has_known_questions(self) -> bool:
        """Whether its questions are known without the user's code."""
        return not self.path

    @property
    def has_engine(self) -> bool:
        """Whether it has engines of its own."""
        return not self.api.url and not self.is_policy

    @property
    def is_policy(self) -> bool:
        """Whether the policy's engines answer, with its present weights."""
        return self.model == POLICY and not self.api.url
