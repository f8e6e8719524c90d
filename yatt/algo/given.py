"""Losses of completions that are given, not sampled: fine-tuning, and pairs of which one is preferred.

Those of pairs are of whole completions. Each token has the loss of its pair, and a mean over samples of means
over their tokens is then the mean over pairs, in every layout.

Suffixes: T completion tokens of the micro-batch on this rank, S its samples, P its pairs: samples 2p, the
preferred one, and 2p + 1.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from yatt.algo.view import LossView
from yatt.config.schema import PreferenceSection


@dataclass(frozen=True, slots=True)
class PairLosses:
    """Losses of each token, differentiable float32 [T]; for metrics, what the loss compares, float32 [S]."""

    losses_T: Tensor
    compared_S: Tensor


def sft_losses(view: LossView) -> Tensor:
    """The negative log-likelihood of each token, float32 [T]."""
    return -view.logprobs_T


def dpo_losses(view: LossView, section: PreferenceSection) -> PairLosses:
    """Direct preference optimization. Compared are the implicit rewards beta log(p / p_reference).

    Source: DPO (arXiv 2305.18290) eq. 7; label smoothing: conservative DPO (https://ericmitchell.ai/cdpo.pdf)
    eq. 3; `sft_coef`: RPO (arXiv 2404.19733) eq. 2, the likelihood per token of the preferred completion.
    """
    assert view.reference_T is not None, "a run with dpo has a reference"
    rewards_S = section.beta * view.sample_sums(view.logprobs_T - view.reference_T)
    margins_P = rewards_S[0::2] - rewards_S[1::2]
    smoothing = section.label_smoothing
    losses_P = -(1 - smoothing) * F.logsigmoid(margins_P) - smoothing * F.logsigmoid(-margins_P)
    losses_T = _of_tokens(view, losses_P)
    if section.sft_coef:
        is_preferred_T = view.samples_T % 2 == 0
        losses_T = losses_T - 2 * section.sft_coef * view.logprobs_T * is_preferred_T  # a pair has 2 samples
    return PairLosses(losses_T, rewards_S.detach())


def ranking_losses(view: LossView, section: PreferenceSection) -> PairLosses:
    """The loss of a reward model. Compared are its scores; `view.logprobs_T` are values, one of each sample.

    Source: InstructGPT (arXiv 2203.02155) eq. 1; `center_coef`: arXiv 2312.09244, 3.2.
    """
    scores_S = view.sample_sums(view.logprobs_T)
    losses_P = -F.logsigmoid(scores_S[0::2] - scores_S[1::2])
    if section.center_coef:
        losses_P = losses_P + section.center_coef * (scores_S[0::2] + scores_S[1::2]).square()
    return PairLosses(_of_tokens(view, losses_P), scores_S.detach())


def _of_tokens(view: LossView, losses_P: Tensor) -> Tensor:
    return view.of_tokens(torch.repeat_interleave(losses_P, 2))
