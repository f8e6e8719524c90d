"""Policy losses: from the tokens of a micro-batch to the loss of each token.

Suffixes: T completion tokens of the micro-batch on this rank, S its samples.
"""

from collections.abc import Callable
from typing import assert_never

import torch
from torch import Tensor

from yatt.algo.loss import LOG_RATIO_LIMIT, ClipRange, TokenLosses, policy_losses
from yatt.algo.view import LossView
from yatt.config.sections.algorithm import PolicyLoss

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
