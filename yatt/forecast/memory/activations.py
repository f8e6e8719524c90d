"""Bytes that a layer keeps for its backward pass, and those that passes need beside them.

The terms are the tensors that autograd saves in megatron-core's layers with the spec of
`yatt.trainer.mcore.spec`, without fusions. A test counts them in a real trainer on CPU. Not measured: on GPUs
norms have a fused kernel, which saves its input instead of two float32 tensors; Transformer Engine saves the
same tensors.

Letters: H hidden size, Q and K width of queries and keys on this rank, F columns of the feed-forward on it.
"""

from dataclasses import dataclass
from typing import Literal

from yatt.forecast.memory.ranks import RankLayout
from yatt.models.shape import (
    Attention,
    DenseFeedForward,
    Experts,
    FeedForward,
    GroupedAttention,
    LatentAttention,
    Layer,
)

FLOAT = 4
IMBALANCE = 1.25
"""Tokens of the most loaded expert, or expert-parallel rank, per token of the mean; assumed."""

ROUTER_BYTES = 14
"""Per token and expert: logits, probabilities, and the map of routes; counted."""
ROUTE_BYTES = 20
"""Per token and chosen expert: weight and indices of the permutation; counted."""

MOST_HEAD_SIZE = 256
"""Of CUDA's kernel for streams."""

