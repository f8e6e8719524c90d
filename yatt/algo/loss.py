"""The clipped policy loss, and the aggregation of token losses to a mini-batch's loss.

Each aggregation is a weighted sum over tokens, with weights that depend only on lengths. So a mini-batch's
loss does not depend on its division into micro-batches and ranks: every rank adds up its own tokens with
known weights, and nothing is averaged twice.

Suffixes: N samples, T completion tokens of these samples in sequence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from yatt.config.sections.algorithm import AggregationMode

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRange:
    """PPO's clip range: the ratio stays in [1 - low, 1 + high]; `dual` (0: off) bounds it for negative
    advantages."""

    low: float
    high: float
    dual: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTotals:
    """Size of a whole mini-batch over all ranks."""

    num_tokens: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """Losses per token. `losses_T` is differentiable; the other tensors are for metrics."""

    losses_T: Tensor
    is_clipped_T: Tensor
    is_dual_clipped_T: Tensor
    approx_kl_T: Tensor


def policy_losses(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, clip: ClipRange
) -> TokenLosses:
    """Returns the clipped surrogate loss of each token, float [T].

    Source:
        PPO (arXiv 1707.06347) eq. 7; clip-higher: DAPO (arXiv 2503.14476) 3.1; dual clip: arXiv
        1912.09729 eq. 5. As in verl the log-ratio is clamped to +-20.
    """
    log_ratio_T = (logprobs_T - old_logprobs_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio_T = log_ratio_T.exp()
    free_T = -advantages_T * ratio_T
    held_T = -advantages_T * ratio_T.clamp(1 - clip.low, 1 + clip.high)
    losses_T = torch.maximum(free_T, held_T)
    is_dual_clipped_T = torch.zeros_like(losses_T, dtype=torch.bool)
    if clip.dual:
        floor_T = -advantages_T * clip.dual
        is_dual_clipped_T = (losses_T > floor_T) & (advantages_T < 0)
        losses_T = torch.where(is_dual_clipped_T, floor_T, losses_T)
    return TokenLosses(losses_T, held_T > free_T, is_dual_clipped_T, -log_ratio_T.detach())


def token_weights(mode: AggregationMode, lengths_N: Tensor, totals: BatchTotals, norm_length: int) -> Tensor:
    """Returns the weight of each token of these samples in the mini-batch's loss, float32 [T].

    Args:
        lengths_N: completion tokens of the given samples, int64.
        totals: of the whole mini-batch, from metadata.
        norm_length: constant divisor of seq-mean-token-sum-norm.

    Source:
        verl's loss_agg_mode. token-mean: DAPO 3.3; seq-mean-token-mean: DeepSeekMath eq. 3;
        seq-mean-token-sum-norm: Dr. GRPO (arXiv 2503.20783) 3.2.
    """
    num_samples = max(totals.num_samples, 1)
    per_sample_N = torch.full(lengths_N.shape, 1.0 / num_samples, dtype=torch.float64)
    if mode == "token-mean":
        per_sample_N = torch.full_like(per_sample_N, 1.0 / max(totals.num_tokens, 1))
    elif mode == "seq-mean-token-mean":
        per_sample_N = per_sample_N / lengths_N.clamp(min=1)
    elif mode == "seq-mean-token-sum-norm":
        per_sample_N = per_sample_N / norm_length
    return per_sample_N.repeat_interleave(lengths_N).float()
