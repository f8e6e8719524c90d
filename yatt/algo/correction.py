"""Corrections for the difference between sampler and trainer, and a measure of it.

The engine that samples and the trainer compute the same model with different kernels, and with an overlapped
sampler also with older weights. So their log-probs differ; without a correction, this biases the gradient.

The ratio of a token is p_trainer / p_sampler, with the trainer's log-probs before the first update of the
batch. Nothing here has a gradient.

Sources:
    truncate: TIS, F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
    (2025), after Ionides (2008). mask of tokens: IcePop, Ring-1T (arXiv 2510.18855) 3.2. mask of sequences,
    rejection and veto: J. Liu, Y. Li et al., "When Speed Kills Stability" (2025), and verl's rollout
    correction; there the geometric level is the length-normalised ratio.

Suffixes: T completion tokens of a micro-batch on this rank, S its samples.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from yatt.algo.view import LossView
from yatt.config.sections.algorithm import CorrectionLevel, CorrectionSection, RejectionSection


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """Weight of each token, float32 [T], and whether it was limited, bool [T]."""

    weights_T: Tensor
    is_limited_T: Tensor


@torch.no_grad()
def importance_weights(section: CorrectionSection, view: LossView) -> ImportanceWeights:
    """Factors of the token losses. Collective, like the view's sums.

    truncate: min(ratio, high). mask: the ratio, or 0 outside of [low, high]. none: 1.
    """
    if section.rule == "none":
        ones_T = torch.ones_like(view.old_T)
        return ImportanceWeights(ones_T, torch.zeros_like(ones_T, dtype=torch.bool))
    ratio_T = log_ratios(section.level, view).exp()
    if section.rule == "truncate":
        return ImportanceWeights(ratio_T.clamp(max=section.high), ratio_T >= section.high)
    is_outside_T = (ratio_T < section.low) | (ratio_T > section.high)
    return ImportanceWeights(ratio_T.masked_fill(is_outside_T, 0.0), is_outside_T)


@torch.no_grad()
def kept_tokens(section: RejectionSection, view: LossView) -> Tensor:
    """Whether each token stays in the batch, bool [T]. Collective, like the view's sums."""
    kept_T = torch.ones_like(view.old_T, dtype=torch.bool)
    if section.level != "none":
        ratio_T = log_ratios(section.level, view).exp()
        kept_T = (ratio_T >= section.low) & (ratio_T <= section.high)
    if section.veto:
        is_far_T = log_ratios("token", view).exp() < section.veto
        kept_T = kept_T & (view.of_tokens(view.sample_sums(is_far_T.float())) == 0)
    return kept_T


def log_ratios(level: CorrectionLevel, view: LossView) -> Tensor:
    """Log of each token's ratio at this level, float32 [T], without gradient. Collective."""
    own_T = view.old_T.detach() - view.sampler_T
    if level == "token":
        return own_T
    if level == "sequence":
        return view.of_tokens(view.sample_sums(own_T))
    return view.of_tokens(view.sample_means(own_T))


def probability_differences(old_logprobs_T: Tensor, sampler_logprobs_T: Tensor) -> Tensor:
    """Returns |p_trainer - p_sampler| of each sampled token; verl's rollout_probs_diff."""
    return (old_logprobs_T.detach().exp() - sampler_logprobs_T.exp()).abs()
