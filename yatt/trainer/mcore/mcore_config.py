"""megatron-core's config of a model in a layout, with the settings with which megatron-core fails."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from yatt.config.schema import RunConfig, TrainerSection
from yatt.models.shape import Experts, GroupedAttention, LatentAttention, Shape
from yatt.trainer.mcore.layout import end_stages
from yatt.trainer.mcore.recompute import recompute_settings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NO_FUSIONS = dict.fromkeys(
    (
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "apply_rope_fusion",
        "gradient_accumulation_fusion",
        "persist_layer_norm",
    ),
    False,
)
"""Fusions that need Transformer Engine, Apex or a GPU."""


def transformer_config(config: RunConfig, shape: Shape, device: torch.device) -> TransformerConfig:
    """megatron-core's config of this model in this layout."""
    dtype, is_cpu = DTYPES[config.model.dtype], device.type == "cpu"
    kind = MLATransformerConfig if isinstance(shape.attention, LatentAttention) else TransformerConfig
    return kind(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.dense.size if shape.dense else shape.hidden_size,  # unused without dense layers
        layernorm_epsilon=shape.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        init_method_std=shape.init_std,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # With a loss function that returns (sum, tokens), this gives the exact token mean in every layout.
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # required by variable_seq_lengths, also for dense models
        **_attention_settings(shape),
        **expert_settings(shape, config.trainer),
        **_layout_settings(shape, config.trainer),
        use_cpu_initialization=is_cpu,
        # Needed before loading weights too: initialization marks parameters as split by tensor parallelism.
        # Without the mark the gradient norm counts only one rank's part.
        perform_initialization=True,
        deterministic_mode=config.run.deterministic and not is_cpu,
        **NO_FUSIONS,
    )


def _layout_settings(shape: Shape, layout: TrainerSection) -> dict[str, Any]:
    vpp, (first, last) = layout.virtual_pipeline_model_parallel_size, end_stages(shape.num_layers, layout)
    return {
        "tensor_model_parallel_size": layout.tensor_model_parallel_size,
        "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": last,
        "context_parallel_size": layout.context_parallel_size,
        "sequence_parallel": layout.sequence_parallel,
        # Batched sends with interleaved stages give wrong results: two ranks' messages match by order.
        "overlap_p2p_comm": vpp > 1,
        "batch_p2p_comm": vpp == 1,
        **recompute_settings(layout),
    }


def _attention_settings(shape: Shape) -> dict[str, Any]:
    attention = shape.attention
    common: dict[str, Any] = {
        "num_attention_heads": attention.num_heads,
        "num_query_groups": attention.num_kv_heads,
        "kv_channels": attention.head_dim,
    }
    if shape.vision is not None:
        common["mrope_section"] = list(shape.picture_axes.sections)
    if isinstance(attention, GroupedAttention):
        return {
            **common,
            **_window_settings(shape.windows),
            "add_qkv_bias": attention.has_qkv_bias,
            # It would add up the gradients of its weight over tensor-parallel ranks: right for a norm of each
            # head by itself, which all ranks have; wrong for parts of one over all heads.
            "qk_layernorm": attention.has_qk_norm and not attention.norms_all_heads,
        }
    return {
        **common,
        "qk_layernorm": True,
        "q_lora_rank": attention.q_rank or None,
        "kv_lora_rank": attention.kv_rank,
        "qk_head_dim": attention.nope_dim,
        "qk_pos_emb_head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim,
        "rotary_base": shape.rope_theta,
        **_yarn_settings(shape),
    }


def _window_settings(windows: tuple[int, ...]) -> dict[str, Any]:
    """megatron-core counts the positions before a token only, and lists layers of the whole model."""
    if not any(windows):
        return {}
    has_window = [int(window > 0) for window in windows]
    return {"window_size": (max(windows) - 1, 0), "window_attn_skip_freq": has_window}


def _yarn_settings(shape: Shape) -> dict[str, Any]:
    yarn = shape.yarn
    if yarn is None:
        return {"rope_type": "rope", "rotary_scaling_factor": 1.0}  # the factor is in the softmax's scale too
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_positions,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }


def expert_settings(shape: Shape, layout: TrainerSection) -> dict[str, Any]:
    """megatron-core's settings of a model's experts. The router works in float32 and balances no load: the
    policy's gradient alone decides where tokens go."""
    experts = shape.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.num_experts,
        "expert_model_parallel_size": layout.expert_model_parallel_size,
        "expert_tensor_parallel_size": layout.expert_tp_size,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.size,
        "moe_layer_freq": [int(isinstance(layer.feed_forward, Experts)) for layer in shape.layers],
        "moe_shared_expert_intermediate_size": experts.shared_size or None,
        "moe_shared_expert_gate": experts.has_shared_gate,
        "moe_router_pre_softmax": not experts.normalizes,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        **_sigmoid_settings(experts),
    }


def _sigmoid_settings(experts: Experts) -> dict[str, Any]:
    router = experts.sigmoid
    if router is None:
        return {}
    grouped = {"moe_router_num_groups": router.num_groups, "moe_router_group_topk": router.top_groups}
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": router.scale,
        **(grouped if router.num_groups > 1 else {}),
    }
