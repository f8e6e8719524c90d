"""Log-probs and entropy of tokens whose logits are cut over the vocabulary by tensor parallelism.

Suffixes: T tokens, V entries of the vocabulary on this rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FAR_BELOW = -1e30
"""Stands for minus infinity where a product with zero must stay zero."""


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """Which entries of the vocabulary this rank's logits are of; what lies above `vocab_size` is padding."""

    group: dist.ProcessGroup
    vocab_size: int


def token_logprobs(
    logits_TV: Tensor, labels_T: Tensor, shard: VocabularyShard, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy of each distribution, softmax taken at `temperature`.

    Args:
        logits_TV: this rank's shard, any float dtype. labels_T: int64, in the whole vocabulary.

    Returns:
        Both float32 [T], the same on every rank of the group, differentiable in the logits.
    """
    scaled_TV = logits_TV.float() / temperature
    first = shard.group.rank() * scaled_TV.size(1)
    num_real = shard.vocab_size - first
    if num_real < scaled_TV.size(1):
        is_padding_V = torch.arange(scaled_TV.size(1), device=scaled_TV.device) >= num_real
        scaled_TV = scaled_TV.masked_fill(is_padding_V, FAR_BELOW)
    logprobs_T, entropy_T = _ShardedSoftmax.apply(scaled_TV, labels_T - first, shard.group)  # type: ignore[no-untyped-call]
    return logprobs_T, entropy_T


def _summed(
    tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


class _ShardedSoftmax(torch.autograd.Function):
    """log softmax at a label, and entropy, over logits that every rank has a part of.

    With p = softmax(x) and H its entropy: d log p_y / dx_j = [j = y] - p_j, and
    dH / dx_j = -p_j (log p_j + H).
    """

    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, labels_T: Tensor, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        top_T = _summed(logits_TV.max(dim=1).values, group, dist.ReduceOp.MAX)
        log_sum_T = _summed((logits_TV - top_T[:, None]).exp().sum(1), group).log() + top_T
        logs_TV = logits_TV - log_sum_T[:, None]
        is_here_T = (labels_T >= 0) & (labels_T < logits_TV.size(1))
        here_T = labels_T.clamp(0, logits_TV.size(1) - 1)
        logprobs_T = _summed(logs_TV.gather(1, here_T[:, None]).squeeze(1) * is_here_T, group)
        entropy_T = -_summed((logs_TV.exp() * logs_TV).sum(1), group)
        ctx.save_for_backward(logs_TV, here_T, is_here_T, entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        logs_TV, here_T, is_here_T, entropy_T = ctx.saved_tensors
        logprob_grad_T, entropy_grad_T = grads
        probs_TV = logs_TV.exp()
        grad_TV = torch.zeros_like(probs_TV)
        if logprob_grad_T is not None:
            grad_TV = -probs_TV * logprob_grad_T[:, None]
            grad_TV.scatter_add_(1, here_T[:, None], (logprob_grad_T * is_here_T)[:, None])
        if entropy_grad_T is not None:
            grad_TV -= probs_TV * (logs_TV + entropy_T[:, None]) * entropy_grad_T[:, None]
        return grad_TV, None, None
