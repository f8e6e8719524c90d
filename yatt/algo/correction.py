"""Correction weights for the difference between sampler and trainer, and measures of it.

The engine that samples and the trainer compute the same model with different kernels, so their log-probs
differ a little. Without a correction, this biases the gradient.
"""

from torch import Tensor


def truncated_importance_weights(old_logprobs_T: Tensor, sampler_logprobs_T: Tensor, limit: float) -> Tensor:
    """Returns min(p_trainer / p_sampler, limit) of each token, without gradient.

    Source: TIS, F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
    (2025), after Ionides (2008).
    """
    return (old_logprobs_T.detach() - sampler_logprobs_T).exp().clamp(max=limit)


def probability_differences(old_logprobs_T: Tensor, sampler_logprobs_T: Tensor) -> Tensor:
    """Returns |p_trainer - p_sampler| of each sampled token; verl's rollout_probs_diff."""
    return (old_logprobs_T.detach().exp() - sampler_logprobs_T.exp()).abs()
