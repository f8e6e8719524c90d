"""The shape of a model: what trainer, layout checks and weight table need to know of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedAttention:
    """Attention in which `num_heads` query heads share `num_kv_heads` keys and values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_qkv_bias: bool = False
    has_qk_norm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseFeedForward:
    """SwiGLU with two matrices of `size` rows, gate and up, and one back."""

    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer: the kinds of its two halves. Other kinds of attention or feed-forward are other
    classes."""

    attention: GroupedAttention
    feed_forward: DenseFeedForward


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder with RMSNorm before each half of a layer, and rotary positions.

    Args:
        layers: in order.
        rope_scaling_factor: factor of Llama 3's RoPE scaling; 0: none.
        is_tied: input and output embeddings are one tensor.
        init_std: standard deviation of random initial weights.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm_eps: float
    rope_theta: float
    rope_scaling_factor: float = 0.0
    is_tied: bool = False
    max_positions: int
    init_std: float = 0.02

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def attention(self) -> GroupedAttention:
        """The attention of every layer."""
        return self.layers[0].attention

    @property
    def feed_forward(self) -> DenseFeedForward:
        """The feed-forward part of every layer."""
        return self.layers[0].feed_forward

    @property
    def is_uniform(self) -> bool:
        """Whether all layers are the same; the trainer builds no others yet."""
        return len(set(self.layers)) == 1
