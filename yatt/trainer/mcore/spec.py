"""Plain-torch layers for megatron-core, through its ModuleSpec extension point; nothing is patched.

megatron-core's own local spec supports no sequence parallelism (its norm), and no packed sequences or
context parallelism (its attention). These modules support them on CPU and CUDA. They use Transformer
Engine's parameter names, so that converters and checkpoints need one set of names. Two of them neither has:
a norm over all heads, and a norm after a half of a layer.

Suffixes: S tokens on this rank, B sequences side by side, H heads, D head size.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.parallel_state import get_context_parallel_group
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from yatt.models.shape import Attention, GroupedAttention, Shape, Yarn
from yatt.trainer.attention.batches import PackedSequences
from yatt.trainer.attention.varlen import VarlenBounds, suits_varlen, varlen_attention, varlen_bounds
from yatt.trainer.mcore.grouped_experts import GroupedExperts


class TorchRMSNorm(torch.nn.RMSNorm):
    """RMSNorm. Under sequence parallelism `finalize_model_grads` sums its weight's gradient over TP."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class TorchNormColumnLinear(ColumnParallelLinear):  # type: ignore[misc]
    """RMSNorm and column-parallel linear in one module, named like Transformer Engine's."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **rest: Any) -> None:
        for name in ("tp_comm_buffer_name", "name"):
            rest.pop(name, None)
        super().__init__(input_size, output_size, config=config, **rest)
        ones = torch.ones(input_size, dtype=config.params_dtype, device=self.weight.device)
        self.layer_norm_weight = torch.nn.Parameter(ones)
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = config.layernorm_epsilon

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Normalises over the last dimension, then multiplies."""
        normed = F.rms_norm(hidden, hidden.shape[-1:], self.layer_norm_weight, self.eps)
        return super().forward(normed, *args, **kwargs)


class TorchLinearNorm(RowParallelLinear):  # type: ignore[misc]
    """Row-parallel linear and RMSNorm of its sum over ranks in one module: of a half of a layer that is
    normalised before it is added (OLMo-2, arXiv:2501.00656)."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **rest: Any) -> None:
        super().__init__(input_size, output_size, config=config, **rest)
        ones = torch.ones(output_size, dtype=config.params_dtype, device=self.weight.device)
        self.layer_norm_weight = torch.nn.Parameter(ones)
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = config.layernorm_epsilon

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiplies, then normalises over the last dimension."""
        output, bias = super().forward(hidden)
        return F.rms_norm(output, output.shape[-1:], self.layer_norm_weight, self.eps), bias


class HeadsNorm(torch.nn.Module):
    """RMSNorm over all heads of the queries or of the keys, of which each tensor-parallel rank has some.

    With x of all ranks, y = w x / sqrt(s / n + eps) and s the sum of squares of all n elements. A loss
    depends on s through the y of every rank, so its gradient by s is the sum of the ranks' parts: both the
    sum and its gradient are reduced over ranks. A rank's part of w has a gradient of that rank only.

    Args:
        hidden_size: elements of a head, as megatron-core says it.
        num_heads: of all ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, num_heads: int) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.num_elements, self.eps = num_heads * hidden_size, eps
        size = self.num_elements // config.tensor_model_parallel_size
        self.heads_weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=device))
        # Without the mark the gradient norm counts one rank's part.
        set_tensor_model_parallel_attributes(self.heads_weight, is_parallel=True, dim=0, stride=1)

    def forward(self, heads: Tensor) -> Tensor:
        """Maps [S, B, H, D] to [S, B, H, D], in float32 between."""
        elements = heads.flatten(-2).float()
        squares = reduce_from_tensor_model_parallel_region(elements.square().sum(-1, keepdim=True))
        squares = copy_to_tensor_model_parallel_region(squares)  # its backward pass is a sum
        normed = elements * torch.rsqrt(squares / self.num_elements + self.eps)
        return (normed * self.heads_weight).to(heads.dtype).view(heads.shape)


class YarnAttention(SelfAttention):  # type: ignore[misc]
    """Attention with YaRN's positions in layers without a window, and plain ones in the others (OLMo-3)."""

    def __init__(self, *given: Any, yarn: Yarn, **named: Any) -> None:
        super().__init__(*given, **named)
        self.is_narrow = self.core_attention.window > 0
        if not self.is_narrow:  # in place of longer queries and longer keys, as all of their elements turn
            self.core_attention.scale *= yarn.position_scale**2

    def forward(self, hidden: Tensor, *given: Any, rotary_pos_emb: Tensor, **named: Any) -> Any:
        """Takes its own half of `LayerAngles`."""
        whole, narrow = rotary_pos_emb.chunk(2, -1)
        return super().forward(hidden, *given, rotary_pos_emb=narrow if self.is_narrow else whole, **named)


class SdpaCoreAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention with torch's SDPA, or in one kernel for a stream where CUDA has it (`varlen`): packed
    or not, GQA, context parallel by all-gather of K and V."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *_: Any,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **__: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        is_narrow = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if is_narrow else 0
        self.cp_group = getattr(pg_collection, "cp", None) or get_context_parallel_group()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,  # noqa: ARG002  (megatron's signature; causal is built in)
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> Tensor:
        """Computes attention within each sequence.

        Args:
            query, key, value: [S, B, H, D], or packed [S, H, D] with `packed_seq_params`.

        Returns:
            [S, B, H * D], or packed [S, H * D].
        """
        if packed_seq_params is None:
            return self._attend_alike(query, key, value)
        if suits_varlen(query, value, self.cp_group, window=self.window):
            return self._in_one(query, key, value, packed_seq_params.varlen)
        runs = packed_seq_params.runs
        sizes = [length * count for length, count in runs]
        split = (torch.split(x, sizes) for x in (query, key, value))
        pieces = zip(runs, *split, strict=True)
        return torch.cat([self._attend_run(length, count, *qkv) for (length, count), *qkv in pieces])

    def _in_one(self, query: Tensor, key: Tensor, value: Tensor, bounds: VarlenBounds) -> Tensor:
        """Maps a packed stream [S, H, D] to [S, H * D]."""
        if bounds.source_K is not None:
            key, value = (self._gathered(x).index_select(0, bounds.source_K) for x in (key, value))
        return varlen_attention(query, key, value, bounds, self.scale, self.window).flatten(1)

    def _attend_alike(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Maps [S, B, H, D] to [S, B, H * D], as one stream where that takes no mask of S x S."""
        length, count = query.shape[:2]
        is_whole = self.cp_group.size() > 1 or not 0 < self.window < length
        if is_whole or not suits_varlen(query, value, window=self.window):
            return self._attend(query, key, value)
        bounds = varlen_bounds([length] * count, 1, 0, query.device)
        query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        return self._in_one(query, key, value, bounds).view(count, length, -1).transpose(0, 1)

    def _gathered(self, x: Tensor) -> Tensor:
        """Every context-parallel rank's part, in the order of the ranks."""
        whole: Tensor = gather_from_sequence_parallel_region(
            x.contiguous(), tensor_parallel_output_grad=True, group=self.cp_group
        )
        return whole

    def _attend_run(self, length: int, count: int, *qkv: Tensor) -> Tensor:
        """Computes `count` adjacent sequences of the same length as one batch; a loop over many is slow."""
        stacked = (x.view(count, length, *x.shape[1:]).transpose(0, 1) for x in qkv)
        return self._attend(*stacked).transpose(0, 1).reshape(count * length, -1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Maps [S, B, H, D] to [S, B, H * D]. Context parallel: rank r of n has chunks r and 2n-1-r of 2n."""
        size, rank = self.cp_group.size(), self.cp_group.rank()
        if size == 1:
            rows = torch.arange(query.size(0), device=query.device)
            mask = self._is_seen(rows, rows) if 0 < self.window < len(rows) else None
            return self._sdpa(query, key, value, mask)
        half = query.size(0) // 2
        held = [chunk for r in range(size) for chunk in (r, 2 * size - 1 - r)]
        in_order = [held.index(chunk) for chunk in range(2 * size)]

        def whole(x: Tensor) -> Tensor:
            chunks = torch.split(self._gathered(x), half)
            return torch.cat([chunks[index] for index in in_order])

        offsets = torch.arange(half, device=query.device)
        rows = torch.cat([offsets + rank * half, offsets + (2 * size - 1 - rank) * half])
        columns = torch.arange(2 * size * half, device=query.device)
        return self._sdpa(query, whole(key), whole(value), self._is_seen(rows, columns))

    def _is_seen(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Whether the token at each row's position attends to that at each column's: bool [rows, columns]."""
        is_before = rows[:, None] >= columns[None, :]
        if self.window:  # not by a difference, which would be a table of 8 bytes per pair
            is_before &= rows[:, None] < (columns + self.window)[None, :]
        return is_before

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        is_grouped = query.size(1) != key.size(1)
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=is_grouped
        )
        return attended.permute(2, 0, 1, 3).flatten(2)


class TorchSpecProvider(LocalSpecProvider):  # type: ignore[misc]
    """A third backend for megatron-core, beside its own local one and Transformer Engine."""

    def fuse_layernorm_and_linear(self) -> bool:
        """True: the norm is part of the linear layer, as in Transformer Engine."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """The module with norm and linear in one."""
        return TorchNormColumnLinear

    def layer_norm(self, rms_norm: bool = False, **_: Any) -> type:
        """The only supported norm."""
        assert rms_norm, "supported architectures use RMSNorm"
        return TorchRMSNorm

    def core_attention(self) -> type:
        """The attention module, with torch's SDPA."""
        return SdpaCoreAttention

    def grouped_mlp_modules(self, *_: bool) -> tuple[type, MLPSubmodules]:
        """The experts, with the linear layers of which they are made."""
        layers = MLPSubmodules(
            linear_fc1=self.column_parallel_linear(), linear_fc2=self.row_parallel_linear()
        )
        return GroupedExperts, layers


class NormsAfterProvider(TorchSpecProvider):
    """The same, with the norm of a half of a layer after its last linear layer."""

    def column_parallel_layer_norm_linear(self) -> type:
        """No norm comes before."""
        return self.column_parallel_linear()  # type: ignore[no-any-return]

    def row_parallel_linear(self) -> type:
        """The module with linear and norm in one."""
        return TorchLinearNorm


class DuplicatedLinear(torch.nn.Linear):
    """Linear layer that each tensor-parallel rank has as a whole, as in Transformer Engine: latent
    attention's way down to its vectors.

    With megatron-core's own choice, a column-parallel one, log-probs are right and gradients are not (1 to 9
    %): the gradient of the keys' positions is not summed over ranks (Megatron-LM issue 1699; 0.16.1, 0.19.2).
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, init_method: Any, **_: Any
    ) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype, device=device)
        init_method(self.weight.data)
        # Each rank sees its part of the sequence; `finalize_model_grads` sums over them.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Multiplies; there is no bias."""
        return super().forward(hidden), None


def attention_spec(config: TransformerConfig, shape: Shape) -> ModuleSpec:
    """Spec of a layer's attention, of either kind."""
    backend, causal = _provider(shape), {"attn_mask_type": AttnMaskType.causal}
    norm_linear = backend.column_parallel_layer_norm_linear()
    common = {"core_attention": backend.core_attention(), "linear_proj": backend.row_parallel_linear()}
    if config.multi_latent_attention:
        latent = MLASelfAttentionSubmodules(
            linear_q_proj=backend.column_parallel_linear(),
            linear_q_down_proj=DuplicatedLinear,
            linear_q_up_proj=norm_linear,
            linear_kv_down_proj=DuplicatedLinear,
            linear_kv_up_proj=norm_linear,
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
            **common,
        )
        return ModuleSpec(module=MLASelfAttention, params=causal, submodules=latent)
    q_norm, k_norm = _qk_norms(shape.attention)
    grouped = SelfAttentionSubmodules(
        linear_qkv=norm_linear, q_layernorm=q_norm, k_layernorm=k_norm, **common
    )
    if shape.yarn is not None:
        return ModuleSpec(module=YarnAttention, params={**causal, "yarn": shape.yarn}, submodules=grouped)
    return ModuleSpec(module=SelfAttention, params=causal, submodules=grouped)


def _provider(shape: Shape) -> TorchSpecProvider:
    return NormsAfterProvider() if shape.norms_after else TorchSpecProvider()


def _qk_norms(attention: Attention) -> list[ModuleSpec | type]:
    assert isinstance(attention, GroupedAttention), "latent attention has norms of its vectors"
    if attention.norms_all_heads:
        numbers = (attention.num_heads, attention.num_kv_heads)
        return [ModuleSpec(module=HeadsNorm, params={"num_heads": number}) for number in numbers]
    return [TorchRMSNorm if attention.has_qk_norm else IdentityOp] * 2


def torch_layer_spec(config: TransformerConfig, shape: Shape, *, has_experts: bool) -> ModuleSpec:
    """Spec of one decoder layer, with the parameter names of Transformer Engine's spec."""
    backend = _provider(shape)
    num_experts = config.num_moe_experts if has_experts else None
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            # Grouped attention's norm is part of its first or last linear; latent attention has two or three
            # first ones.
            input_layernorm=TorchRMSNorm if config.multi_latent_attention else IdentityOp,
            self_attention=attention_spec(config, shape),
            self_attn_bda=get_bias_dropout_add,
            # A dense layer's norm is part of its first or last linear; the router and all experts share one.
            pre_mlp_layernorm=TorchRMSNorm if has_experts else IdentityOp,
            mlp=get_mlp_module_spec_for_backend(
                backend=backend, num_experts=num_experts, moe_grouped_gemm=False
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def torch_block_spec(
    config: TransformerConfig, shape: Shape, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Spec of one model chunk's decoder layers; a block spec, because the final norm is ours too."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    pattern = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    kinds = [torch_layer_spec(config, shape, has_experts=bool(kind)) for kind in (0, 1)]
    layers = [kinds[kind] for kind in pattern[first : first + num_layers]]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TorchRMSNorm)
