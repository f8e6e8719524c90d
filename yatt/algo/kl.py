"""Estimates of the KL divergence from the reference, one per token.

Source: J. Schulman, "Approximating KL Divergence" (2020): with r = p_reference / p_policy,
k1 = -log r, k2 = (log r)^2 / 2, k3 = (r - 1) - log r. k1 and k3 are unbiased as values; as a
loss, k2 has the gradient of the true KL in expectation and k1 has none.
"""

from torch import Tensor

from yatt.config.algorithms import KlType

LOG_RATIO_LIMIT = 20.0


def kl_estimate(kind: KlType, logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """Returns the KL estimate of each token, float [T]; differentiable in `logprobs_T`.

    The log-ratio is clamped to +-20, so that one impossible token cannot make the batch infinite.
    """
    log_ratio_T = (reference_logprobs_T - logprobs_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if kind == "k1":
        return -log_ratio_T
    if kind == "k2":
        return log_ratio_T.square() / 2
    return log_ratio_T.expm1() - log_ratio_T