KernelSet = Literal["cpu", "torch", "te"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShare:
    """What one rank sees of a micro-batch.

    Args:
        num_tokens: of the micro-batch on one context-parallel rank.
        longest: tokens of its longest sequence, on all ranks.
        item_bytes: of a parameter or activation.
        is_packed: the micro-batch has several sequences.
        imbalance: tokens of the most loaded expert, or rank with experts, per token of the mean.
    """

    num_tokens: int
    longest: int
    item_bytes: int
    is_packed: bool
    kernels: KernelSet
    layout: RankLayout
    imbalance: float = IMBALANCE

    @property
    def num_held(self) -> int:
        """Tokens outside of matrix products."""
        return -(-self.num_tokens // self.layout.tp) if self.layout.has_sequence_parallel else self.num_tokens

    @property
    def keeps_inputs(self) -> bool:
        """Whether a layer's first norm saves the layer's input itself; otherwise a float32 copy."""
        return self.kernels != "cpu" or self.item_bytes == FLOAT

    def hidden_bytes(self, hidden: int) -> int:
        """Hidden states between layers."""
        return self.num_held * hidden * self.item_bytes


def layer_bytes(layer: Layer, hidden: int, share: TokenShare) -> int:
    """Bytes that one layer keeps from its forward to its backward pass without recomputation."""
    return _attention(layer.attention, hidden, share) + _feed_forward(layer.feed_forward, hidden, share)


def norm_bytes(width: int, share: TokenShare) -> int:
    """Per token: the output, and the input or, without a fused kernel, the input and the normalised input in
    float32; one number in float32."""
    saved = 2 * FLOAT if share.kernels == "cpu" else share.item_bytes
    return width * (share.item_bytes + saved) + FLOAT


def _attention(attention: Attention, hidden: int, share: TokenShare) -> int:
    if isinstance(attention, LatentAttention):
        return _latent(attention, hidden, share)
    return _grouped(attention, hidden, share)


def _latent(attention: LatentAttention, hidden: int, share: TokenShare) -> int:
    """Norm, matrices down to two vectors, their norms, matrices up to heads, rotation of a part of each head,
    attention, one matrix. Keys and values of all heads are kept."""
    tp, item = share.layout.tp, share.item_bytes
    heads = attention.num_heads // tp
    queries, values = heads * attention.head_dim, heads * attention.value_dim
    up = queries + heads * (attention.nope_dim + attention.value_dim)
    down = attention.kv_rank + attention.rope_dim + attention.q_rank
    vectors = sum(norm_bytes(rank, share) for rank in (attention.q_rank, attention.kv_rank) if rank)
    per_token = item * (up + 2 * queries + 2 * values + 4 * attention.rope_dim) + FLOAT * heads
    if _has_varlen(attention, share):  # values as wide as keys; keys and values of half a sequence more
        per_token += item * (2 * queries - values)
        per_token += item * queries * (2 * share.layout.cp - 1) if share.layout.cp > 1 else 0
    elif share.layout.cp > 1 and share.kernels != "te":
        whole = (queries + values) * (share.layout.cp - 1)
        scores = heads * FLOAT + 1 if share.kernels == "torch" else item
        per_token += item * whole + share.longest * scores
    elif _has_scores(attention, share):
        per_token += FLOAT * heads * share.longest
    held = norm_bytes(hidden, share) + vectors + item * down
    return share.num_held * held + share.num_tokens * per_token


def _has_scores(attention: Attention, share: TokenShare) -> bool:
    """Whether torch computes all scores: under context parallelism or with a window on GPUs without the
    kernel for streams, and on CPU where keys and values have different widths."""
    if isinstance(attention, LatentAttention) and share.kernels == "cpu":
        return attention.head_dim != attention.value_dim
    has_mask = share.layout.cp > 1 or _is_narrow(attention, share)
    return has_mask and share.kernels == "torch" and not _has_varlen(attention, share)


def _is_narrow(attention: Attention, share: TokenShare) -> bool:
    """Whether the window is shorter than the sequence: attention then needs a mask or the kernel."""
    return 0 < attention.window < share.longest


def _has_varlen(attention: Attention, share: TokenShare) -> bool:
    """Whether one kernel of CUDA computes a stream, with the torch spec (`yatt.trainer.attention.varlen`)."""
    is_stream = share.is_packed or share.layout.cp > 1 or _is_narrow(attention, share)
    suits = attention.head_dim <= MOST_HEAD_SIZE and attention.head_dim % 8 == 0
    return is_stream and suits and share.kernels == "torch" and share.item_bytes < FLOAT


def _grouped(attention: GroupedAttention, hidden: int, share: TokenShare) -> int:
    """Norm, one matrix for Q, K and V, norms of Q and K, rotation, attention, one matrix. A norm at the end
    keeps as much: the first matrix keeps the layer's input in place of a norm's output."""
    tp, item, cp = share.layout.tp, share.item_bytes, share.layout.cp
    heads, kv_heads = attention.num_heads // tp, max(attention.num_kv_heads // tp, 1)
    q, k = heads * attention.head_dim, kv_heads * attention.head_dim
    is_copied = (share.is_packed or cp > 1) and not _has_varlen(attention, share)
    rotated, angles, output = q + k, 4 * attention.head_dim, q * (2 if is_copied else 1)
    per_token = item * (q + 2 * k + rotated + angles + output) + FLOAT * heads
    if attention.has_qk_norm:
        each = 2 if attention.norms_all_heads else heads + kv_heads
        per_token += _qk_norm(q, k, share, attention) + FLOAT * each
    if cp > 1 and share.kernels != "te":
        has_varlen = _has_varlen(attention, share)
        per_token += 2 * item * k * cp if has_varlen else _gathered(q, k, heads, share, attention)
    elif _is_narrow(attention, share) and share.kernels != "te" and not _has_varlen(attention, share):
        per_token += _masked(heads, share)
    return share.num_held * norm_bytes(hidden, share) + share.num_tokens * per_token


def _qk_norm(q: int, k: int, share: TokenShare, attention: GroupedAttention) -> int:
    if attention.norms_all_heads:  # no fused kernel: inputs and normalised inputs in float32
        return 2 * FLOAT * (q + k)
    if share.kernels == "cpu":  # in float32 the input of K is a view of the matrix product
        return 2 * FLOAT * (q + k) if share.item_bytes < FLOAT else FLOAT * (2 * q + k)
    return share.item_bytes * (q + (k if share.kernels == "te" else 0))


def _gathered(q: int, k: int, heads: int, share: TokenShare, attention: GroupedAttention) -> int:
    """Per token, with the torch spec: K and V of the whole sequence, and a mask. CUDA's kernels take no mask
    together with grouped heads, so torch computes the scores, in float32."""
    is_view_kept = not attention.has_qk_norm
    whole = share.item_bytes * (2 * k * share.layout.cp - k)  # in place of this rank's rotated K
    if share.kernels == "torch":
        return whole + _masked(heads, share)
    freed = 0 if is_view_kept or share.item_bytes == FLOAT else share.item_bytes * (q + 2 * k)
    return whole + _masked(heads, share) - freed


def _masked(heads: int, share: TokenShare) -> int:
    """Per token: a mask, and with torch's kernels the scores; on CPU a mask in the type of the scores."""
    return share.longest * (1 + heads * FLOAT if share.kernels == "torch" else share.item_bytes)


def _feed_forward(part: FeedForward, hidden: int, share: TokenShare) -> int:
    norm = share.num_held * norm_bytes(hidden, share)
    if isinstance(part, DenseFeedForward):
        return norm + share.num_tokens * _swiglu(part.size // share.layout.tp, share)
    return norm + _experts(part, hidden, share)


def _swiglu(columns: int, share: TokenShare) -> int:
    """Per token: gate and up (2), activated gate, up plus an offset of 0, and their product."""
    return 5 * columns * share.item_bytes


def _experts(experts: Experts, hidden: int, share: TokenShare) -> int:
    """Router on the tokens held; experts on the tokens that are sent to this rank, on average."""
    layout, item = share.layout, share.item_bytes
    routed = routed_tokens(experts, share)
    columns = experts.size // layout.etp
    # as in SwiGLU, and the product with the router's weight
    total = routed * (item * (hidden + 6 * columns) + ROUTE_BYTES)
    total += share.num_held * experts.num_experts * ROUTER_BYTES
    if experts.shared_size:
        total += share.num_tokens * _swiglu(experts.shared_size // layout.tp, share)
    if experts.has_shared_gate:
        total += share.num_held * item * (hidden + 1)
    return total


def backward_bytes(layer: Layer, hidden: int, share: TokenShare) -> int:
    """Bytes beside what is kept, while a layer's backward pass runs.

    These are the gradients of its output and its input, and the larger of: the gradients of the two halves of
    a SwiGLU; those of one half and of the matrix; three tensors in float32 of a norm that comes last, without
    a fused kernel. With experts the gradients of all routed tokens too, three times (once more if they travel
    in EP, three times more in expert TP; counted), and then only one expert's part of the others.
    """
    part, layout, item = layer.feed_forward, share.layout, share.item_bytes
    if isinstance(part, DenseFeedForward):
        columns, tokens, routed = part.size // layout.tp, share.num_tokens, 0
    else:
        columns, routed = part.size // layout.etp, routed_tokens(part, share)
        tokens = int(share.imbalance * routed) * layout.ep // part.num_experts
    halves = item * max(2 * columns * tokens, columns * (tokens + 2 * hidden))
    if layer.norms_after and share.kernels == "cpu":
        halves = max(halves, 3 * FLOAT * hidden * share.num_held)
    states = 2 * share.hidden_bytes(hidden)
    copies = 3 + (layout.ep > 1) + 3 * (layout.etp > 1)
    return states + halves + item * copies * hidden * routed + _scores(layer.attention, share)


def left_bytes(layer: Layer, hidden: int, share: TokenShare) -> int:
    """Bytes that a layer with experts keeps from its recomputation to its next forward pass, in place of its
    input: megatron-core's dispatcher holds the last routes."""
    if not isinstance(layer.feed_forward, Experts):
        return 0
    return share.num_held * (2 * share.item_bytes * hidden + 5 * layer.feed_forward.num_experts)


def routed_tokens(experts: Experts, share: TokenShare) -> int:
    """Tokens that this rank's experts get, each token once for each expert that it chose."""
    routed = share.num_held * experts.top_k * share.layout.etp
    return int(share.imbalance * routed) if share.layout.ep > 1 else routed


def _scores(attention: Attention, share: TokenShare) -> int:
    """Gradients of the scores where torch computes them: in float32, and in the type of the others."""
    if not _has_scores(attention, share):
        return 0
    return (
        (FLOAT + share.item_bytes)
        * share.num_tokens
        * share.longest
        * (attention.num_heads // share.layout.tp)
    )
