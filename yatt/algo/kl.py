"""The KL divergence from the reference: estimates per token, and the coefficient of the penalty.

Source: J. Schulman, "Approximating KL Divergence" (2020): with r = p_reference / p_policy,
k1 = -log r, k2 = (log r)^2 / 2, k3 = (r - 1) - log r. k1 and k3 are unbiased as values; as a
loss, k2 has the gradient of the true KL in expectation and k1 has none.
"""

from torch import Tensor

from yatt.config.sections.algorithm import KlType

LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0
"""As in verl: above this the estimate is constant, so one token cannot dominate the loss."""

ERROR_LIMIT = 0.2


def kl_estimate(kind: KlType, logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """Returns the KL estimate of each token, float [T]; differentiable in `logprobs_T`.

    The log-ratio is clamped to +-20, so that one impossible token cannot make the batch infinite; k3 is
    limited to 10.
    """
    log_ratio_T = (reference_logprobs_T - logprobs_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if kind == "k1":
        return -log_ratio_T
    if kind == "k2":
        return log_ratio_T.square() / 2
    return (log_ratio_T.expm1() - log_ratio_T).clamp(max=K3_LIMIT)


def adapted_coefficient(
    coefficient: float, *, kl: float, target: float, num_samples: int, horizon: float
) -> float:
    """Returns the coefficient for the next iteration.

    Args:
        kl: mean KL per token of the last iteration.
        num_samples: completions of that iteration.
        horizon: above num_samples / 5, so that the factor is positive.

    Source:
        Ziegler et al. (arXiv 1909.08593) 2.2: error = clip(kl / target - 1, +-0.2), and a factor of
        1 + error * num_samples / horizon. As in verl, the KL is per token.
    """
    error = min(max(kl / target - 1, -ERROR_LIMIT), ERROR_LIMIT)
    return coefficient * (1 + error * num_samples / horizon)
