"""The shape of a model: what trainer, layout checks and weight table need to know of it."""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedAttention:
    """Attention in which `num_heads` query heads share `num_kv_heads` keys and values.

    Args:
        has_qk_norm: queries and keys pass an RMSNorm, each head by itself.
        norms_all_heads: that norm is over all heads of the queries, and over all of the keys, with a weight
            for each of their elements.
        window: positions that a token attends to, itself and the last ones before it; 0: all before it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    norms_all_heads: bool = False
    window: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values of all heads are made from
    one vector of `kv_rank` elements per token. Positions are in parts of their own, of which the key's is
    the same for all heads.

    Args:
        q_rank: elements of the vector from which queries are made; 0: they are made from the hidden state.
        nope_dim: elements of a head's query and key that do not depend on the position.
        rope_dim: those that do.
        value_dim: elements of a head's value.
    """

    num_heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def num_kv_heads(self) -> int:
        """Each head has its own key and value."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """Elements of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def window(self) -> int:
        """A token attends to all before it."""
        return 0


Attention = GroupedAttention | LatentAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN (arXiv:2309.00071): rotary positions for contexts of `factor` times the length trained on.

    Args:
        original_positions: the length trained on.
        beta_fast, beta_slow: rotations between which frequencies are interpolated in part.
        mscale, mscale_all_dim: weights of the temperature, in positions and in latent attention's softmax.
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float

    @property
    def position_scale(self) -> float:
        """Factor of the queries and keys that are turned, by which both are longer."""
        grown = [0.1 * each * math.log(self.factor) + 1 for each in (self.mscale, self.mscale_all_dim)]
        return grown[0] / grown[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidRouter:
    """A router whose scores are sigmoids of its logits; the chosen ones' add up to `scale` (DeepSeek-V3,
    arXiv:2412.19437). A constant bias per expert, which the model's files contain, is added for the choice
    only.

    Args:
        num_groups: experts are chosen in `top_groups` of so many groups only, the ones whose two best
            scores add up to most; 1: no groups.
    """

    scale: float
    num_groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseFeedForward:
    """SwiGLU with two matrices of `size` rows, gate and up, and one back."""

    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture: a router sends each token to `top_k` of `num_experts` SwiGLUs of `size` rows, whose outputs
    are added with the softmax of the router's logits as weights, or what `sigmoid` says.

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
    sigmoid: SigmoidRouter | None = None


FeedForward = DenseFeedForward | Experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer: the kinds of its two halves. Other kinds of attention or feed-forward are other
    classes.

    Args:
        norms_after: what a half gives is normalised before it is added; else what the half gets.
    """

    attention: Attention
    feed_forward: FeedForward
    norms_after: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeAxes:
    """Positions with three axes, time, height and width (Qwen2-VL, arXiv:2409.12191).

    Args:
        sections: of half a head's elements, how many turn with each axis.
        is_interleaved: elements of the axes alternate (Qwen3-VL); else they are side by side.
    """

    sections: tuple[int, int, int]
    is_interleaved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """The tower of a model that takes pictures: patches, blocks, and mergers to the decoder's hidden size.

    Args:
        frames: of a video, in one patch; a still picture has equal ones.
        merge_size: patches of a token's side.
        num_positions: learnt positions; 0: none.
        levels: blocks whose output also goes to the decoder's first layers (DeepStack, arXiv:2406.04334).
        matrices: elements of the matrices of a block, and of those that a token passes after the blocks.
        num_whole: blocks that attend to a whole picture; the others to windows of it.
    """

    depth: int
    hidden_size: int
    mlp_size: int
    patch_size: int
    frames: int
    merge_size: int
    num_positions: int
    levels: tuple[int, ...]
    matrices: tuple[int, int]
    num_whole: int

    @property
    def merged_size(self) -> int:
        """Elements of the patches of one token."""
        return self.hidden_size * self.merge_size**2


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledVision(Vision):
    """A tower for tiles of one size: a ViT with a first token of its own, which is left out of the features.

    Args:
        has_qkv_bias: its queries, keys and values have biases.
        has_qk_norm: its queries and keys pass an RMSNorm over all heads.
        has_rms_norm: its norms are RMSNorms, without biases.
        has_last_norm: a layer norm follows the last block.
    """

    has_qkv_bias: bool
    has_qk_norm: bool
    has_rms_norm: bool
    has_last_norm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder with an RMSNorm for each half of a layer, and rotary positions.

    Args:
        layers: in order.
        rope_scaling_factor: factor of Llama 3's RoPE scaling; 0: none.
        yarn: another scaling, for latent attention; of grouped attention, for layers without a window.
        rotary_share: share of a head's elements that depend on the position, the first ones.
        is_tied: input and output embeddings are one tensor.
        init_std: standard deviation of random initial weights.
        rope_axes: positions have three axes; None: one.
        vision: the tower before the decoder; None: the model takes text only.
        num_extra_layers: layers in the model's files after these, which predict further tokens (multi-token
            prediction); they are neither trained nor published.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm_eps: float
    rope_theta: float
    rope_scaling_factor: float = 0.0
    yarn: Yarn | None = None
    rotary_share: float = 1.0
    is_tied: bool = False
    max_positions: int
    init_std: float = 0.02
    num_extra_layers: int = 0
    rope_axes: RopeAxes | None = None
    vision: Vision | None = None

    @property
    def picture_axes(self) -> RopeAxes:
        """Of a model that takes pictures: its axes of positions, or all elements with the first axis."""
        half = int(self.attention.head_dim * self.rotary_share) // 2
        return self.rope_axes or RopeAxes(sections=(half, 0, 0), is_interleaved=False)

    @property
    def picture_merge(self) -> int | None:
        """Patches of the side of a picture's token, for positions with three axes; 0: positions are those of
        text; None: the model takes text only."""
        if self.vision is None:
            return None
        return self.vision.merge_size if self.rope_axes else 0

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def attention(self) -> Attention:
        """The attention of every layer, but for its window."""
        return self.layers[0].attention

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer's attention; 0: none."""
        return tuple(layer.attention.window for layer in self.layers)

    @property
    def norms_after(self) -> bool:
        """Whether the norms of every layer are after its halves."""
        return self.layers[0].norms_after

    @property
    def needs_torch_spec(self) -> bool:
        """Whether the trainer has own layers only for it: Transformer Engine's spec has none."""
        attention = self.attention
        if isinstance(attention, LatentAttention):
            return self.norms_after
        return self.norms_after or attention.norms_all_heads or self.yarn is not None

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
        """Whether layers differ in nothing but whether they have experts, and whether they have the model's
        only window; the trainer builds no others. With norms after their halves they have grouped attention
        and no experts."""
        kinds = set(self._feed_forwards)
        each = [sum(isinstance(kind, one) for kind in kinds) for one in (DenseFeedForward, Experts)]
        alike = {_without_window(layer.attention) for layer in self.layers}
        has_one_window = len({*self.windows} - {0}) <= 1
        is_known = not self.norms_after or (isinstance(self.attention, GroupedAttention) and not self.experts)
        has_one_place = len({layer.norms_after for layer in self.layers}) == 1
        return len(alike) == 1 and has_one_window and max(each) == 1 and has_one_place and is_known

    @property
    def _feed_forwards(self) -> tuple[FeedForward, ...]:
        return tuple(layer.feed_forward for layer in self.layers)


def _without_window(attention: Attention) -> Attention:
    return replace(attention, window=0) if isinstance(attention, GroupedAttention) else attention
