"""The run file's sections about the trainer: its optimizer, its layout and its memory."""

import math
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from yatt.config.sections.operation import rule
from yatt.config.sections.ranges import (
    BETA,
    COUNT,
    COUNT_OR_NONE,
    LAYOUT,
    OPERATIONAL,
    at_least,
    range_above,
    range_between,
)

RecomputedModule = Literal["core_attn", "mlp", "moe", "shared_experts", "mla_up_proj"]
"""A part of a layer, by megatron-core's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection:
    """AdamW or SGD, by megatron-core's distributed optimizer."""

    lr: Annotated[float, range_between(0, 1)]
    """Peak learning rate."""

    kind: Literal["adam", "sgd"] = "adam"
    """adam: AdamW, with two moments in float32 per parameter. sgd: stochastic gradient descent, with one, or
    with none if `sgd_momentum` is 0."""

    min_lr: Annotated[float, range_between(0, 1)] = 0.0
    """Learning rate at the end of the decay."""

    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay from `lr` to `min_lr`."""

    lr_warmup_steps: Annotated[int, COUNT_OR_NONE] = 0
    """Optimizer steps of linear warm-up from 0 to `lr`."""

    weight_decay: Annotated[float, at_least(0)] = 0.01
    """Weight decay. adam: decoupled (AdamW). sgd: this times the parameter is added to its gradient."""

    adam_beta1: Annotated[float, BETA] = 0.9
    """Decay of the running mean of gradients."""

    adam_beta2: Annotated[float, BETA] = 0.999
    """Decay of the running mean of squared gradients."""

    adam_eps: Annotated[float, range_above(0, most=1)] = 1e-8
    """Added to the denominator of Adam's update."""

    sgd_momentum: Annotated[float, BETA] = 0.9
    """sgd: decay of the running sum of gradients."""

    clip_grad: Annotated[float, at_least(0)] = 1.0
    """Maximum gradient norm (gradient clipping); 0 is off."""

    def __post_init__(self) -> None:
        other = "sgd_" if self.kind == "adam" else "adam_"
        changed = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        for name in changed:
            rule(
                not name.startswith(other),
                f"{name} has no effect with kind: {self.kind}; remove it, or write kind: {other[:-1]}.",
            )

    @property
    def num_moments(self) -> int:
        """Tensors in float32 per parameter, beside its main copy."""
        return 2 if self.kind == "adam" else int(self.sgd_momentum > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSection:
    """Batches and layout. Sizes are megatron-core's."""

    tensor_model_parallel_size: Annotated[int, COUNT, LAYOUT] = 1
    """Ranks that share each layer's matrices (TP)."""

    pipeline_model_parallel_size: Annotated[int, COUNT, LAYOUT] = 1
    """Ranks that each have a part of the layers (PP). If they do not divide, the first and the last stage
    differ."""

    virtual_pipeline_model_parallel_size: Annotated[int, COUNT, LAYOUT] = 1
    """Model chunks per pipeline rank (interleaved schedule)."""

    context_parallel_size: Annotated[int, COUNT, LAYOUT] = 1
    """Ranks that share each sequence (CP)."""

    expert_model_parallel_size: Annotated[int, COUNT, LAYOUT] = 1
    """Ranks that share the experts of a mixture of experts (EP)."""

    expert_tensor_parallel_size: Annotated[int, at_least(0), LAYOUT] = 0
    """Ranks that share each expert's matrices; 0: as many as share the other matrices (TP). With EP, 1 is
    usual."""

    sequence_parallel: Annotated[bool, LAYOUT] = False
    """Shard activations outside of the matrix products over TP ranks."""

    router_replay: bool = False
    """Updates send tokens to the experts that the policy before the iteration chose (router replay)."""

    total_iterations: Annotated[int, COUNT, OPERATIONAL]
    """Total number of iterations, including those before a resume."""

    train_batch_size: Annotated[int, COUNT]
    """Prompt groups per iteration."""

    mini_batch_size: Annotated[int, COUNT]
    """Prompt groups per optimizer step."""

    ppo_epochs: Annotated[int, COUNT] = 1
    """Passes over the rollout batch per iteration."""

    max_tokens_per_micro_batch: Annotated[int, COUNT, LAYOUT] = 16384
    """Maximum tokens of one packed micro-batch, prompts and completions."""

    recompute: Annotated[Literal["none", "selective", "full"], LAYOUT] = "none"
    """Activations that the backward pass computes again instead of keeping them. full: those of whole layers
    (`recompute_layers`). selective: those of some parts of every layer (`recompute_modules`)."""

    recompute_layers: Annotated[int, COUNT_OR_NONE, LAYOUT] = 0
    """full: number of layers of each pipeline stage, the first ones, that are computed again; 0: all. With
    virtual stages, of each of them."""

    recompute_modules: Annotated[tuple[RecomputedModule, ...], LAYOUT] = ()
    """selective: core_attn: attention without its matrices (saves memory with context parallelism). mlp:
    feed-forward parts that are dense. moe: experts with their router. shared_experts: the shared one only.
    mla_up_proj: queries, keys and values of latent attention."""

    offload_optimizer: Annotated[bool, LAYOUT] = False
    """Keep the optimizer's state (moments; in bfloat16 the main copies too) in the host copy. In a step it is
    on the device in parts of 512 MiB, three at a time, when no activations are there. Each step then copies
    it both ways."""

    overlap_grad_reduce: Annotated[bool, LAYOUT] = False
    """Reduce gradients during the backward pass."""

    overlap_param_gather: Annotated[bool, LAYOUT] = False
    """Gather updated parameters during the next forward pass."""

    def __post_init__(self) -> None:
        rule(
            self.train_batch_size % self.mini_batch_size == 0,
            f"mini_batch_size {self.mini_batch_size} does not divide train_batch_size "
            f"{self.train_batch_size}; write a divisor.",
        )
        rule(
            not self.sequence_parallel or self.tensor_model_parallel_size > 1,
            "sequence_parallel needs tensor_model_parallel_size above 1; write false or raise it.",
        )
        self._check_recompute()

    def _check_recompute(self) -> None:
        modules = self.recompute_modules
        rule(
            not self.recompute_layers or self.recompute == "full",
            f"recompute_layers has no effect with recompute: {self.recompute}; remove it, or write full.",
        )
        rule(
            not modules or self.recompute == "selective",
            f"recompute_modules has no effect with recompute: {self.recompute}; remove it, or write "
            "selective.",
        )
        rule(
            bool(modules) or self.recompute != "selective",
            "recompute_modules is empty; write what is computed again, as [mlp], or recompute: full.",
        )
        rule(len(set(modules)) == len(modules), "recompute_modules names a module twice; write it once.")
        rule(
            not {"moe", "shared_experts"} <= set(modules),
            "recompute_modules: moe contains shared_experts; remove shared_experts.",
        )

    @property
    def expert_tp_size(self) -> int:
        """Ranks that share each expert's matrices."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def whole_stage(self) -> int:
        """Consecutive ranks that have every weight of a pipeline stage together, its experts included."""
        return math.lcm(
            self.tensor_model_parallel_size, self.expert_tp_size * self.expert_model_parallel_size
        )
