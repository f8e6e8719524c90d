"""The KL divergence from the reference: estimates per token, and the coefficient of the penalty.

Source: J. Schulman, "Approximating KL Divergence" (2020): with r = p_reference / p_policy,
k1 = -log r, k2 = (log r)^2 / 2, k3 = (r - 1) - log r. k1 and k3 are unbiased as values; as a
loss, k2 has the gradient of the true KL in expectation and k1 has none.
"""

from dataclasses import dataclass

import torch
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


@dataclass(frozen=True, slots=True)
class LikeliestKl:
    """Of each token, float32: the divergence, differentiable, and the teacher's mass in its likeliest."""

    kl_T: Tensor
    mass_T: Tensor


def likeliest_kl(teacher_TK: Tensor, student_TK: Tensor, rest_T: Tensor) -> LikeliestKl:
    """The forward KL divergence, teacher to student, over a teacher's likeliest tokens and all others as one.

    With p the teacher's and q the student's probabilities, P and Q their sums over the likeliest:
    sum p (log p - log q) + (1 - P) (log (1 - P) - log (1 - Q)). Without the last term the best student would
    give the others nothing (verl#5041).

    Args:
        teacher_TK: log-probs, float32; minus infinity where there is no token.
        student_TK: log-probs of the same tokens, differentiable; any finite number where there is none.
        rest_T: log-prob of all other tokens together, log (1 - Q), differentiable.

    Source: arXiv 2306.13649 eq. 2 (supervised divergences on the student's tokens), coarsened by a bucket.
    """
    mass_TK = teacher_TK.exp()
    mass_T = mass_TK.sum(1, dtype=torch.float64)
    left_T = (1 - mass_T).clamp(min=0)  # an engine's log-probs are rounded
    logs_TK = teacher_TK.masked_fill(teacher_TK == -torch.inf, 0.0)
    of_likeliest_T = (mass_TK * (logs_TK - student_TK)).sum(1)
    of_rest_T = torch.special.xlogy(left_T, left_T).float() - left_T.float() * rest_T
    return LikeliestKl(of_likeliest_T + of_rest_T, mass_T.float())


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
