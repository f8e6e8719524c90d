"""Policy losses of each token, and the aggregation of token losses to a mini-batch's loss.

Each aggregation is a weighted sum over tokens, with weights that depend only on lengths. So a mini-batch's
loss does not depend on its division into micro-batches and ranks: every rank adds up its own tokens with
known weights, and nothing is averaged twice.

Suffixes: N samples, T completion tokens of these samples in sequence; in a micro-batch, T those on
this rank and S its samples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from yatt.algo.view import LossView
from yatt.config.sections.algorithm import AggregationMode, PolicyLoss

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


Loss = Callable[[LossView, ClipRange], TokenLosses]


def loss_of(name: PolicyLoss) -> Loss:
    """The loss of this name."""
    match name:
        case "ppo":
            return ppo
        case "gspo":
            return gspo
        case "cispo":
            return cispo
        case "gmpo":
            return gmpo
    assert_never(name)


def ppo(view: LossView, clip: ClipRange) -> TokenLosses:
    """Clipped surrogate with one ratio per token; see `policy_losses`."""
    return policy_losses(view.logprobs_T, view.old_T, view.advantages_T, clip)


def gspo(view: LossView, clip: ClipRange) -> TokenLosses:
    """Clipped surrogate with one ratio per sequence: the geometric mean of its tokens' ratios.

    Each token's ratio has the sequence's value and the token's own gradient. With seq-mean-token-mean the
    gradient is that of the paper's objective.

    Source: GSPO (arXiv 2507.18071) eq. 5 and 7; the form per token is eq. 13, GSPO-token.
    """
    log_ratio_T = _log_ratio(view)
    own_T = view.logprobs_T - view.logprobs_T.detach()
    sequence_T = view.of_tokens(view.sample_means(log_ratio_T.detach()))
    return _clipped((own_T + sequence_T).exp(), view, clip, log_ratio_T)


def cispo(view: LossView, clip: ClipRange) -> TokenLosses:
    """REINFORCE with a clipped importance weight that has no gradient: clipped tokens still learn.

    Source: MiniMax-M1 (arXiv 2506.13585) eq. 4 and 5.
    """
    log_ratio_T = _log_ratio(view)
    ratio_T = log_ratio_T.detach().exp()
    weight_T = ratio_T.clamp(1 - clip.low, 1 + clip.high)
    losses_T = -weight_T * view.advantages_T * view.logprobs_T
    return TokenLosses(losses_T, weight_T != ratio_T, _none(losses_T), -log_ratio_T.detach())


def gmpo(view: LossView, clip: ClipRange) -> TokenLosses:
    """The geometric mean of a sequence's clipped token ratios times its advantage, as each token's loss.

    `clip` bounds log-ratios: [-low, +high]. Per token the pessimistic one of clipped and free ratio is taken.
    The advantage of a sequence is the mean of those of its tokens.

    Source: GMPO (arXiv 2507.20673) eq. 4 and algorithm 1.
    """
    log_ratio_T = _log_ratio(view)
    advantages_S = view.sample_means(view.advantages_T)
    sign_T = view.of_tokens(advantages_S.sign())
    free_T = sign_T * log_ratio_T
    held_T = sign_T * log_ratio_T.clamp(-clip.low, clip.high)
    chosen_T = sign_T * torch.minimum(free_T, held_T)
    losses_S = -advantages_S * view.sample_means(chosen_T).exp()
    losses_T = view.of_tokens(losses_S)
    return TokenLosses(losses_T, held_T < free_T, _none(losses_T), -log_ratio_T.detach())


def _log_ratio(view: LossView) -> Tensor:
    return (view.logprobs_T - view.old_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _clipped(ratio_T: Tensor, view: LossView, clip: ClipRange, log_ratio_T: Tensor) -> TokenLosses:
    free_T = -view.advantages_T * ratio_T
    held_T = -view.advantages_T * ratio_T.clamp(1 - clip.low, 1 + clip.high)
    losses_T = torch.maximum(free_T, held_T)
    return TokenLosses(losses_T, held_T > free_T, _none(losses_T), -log_ratio_T.detach())


def _none(losses_T: Tensor) -> Tensor:
    """No token is dual-clipped."""
    return torch.zeros_like(losses_T, dtype=torch.bool)
