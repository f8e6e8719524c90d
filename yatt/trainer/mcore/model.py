"""The policy as megatron-core objects: model chunks, distributed optimizer, schedule, reference.

CPU and GPU share one code path; the run file selects layout and layers. This module handles the settings
with which megatron-core fails; `layout.py` refuses impossible layouts.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import (
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from yatt.collectives.exchange import literal_exchange
from yatt.config.schema import RunConfig, TrainerSection
from yatt.errors import ConfigError
from yatt.models.model import Model
from yatt.models.rows import VISION, WeightRow
from yatt.models.shape import GroupedAttention, Shape, Yarn
from yatt.trainer.mcore.layout import check_spec, steps_per_iteration
from yatt.trainer.mcore.mcore_config import DTYPES, transformer_config
from yatt.trainer.mcore.optimizer_state import create_state, replace_by_sgd
from yatt.trainer.mcore.parted_step import all_here, step_in_parts
from yatt.trainer.mcore.rotary_axes import yarn_frequencies
from yatt.trainer.mcore.seeing import SeeingModel
from yatt.trainer.mcore.spec import DuplicatedLinear, torch_block_spec
from yatt.trainer.mcore.tower import build_tower, train_part
from yatt.weights.convert import HFTensors, ParallelGroups, load_weights, router_biases


def define_missing_names() -> None:
    """Defines them as the code that uses them expects. The router asks for a product of Transformer Engine in
    every forward pass: absent (a NameError in 0.15 and 0.16). Latent attention asks whether a layer is whole
    on each rank by the class of Transformer Engine: ours stands in (a TypeError in 0.16: it is no class)."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.TELinear = DuplicatedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The model, its optimizer and schedule. `chunks` are `models` wrapped for data parallelism."""

    shape: Shape
    rows: tuple[WeightRow, ...]
    mcore: TransformerConfig
    models: list[GPTModel]
    chunks: list[DistributedDataParallel]
    optimizer: Any
    scheduler: OptimizerParamScheduler
    groups: ParallelGroups
    device: torch.device
    prefix: str = ""
    """Begins its keys in a checkpoint."""


class ValueHead(nn.Linear):
    """In the place of the output layer: values from hidden states. Each tensor-parallel rank has all of it
    and the states of all tokens, so its gradient is the same on all of them and is not added up."""

    def __init__(self, mcore: TransformerConfig) -> None:
        super().__init__(mcore.hidden_size, 1, bias=False, dtype=mcore.params_dtype)
        self.sequence_parallel = mcore.sequence_parallel


class LayerAngles(RotaryEmbedding):  # type: ignore[misc]  # megatron-core has no types
    """Angles of layers without a window, by YaRN, beside those of layers with one, plain: twice as wide."""

    def __init__(self, shape: Shape, yarn: Yarn, *, is_cpu: bool) -> None:
        dim = shape.attention.head_dim
        super().__init__(dim, 1.0, rotary_base=shape.rope_theta, use_cpu_initialization=is_cpu)
        plain: Tensor = self.inv_freq
        stretched = yarn_frequencies(plain, shape.rope_theta, yarn)
        self.inv_freq: Tensor = torch.cat([stretched, stretched, plain, plain])

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Returns float32 [S, 1, 1, 2 D]."""
        angles: Tensor = self.get_freqs_non_repeated(max_seq_len, offset)
        return angles[:, None, None, :]


def join_model_parallel(layout: TrainerSection, seed: int) -> None:
    """Creates megatron-core's process groups and seeds its generators. Collective."""
    vpp = layout.virtual_pipeline_model_parallel_size
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_model_parallel_size,
        expert_tensor_parallel_size=layout.expert_tp_size,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def parallel_groups() -> ParallelGroups:
    """The process groups that share one copy of the model."""
    return ParallelGroups(
        tp=mpu.get_tensor_model_parallel_group(),
        pp=mpu.get_pipeline_model_parallel_group(),
        ep=mpu.get_expert_model_parallel_group(),
        expert_tp=mpu.get_expert_tensor_parallel_group(),
    )


