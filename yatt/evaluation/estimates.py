"""Estimates from scored samples: means with their errors, and pass@k. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Scores = Sequence[Sequence[float]]
"""Scores of the samples of each prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean and its standard error; None: not enough data."""

    mean: float | None
    std_err: float | None
    prompts: int
    """Number of prompts that it is made from."""


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples passes.

    Args:
        n: number of samples, k or more.
        passed: those of them that pass.

    Source: Chen et al. 2021 (arXiv:2107.03374), equation 1: 1 - C(n - c, k) / C(n, k).
    """
    assert 1 <= k <= n and 0 <= passed <= n, "the caller has at least k samples"
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def mean_of(scores: Scores) -> Estimate:
    """Mean of all samples. The error counts the samples of one prompt as dependent.

    Source: clustered standard errors as in arXiv:2411.00640, section 2.2, times sqrt(P / (P - 1)) for P
    prompts, so that with one sample per prompt it is the usual error of a mean.
    """
    used = [each for each in scores if each]
    count, prompts = sum(map(len, used)), len(used)
    if not count:
        return Estimate(mean=None, std_err=None, prompts=0)
    mean = math.fsum(value for each in used for value in each) / count
    if prompts < 2:
        return Estimate(mean=mean, std_err=None, prompts=prompts)
    squares = math.fsum(math.fsum(value - mean for value in each) ** 2 for each in used)
    std_err = math.sqrt(squares * prompts / (prompts - 1)) / count
    return Estimate(mean=mean, std_err=std_err, prompts=prompts)


def pass_rate(scores: Scores, k: int, least: float) -> Estimate:
    """Mean of pass@k over the prompts with k or more scores.

    Args:
        least: a sample passes if its score is not below this.
    """
    rates = [
        [pass_at_k(len(each), sum(score >= least for score in each), k)] for each in scores if len(each) >= k
    ]
    return mean_of(rates)
