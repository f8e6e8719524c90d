"""The sampler is not quite the trainer: weights that correct for it, and how far apart they are.

The engine that sampled and the trainer that learns compute the same model with other kernels, so
their log-probs differ a little; unnoticed, that biases the gradient.
"""

from torch import Tensor


def truncated_importance_weights(old_logprobs_T: Tensor, sampler_logprobs_T: Tensor, limit: float) -> Tensor:
    """min(p_trainer / p_sampler, limit) of each token, without gradient.

    Source: TIS, F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training" (2025), after Ionides (2008).
    """
    return (old_logprobs_T.detach() - sampler_logprobs_T).exp().clamp(max=limit)


def probability_differences(old_logprobs_T: Tensor, sampler_logprobs_T: Tensor) -> Tensor:
    """|p_trainer - p_sampler| of each sampled token; verl's rollout_probs_diff."""
    return (old_logprobs_T.detach().exp() - sampler_logprobs_T.exp()).abs()