def build_policy(
    config: RunConfig,
    model: Model,
    device: torch.device,
    source: HFTensors | None,
    tick: Callable[[], None],
    prefix: str = "",
) -> Policy:
    """Builds model, optimizer and schedule of this rank. Collective.

    Args:
        source: initial weights; None: random weights from the seed.
        tick: called after each tensor that is loaded.
    """
    shape = model.shape
    mcore = transformer_config(config, shape, device)
    models = _gpt_models(config, mcore, shape, device, has_tower=True)
    if model.has_value_head:
        for built in (each for each in models if each.post_process):
            built.output_layer = ValueHead(mcore).to(device)
    groups = parallel_groups()
    if source is not None:
        load_weights(models, source, model.rows, groups, tick)
    with in_float32(models):
        chunks = _data_parallel_chunks(mcore, models, config.trainer)
    optimizer, scheduler = _optimizer(config, mcore, chunks)
    create_state(optimizer, is_away=config.trainer.offload_optimizer)
    step_in_parts(optimizer, all_here)
    mcore.finalize_model_grads_func = finalize_model_grads
    mcore.grad_scale_func = optimizer.scale_loss
    if config.trainer.overlap_grad_reduce:
        no_syncs = [chunk.no_sync for chunk in chunks]
        mcore.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
    return Policy(
        shape=shape,
        rows=model.rows,
        mcore=mcore,
        models=models,
        chunks=chunks,
        optimizer=optimizer,
        scheduler=scheduler,
        groups=groups,
        device=device,
        prefix=prefix,
    )


def build_reference(
    config: RunConfig, model: Model, device: torch.device, source: HFTensors, tick: Callable[[], None]
) -> list[nn.Module]:
    """Builds the frozen reference model of the KL term, in the policy's layout."""
    mcore = transformer_config(config, model.shape, device)
    # a frozen tower is the policy's, unless the policy began as another model
    has_tower = config.vision.train != "none" or bool(config.run.from_checkpoint.url)
    models = _gpt_models(config, mcore, model.shape, device, has_tower=has_tower)
    load_weights(models, source, model.rows, parallel_groups(), tick)
    for built in models:
        built.requires_grad_(False)
        built.eval()
    with in_float32(models):
        return [Float16Module(mcore, built) if mcore.bf16 else built for built in models]


def _uses_te(config: RunConfig, shape: Shape, device: torch.device) -> bool:
    check_spec(shape, config.model.spec)
    has_te = device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None
    if config.model.spec == "te" and not has_te:
        raise ConfigError(
            "model.spec is te, but Transformer Engine (on CUDA) is not there; write auto or torch."
        )
    return has_te and config.model.spec != "torch" and not shape.needs_torch_spec


def _gpt_models(
    config: RunConfig, mcore: TransformerConfig, shape: Shape, device: torch.device, *, has_tower: bool
) -> list[GPTModel]:
    """Builds one GPTModel, or one per virtual pipeline stage.

    Args:
        has_tower: whether a model that takes pictures has a tower of its own.
    """
    define_missing_names()
    uses_te = _uses_te(config, shape, device)
    tp, vpp = mcore.tensor_model_parallel_size, mcore.virtual_pipeline_model_parallel_size
    models = []
    for index in range(vpp or 1):
        stage = index if vpp else None
        if uses_te:
            spec = get_gpt_decoder_block_spec(mcore, use_transformer_engine=True, vp_stage=stage)
        else:
            spec = torch_block_spec(mcore, shape, stage)
        is_first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        model = _model_kind(config, shape, has_tower=has_tower and is_first)(
            mcore,
            spec,
            vocab_size=shape.vocab_size + -shape.vocab_size % tp,
            max_sequence_length=shape.max_positions,
            pre_process=is_first,
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
            rotary_percent=shape.rotary_share,
            rope_scaling=shape.rope_scaling_factor > 0,
            rope_scaling_factor=shape.rope_scaling_factor or 8.0,
            share_embeddings_and_output_weights=shape.is_tied,
            vp_stage=stage,
        )
        if isinstance(shape.attention, GroupedAttention) and shape.yarn is not None:
            model.rotary_pos_emb = LayerAngles(shape, shape.yarn, is_cpu=mcore.use_cpu_initialization)
        models.append(model.to(device))
    return models


