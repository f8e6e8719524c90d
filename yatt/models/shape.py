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
class Experts:
    """A mixture: a router sends each token to `top_k` of `num_experts` SwiGLUs of `size` rows, whose outputs
    are added with the softmax of the router's logits as weights.

    Args:
        normalizes: weights are those of the chosen experts alone, and add up to 1; else they are a part of
            the softmax over all experts.
        shared_size: rows of a SwiGLU that every token passes; 0: none.
        has_shared_gate: its output is multiplied with a sigmoid of the token.
    """

    num_experts: int
    top_k: int
    size: int
    normalizes: bool
    shared_size: int = 0
    has_shared_gate: bool = False


FeedForward = DenseFeedForward | Experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer: the kinds of its two halves. Other kinds of attention or feed-forward are other
    classes."""

    attention: GroupedAttention
    feed_forward: FeedForward


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
    def dense(self) -> DenseFeedForward | None:
        """The feed-forward part of the layers without experts; None if all have some."""
        return next((f for f in self._feed_forwards if isinstance(f, DenseFeedForward)), None)

    @property
    def experts(self) -> Experts | None:
        """The feed-forward part of the layers with experts; None if none has some."""
        return next((f for f in self._feed_forwards if isinstance(f, Experts)), None)

    @property
    def is_regular(self) -> bool:
        """Whether layers differ in nothing but whether they have experts; the trainer builds no others."""
        kinds = set(self._feed_forwards)
        each = [sum(isinstance(kind, one) for kind in kinds) for one in (DenseFeedForward, Experts)]
        return len({layer.attention for layer in self.layers}) == 1 and max(each) == 1

    @property
    def _feed_forwards(self) -> tuple[FeedForward, ...]:
        return tuple(layer.feed_forward for layer in self.layers)
