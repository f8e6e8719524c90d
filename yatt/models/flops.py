"""Floating-point operations of a model's matrix products, from its shape.

A product of matrices [m, k] and [k, n] is 2mkn operations. Counted is what the model has to compute, however
it is computed: attention only within each sequence and only to tokens that are not later nor before a window,
of all experts only those that a token passes, logits only where they are used, and nothing that is computed
again to save memory.
Norms, activations, rotary positions and the softmax are left out; together they are below 1 %.

Source: Chowdhery et al., PaLM, arXiv 2204.02311, appendix B (model FLOPs utilization). Deviation: PaLM counts
attention to every token of a sequence; here, as in Megatron-LM's count, only the causal half.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from yatt.models.shape import (
    Attention,
    DenseFeedForward,
    Experts,
    FeedForward,
    LatentAttention,
    Shape,
    TiledVision,
)

BACKWARD = 2
"""Products of the backward pass by those of the forward pass: gradients of both factors of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardFlops:
    """Operations of the forward pass.

    Attributes:
        token: per token, in all layers, with the weights.
        pair: per token and token that it attends to, in all layers without a window; it also attends to
            itself.
        row: per position whose logits are used.
        narrow_pair: as `pair`, in all layers with a window.
        window: positions of it; 0: there is none.
    """

    token: int
    pair: int
    row: int
    narrow_pair: int = 0
    window: int = 0

    def of_sequence(self, num_tokens: int, num_rows: int) -> int:
        """Operations of a sequence of this length, with logits at `num_rows` of its positions."""
        num_pairs, beyond = num_tokens * (num_tokens + 1) // 2, max(num_tokens - self.window, 0)
        num_narrow = num_pairs - beyond * (beyond + 1) // 2
        pairs = self.pair * num_pairs + self.narrow_pair * num_narrow
        return self.token * num_tokens + pairs + self.row * num_rows


def forward_flops(shape: Shape) -> ForwardFlops:
    """Counts the operations of a model's forward pass."""
    token = 0
    pairs = {False: 0, True: 0}
    for layer, count in Counter(shape.layers).items():
        of_token, of_pair = attention_flops(layer.attention, shape.hidden_size)
        token += count * (of_token + feed_forward_flops(layer.feed_forward, shape.hidden_size))
        pairs[layer.attention.window > 0] += count * of_pair
    return ForwardFlops(
        token=token,
        pair=pairs[False],
        row=2 * shape.hidden_size * shape.vocab_size,
        narrow_pair=pairs[True],
        window=max(shape.windows, default=0),
    )


def attention_flops(attention: Attention, hidden_size: int) -> tuple[int, int]:
    """Counts the operations of one layer's attention: per token, and per token and token that it attends to.

    A pair has a product of query and key, and one of its weight and the value.
    """
    if isinstance(attention, LatentAttention):
        return _latent_flops(attention, hidden_size)
    num_heads, head_dim = attention.num_heads, attention.head_dim
    weights = hidden_size * head_dim * (2 * num_heads + 2 * attention.num_kv_heads)  # q and output; k and v
    return 2 * weights, 2 * 2 * num_heads * head_dim


def _latent_flops(attention: LatentAttention, hidden_size: int) -> tuple[int, int]:
    num_heads, query, q_rank, kv_rank = (
        attention.num_heads, attention.head_dim, attention.q_rank, attention.kv_rank
    )  # fmt: skip
    weights = q_rank * hidden_size + (q_rank or hidden_size) * num_heads * query
    weights += hidden_size * (kv_rank + attention.rope_dim)
    weights += kv_rank * num_heads * (attention.nope_dim + attention.value_dim)
    weights += num_heads * attention.value_dim * hidden_size
    return 2 * weights, 2 * num_heads * (query + attention.value_dim)


def feed_forward_flops(part: FeedForward, hidden_size: int) -> int:
    """Counts the operations per token of one layer's feed-forward part."""
    match part:
        case DenseFeedForward():
            return _swiglu(part.size, hidden_size)
        case Experts():
            experts = _swiglu(part.top_k * part.size + part.shared_size, hidden_size)
            return experts + 2 * hidden_size * (part.num_experts + part.has_shared_gate)


def training_flops(forward: ForwardFlops, sequences: Iterable[tuple[int, int]]) -> int:
    """Counts the operations of a forward and backward pass over sequences.

    Args:
        sequences: of each, the number of tokens that enter the model, and of those whose logits are used.
    """
    return (1 + BACKWARD) * sum(forward.of_sequence(*sequence) for sequence in sequences)


def picture_flops(shape: Shape, grid: tuple[int, int, int]) -> int:
    """Counts the operations of a picture's way through the tower; attention within windows is left out.

    Args:
        shape: of a model that takes pictures.
        grid: its patches in time, height and width; the first one may count tiles. None attends to another.
    """
    vision, num_patches = shape.vision, math.prod(grid)
    assert vision is not None, "a model that takes pictures"
    (block, token), hidden = vision.matrices, vision.hidden_size
    own = grid[1] * grid[2] + isinstance(vision, TiledVision)  # with the first token of a tile, no patch
    blocks = vision.depth * block * grid[0] * own + vision.num_whole * 2 * hidden * grid[0] * own**2
    patches = 3 * vision.frames * vision.patch_size**2 * hidden * num_patches
    return 2 * (patches + blocks + token * (num_patches // vision.merge_size**2))  # attention is not causal


def _swiglu(size: int, hidden_size: int) -> int:
    return 3 * 2 * size * hidden_size