def _model_kind(config: RunConfig, shape: Shape, *, has_tower: bool) -> Callable[..., Any]:
    if shape.vision is None:
        return GPTModel  # type: ignore[no-any-return]
    tower = None
    if has_tower:
        tower = build_tower(config.model.path, shape, DTYPES[config.model.dtype])
        train_part(tower, config.vision.train)
    return partial(SeeingModel, shape=shape, tower=tower)


@contextlib.contextmanager
def in_float32(models: list[GPTModel]) -> Iterator[None]:
    """Keeps the routers' biases bit by bit in float32 while megatron-core converts the models to bfloat16."""
    modules = [module for model in models for module in router_biases(model)]
    values = [module.expert_bias.clone() for module in modules]
    yield
    for module, value in zip(modules, values, strict=True):
        module.expert_bias.data = value


def _data_parallel_chunks(
    mcore: TransformerConfig, models: list[GPTModel], layout: TrainerSection
) -> list[DistributedDataParallel]:
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=layout.overlap_grad_reduce or layout.overlap_param_gather,
        overlap_param_gather=layout.overlap_param_gather,
    )
    wrapped = [Float16Module(mcore, model) if mcore.bf16 else model for model in models]
    return [
        DistributedDataParallel(mcore, settings, model, disable_bucketing=index > 0)
        for index, model in enumerate(wrapped)
    ]


def _optimizer(
    config: RunConfig, mcore: TransformerConfig, chunks: list[DistributedDataParallel]
) -> tuple[Any, OptimizerParamScheduler]:
    """Builds megatron-core's distributed optimizer, also for one rank, so that checkpoints have one format.

    The schedule is required: per-group weight decay (none for norms) is applied only by it.
    """
    section, layout = config.optimizer, config.trainer
    settings = OptimizerConfig(
        optimizer="adam",
        lr=section.lr,
        min_lr=section.min_lr,
        weight_decay=section.weight_decay,
        adam_beta1=section.adam_beta1,
        adam_beta2=section.adam_beta2,
        adam_eps=section.adam_eps,
        clip_grad=section.clip_grad,
        bf16=mcore.bf16,
        params_dtype=mcore.params_dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=layout.overlap_param_gather,
    )
    with literal_exchange():
        optimizer = get_megatron_optimizer(settings, chunks, _overrides(config, settings))
    if section.kind == "sgd":
        replace_by_sgd(optimizer, section.sgd_momentum)
    total_steps = layout.total_iterations * steps_per_iteration(layout)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=section.lr,
        min_lr=min(section.min_lr, section.lr),
        lr_warmup_steps=section.lr_warmup_steps,
        lr_decay_steps=max(total_steps, section.lr_warmup_steps + 1),
        lr_decay_style=section.lr_decay_style,
        start_wd=section.weight_decay,
        end_wd=section.weight_decay,
        wd_incr_steps=max(total_steps, 1),
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a resumed run may be longer than the one that saved
    )
    return optimizer, scheduler


def _overrides(config: RunConfig, settings: OptimizerConfig) -> dict[Any, Any] | None:
    """megatron-core's own exceptions, and the learning rate of the tower's trained part."""
    lr = config.vision.lr
    if not lr:
        return None
    tower = ParamKey(name=f"*{VISION}*")
    own = ParamGroupOverride(max_lr=lr, min_lr=min(config.optimizer.min_lr, lr))
    return {**get_standard_config_overrides(settings), tower: own}


def broadcast_over_model(tensor: torch.Tensor) -> None:
    """Broadcasts in place from the first rank of a model copy (one data-parallel rank) to its tensor, context
    and pipeline ranks."""
    tensor_and_context = mpu.get_tensor_and_context_parallel_group()
    if mpu.is_pipeline_first_stage(ignore_virtual=True) and tensor_and_context.size() > 1:
        dist.broadcast(tensor, group_src=0, group=tensor_and_context)
    pipeline = mpu.get_pipeline_model_parallel_group()
    if pipeline.size() > 1:
        dist.broadcast(tensor, group_src=0, group=pipeline)
