"""The run file's sections, one frozen dataclass each; units are in the names.

Names follow verl's if the meaning is the same, and megatron-core's for its own sizes. A value without a safe
default has none. Rules inside one section are checked in its ``__post_init__``; rules between sections in
`yatt.config.check`. Every section is complete after loading.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from yatt.config.sections.algorithm import (
    GAE,
    AlgorithmSection as AlgorithmSection,
    CorrectionSection as CorrectionSection,
    RejectionSection as RejectionSection,
)
from yatt.config.sections.critic import CriticSection as CriticSection
from yatt.config.sections.data import DataSection as DataSection
from yatt.config.sections.functions import (
    EnvironmentSection as EnvironmentSection,
    RewardSection as RewardSection,
)
from yatt.config.sections.given import FORMS, GROUP_SIZES, PreferenceSection as PreferenceSection
from yatt.config.sections.judges import VerdictSection as VerdictSection
from yatt.config.sections.media import MediaSection as MediaSection, VisionSection as VisionSection
from yatt.config.sections.operation import (
    CheckpointSection as CheckpointSection,
    FromCheckpointSection as FromCheckpointSection,
    LaunchSection as LaunchSection,
    LeaseSection as LeaseSection,
    LoggingSection as LoggingSection,
    RunSection as RunSection,
    SyncSection as SyncSection,
    rule,
)
from yatt.config.sections.profile import ProfileSection as ProfileSection
from yatt.config.sections.ranges import (
    COUNT,
    COUNT_OR_NONE,
    ENGINE_SIZE,
    FILE,
    FILLED,
    LAYOUT,
    LINE,
    MOST,
    OPERATIONAL,
    SECONDS,
    SHARE,
    SIZE_BYTES,
    EngineValue,
    Range,
    range_above,
    range_between,
)
from yatt.config.sections.scoring import (
    POLICY_AT_START,
    GenRMSection as GenRMSection,
)
from yatt.config.sections.training import (
    OptimizerSection as OptimizerSection,
    TrainerSection as TrainerSection,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """The policy."""

    path: Annotated[str, FILE]
    """Hugging Face folder: config.json, safetensors, tokenizer. Qwen2, Qwen3, Llama, Mistral, Mixtral,
    Qwen2-MoE, Qwen3-MoE, GLM-4.5, DeepSeek-V3, Kimi K2, OLMo-2, OLMo-3, MiniMax-M2; with pictures Qwen2.5-VL,
    Qwen3-VL, Qwen3-VL-MoE, GLM-4.5V, InternVL (docs/models.md); or `family`."""

    family: Annotated[str, FILE] = ""
    """Python file with a model family of your own (docs/extending.md), for models of other types."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of parameters and activations; the optimizer's main copy is always float32."""

    trainer: Literal["megatron", "scripted"] = "megatron"
    """What trains the policy. scripted: nothing learns, no GPU and no torch is needed, and everything else is
    as it will be: rehearse a job on a site with it (docs/slurm.md). It needs rollout.engine: scripted."""

    spec: Annotated[Literal["auto", "te", "torch"], LAYOUT] = "auto"
    """Layer implementation: Transformer Engine or plain torch. auto uses te if it can be imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSection:
    """Sampling by the policy."""

    n: Annotated[int, COUNT] = 8
    """Completions per prompt: the size of a prompt group."""

    temperature: Annotated[float, range_above(0, most=100)] = 1.0
    """Sampling temperature."""

    top_p: Annotated[float, SHARE] = 1.0
    """Sample from the most likely tokens whose probabilities sum up to this (nucleus sampling)."""

    top_k: Annotated[int, Range(low=1, high=MOST, also=-1, also_means="all")] = -1
    """Sample from this many most likely tokens."""

    max_response_tokens: Annotated[int, COUNT] = 1024
    """Maximum length of a completion, in tokens."""

    stop: tuple[Annotated[str, FILLED], ...] = ()
    """Texts that end a completion, in addition to the end-of-sequence token."""

    ignore_eos: bool = False
    """Continue after the end-of-sequence token; for benchmarks."""

    engine: Annotated[Literal["auto", "vllm", "transformers", "scripted"], LAYOUT] = "auto"
    """Inference library. auto: vllm if it can be imported, else transformers. scripted: protocol tests."""

    tp_size: Annotated[int, COUNT, LAYOUT] = 1
    """GPUs per engine (tensor parallelism). A divisor of the largest tp_size in the run file; where that is
    larger, several engines are side by side. A multiple of a node's GPUs: the engine spans nodes (vLLM)."""

    max_num_seqs: Annotated[int, COUNT, ENGINE_SIZE] = 256
    """Maximum number of requests that an engine runs at the same time."""

    kv_cache_bytes: Annotated[int, SIZE_BYTES, ENGINE_SIZE] = 0
    """Size of an engine's KV cache; 0: by `gpu_memory_utilization` (on CPU: 256 MiB)."""

    gpu_memory_utilization: Annotated[float, SHARE, ENGINE_SIZE] = 0.85
    """Fraction of GPU memory that one engine may use."""

    enforce_eager: Annotated[bool, ENGINE_SIZE] = False
    """Do not capture CUDA graphs: starts faster, samples slower."""

    expert_parallel: Annotated[bool, LAYOUT] = False
    """Give each GPU of an engine whole experts, not a part of every expert's matrices: for a mixture of
    experts in vLLM on CUDA, with tp_size above 1."""

    engine_args: Annotated[dict[str, EngineValue], LAYOUT] = field(default_factory=dict)
    """Options of vLLM that have no key here, passed on by vLLM's names: quantization, kv_cache_dtype,
    speculative_config, max_num_batched_tokens, compilation_config, attention_backend and others. Options that
    would break what a run relies on are refused."""

    max_policy_age: Annotated[int, COUNT_OR_NONE] = 1
    """Maximum number of policy versions between a group's oldest token and its training. Older completions
    are sampled again, also complete ones whose group is not complete."""

    ahead: Annotated[int, COUNT_OR_NONE] = 0
    """Number of batches that are sampled before training asks for them (disaggregated placement). 0: sampling
    and training take turns. 1: the next batch is sampled while this one is trained, by a policy that is one
    version older (one step off)."""

    oversample: Annotated[float, range_between(1, 4)] = 1.0
    """Prompt groups in progress per group that an iteration needs. At 1.25 a quarter more are sampled, and
    the rollout phase ends when enough are complete; the others keep their tokens and continue first in the
    next one. Above 1, an iteration does not wait for its longest completions."""

    request_timeout_s: Annotated[float, SECONDS, OPERATIONAL] = 600.0
    """Time without a token or other progress after which a completion is aborted and requested again, up to
    `max_retries` times. Waiting for an engine does not count."""

    max_retries: Annotated[int, COUNT_OR_NONE, OPERATIONAL] = 3
    """Number of retries of a request before its sample fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSection:
    """Assignment of GPUs to roles."""

    mode: Annotated[Literal["colocated", "partial", "disaggregated"], LAYOUT] = "colocated"
    """How roles share GPUs. colocated: rollout, GenRMs and trainer use all GPUs in turn. partial: GenRMs
    keep some GPU sets during the rollout phase. disaggregated: some nodes only train, the others only run
    engines."""

    genrm_gpu_sets: Annotated[int, COUNT_OR_NONE, LAYOUT] = 0
    """partial, disaggregated: number of GPU sets of GenRM engines, counted from the last node. A GPU
    set has as many GPUs as the largest tp_size, but at most those of a node."""

    split: Annotated[Literal["fixed", "dynamic"], LAYOUT] = "fixed"
    """partial, disaggregated: whether GPU sets stay with rollout or their GenRM. dynamic: they change,
    between batches to the split that is predicted to be fastest, and near the end of a batch to GenRMs with a
    backlog; in partial also to taking turns, as in colocated. genrm_gpu_sets is only the beginning."""

    min_gpu_sets: Annotated[dict[str, Annotated[int, COUNT]], LAYOUT] = field(default_factory=dict)
    """dynamic: fewest GPU sets of a role, `rollout` or `genrm:NAME`; 1 if not written. With limits roles
    never take turns."""

    max_gpu_sets: Annotated[dict[str, Annotated[int, COUNT]], LAYOUT] = field(default_factory=dict)
    """dynamic: most GPU sets of a role; no limit if not written."""

    trainer_nodes: Annotated[int, COUNT_OR_NONE, LAYOUT] = 0
    """disaggregated: number of trainer nodes, which are the first; all others only run engines."""

    send_changes: Annotated[bool, OPERATIONAL] = True
    """Between nodes, send only the bfloat16 weights that changed since the version before; no effect on other
    types. A node that gives weights then holds them once more in memory, and a node that fetches them has
    the newest changes."""

    send_slices: Annotated[bool, OPERATIONAL] = True
    """Between nodes, send a node of an engine that spans several only the slices of weights that its GPUs
    have; no effect on engines that fit a node. false: all of every tensor, a multiple of the memory and of
    the time, for an engine that reads more than its slices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSection:
    """Validation on held-out prompts, scored by a reward function that may have weight 0."""

    reward: Annotated[str, LINE] = ""
    """Name of a reward in `rewards`; empty: no validation."""

    every: Annotated[int, COUNT_OR_NONE] = 0
    """Iterations between validations; 0: only at start and end."""

    n: Annotated[int, COUNT] = 1
    """Completions per prompt."""

    temperature: Annotated[float, range_between(0, 100)] = 1.0
    """Sampling temperature; 0 is greedy."""

    max_prompts: Annotated[int, COUNT] = 1024
    """Maximum number of prompts that are scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run file."""

    run: RunSection
    data: DataSection
    model: ModelSection
    optimizer: OptimizerSection
    trainer: TrainerSection
    launch: LaunchSection = field(default_factory=LaunchSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    rewards: tuple[RewardSection, ...] = ()
    genrms: tuple[GenRMSection, ...] = ()
    environment: EnvironmentSection = field(default_factory=EnvironmentSection)
    placement: PlacementSection = field(default_factory=PlacementSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    critic: CriticSection = field(default_factory=CriticSection)
    preference: PreferenceSection = field(default_factory=PreferenceSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    validation: Annotated[ValidationSection, OPERATIONAL] = field(default_factory=ValidationSection)
    lease: Annotated[LeaseSection, OPERATIONAL] = field(default_factory=LeaseSection)
    sync: Annotated[SyncSection, OPERATIONAL] = field(default_factory=SyncSection)
    logging: Annotated[LoggingSection, OPERATIONAL] = field(default_factory=LoggingSection)
    profile: Annotated[ProfileSection, OPERATIONAL] = field(default_factory=ProfileSection)
    media: MediaSection = field(default_factory=MediaSection)
    vision: VisionSection = field(default_factory=VisionSection)

    def __post_init__(self) -> None:
        """Fills in the policy's folder, and what the kind of run decides, whoever reads it."""
        at_start = [genrm.model == POLICY_AT_START and genrm.has_engine for genrm in self.genrms]
        if any(at_start):
            pairs = zip(self.genrms, at_start, strict=True)
            filled = (replace(g, model=self.model.path) if is_start else g for g, is_start in pairs)
            object.__setattr__(self, "genrms", tuple(filled))
        form, *others = FORMS[self.run.kind]
        rule(
            self.data.form in ("prompts", form, *others),
            f"run.kind is {self.run.kind}, but data.form is {self.data.form}. A run keeps its kind; in a "
            "file of your own leave out data.form, which run.kind fills in.",
        )
        if (size := GROUP_SIZES.get(form)) is None:
            return
        rule(
            self.rollout.n in (size, RolloutSection.__dataclass_fields__["n"].default),
            f"rollout.n is {self.rollout.n}, but a row has {size} with run.kind: {self.run.kind}; remove it.",
        )
        object.__setattr__(self, "data", replace(self.data, form=form))
        object.__setattr__(self, "rollout", replace(self.rollout, n=size))

    @property
    def is_given(self) -> bool:
        """Whether completions are given to train on, and nothing is sampled."""
        return self.data.form in GROUP_SIZES

    @property
    def trains(self) -> bool:
        """Whether there are trainer ranks, and so weights to publish and checkpoints."""
        return self.run.kind != "evaluation"

    @property
    def has_pairs(self) -> bool:
        """Whether completions are compared by pairs."""
        return self.data.form == "pairs"

    @property
    def has_reference(self) -> bool:
        """Whether the trainer has a frozen reference model, unless an algorithm of the user's needs one."""
        return self.algorithm.kl_in != "none" or self.run.kind == "dpo"

    @property
    def validates(self) -> bool:
        """Whether held-out rows are scored, or given ones measured."""
        return bool(self.data.val_files if self.is_given else self.validation.reward)

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained beside the policy."""
        return self.algorithm.adv_estimator == GAE and not self.algorithm.path

    @property
    def top_k(self) -> int:
        """The most likeliest tokens of a teacher that a loss is made of; 0: there is no such loss."""
        return max((genrm.top_k for genrm in self.genrms), default=0)

    @property
    def critic_model(self) -> ModelSection:
        """The critic as a model: its folder in the policy's place."""
        return replace(self.model, path=self.critic.path or self.model.path)

    @property
    def engine_genrms(self) -> tuple[GenRMSection, ...]:
        """The GenRMs that have engines of their own."""
        return tuple(genrm for genrm in self.genrms if genrm.has_engine)

    def judge_folder(self, genrm: GenRMSection) -> str:
        """Returns the model folder of a GenRM that is no service."""
        return self.model.path if genrm.is_policy else genrm.model

    @property
    def judge_folders(self) -> dict[str, str]:
        """The model folder of each GenRM that is no service, by its name."""
        return {g.name: self.judge_folder(g) for g in self.genrms if not g.api.url}
