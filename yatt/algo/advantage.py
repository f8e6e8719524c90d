"""Advantages from rewards: one number for every completion token of a rollout batch.

Every rank has the table of rewards, prompt groups and lengths, computes all advantages from it and uses its
own. So nothing is exchanged, and the result does not depend on the layout. Statistics are computed in
float64, so the order of samples does not change float32 results.

Suffixes: N samples, T completion tokens of all samples in sequence, L tokens of the longest completion.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from yatt.config.sections.algorithm import GAE, Estimator

STD_FLOOR = 1e-6
VARIANCE_FLOOR = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTable:
    """The input of the advantages.

    Args:
        rewards_N: final rewards, float.
        groups_N: number of the prompt group of each sample, int64; samples need not be sorted.
        lengths_N: completion tokens of each sample, int64.
        penalties_T: subtracted from the reward at its token (KL in the reward), float; None: no penalties.
        is_masked_N: samples that are not trained on, bool; their rewards count in their groups. None: none.
    """

    rewards_N: Tensor
    groups_N: Tensor
    lengths_N: Tensor
    penalties_T: Tensor | None = None
    is_masked_N: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Groups:
    """Size, mean and unbiased std of each sample's group; a group of one has mean 0 and std 1."""

    sizes_N: Tensor
    means_N: Tensor
    stds_N: Tensor


def advantages(estimator: Estimator, table: RewardTable, gamma: float = 1.0) -> Tensor:
    """Returns the advantages of all completion tokens.

    Args:
        gamma: discount per token; used only by reinforce_plus_plus.

    Returns:
        float32 [T], samples in the order of the table.

    Source:
        grpo: DeepSeekMath (arXiv 2402.03300) 4.1.2. dr_grpo: arXiv 2503.20783, 3.2. rloo: arXiv
        2402.14740, eq. 9. reinforce_plus_plus and its baseline form: arXiv 2501.03262, 3.1 and 3.2.
        As in verl, a group of one sample has no baseline: its reward is its advantage.
    """
    assert estimator != GAE, "advantages of a critic's values are made by gae_estimate"
    if estimator == "reinforce_plus_plus":
        return _whitened(_discounted_returns(table, gamma), table).float()
    returns_N = _returns(table)
    groups = _group_statistics(returns_N, table.groups_N)
    centered_N = returns_N - groups.means_N
    if estimator == "grpo":
        centered_N = centered_N / (groups.stds_N + STD_FLOOR)
    elif estimator == "rloo":
        centered_N = centered_N * groups.sizes_N / (groups.sizes_N - 1).clamp(min=1)
    advantages_T = centered_N.repeat_interleave(table.lengths_N)
    if estimator == "reinforce_plus_plus_baseline":
        advantages_T = _whitened(advantages_T, table)
    return advantages_T.float()


def _returns(table: RewardTable) -> Tensor:
    """Returns the rewards minus all their penalties, float64 [N]."""
    returns_N = table.rewards_N.double()
    if table.penalties_T is None:
        return returns_N
    samples_T = torch.arange(len(table.lengths_N)).repeat_interleave(table.lengths_N)
    return returns_N - torch.zeros_like(returns_N).index_add(0, samples_T, table.penalties_T.double())


def _group_statistics(values_N: Tensor, groups_N: Tensor) -> _Groups:
    distinct_G = torch.tensor(sorted(set(groups_N.tolist())), dtype=torch.int64)
    index_N = torch.searchsorted(distinct_G, groups_N)
    zeros_G = values_N.new_zeros(len(distinct_G))
    sizes_N = zeros_G.index_add(0, index_N, torch.ones_like(values_N))[index_N]
    means_N = zeros_G.index_add(0, index_N, values_N)[index_N] / sizes_N
    squares_N = (values_N - means_N).square()
    stds_N = (zeros_G.index_add(0, index_N, squares_N)[index_N] / (sizes_N - 1).clamp(min=1)).sqrt()
    alone_N = sizes_N == 1
    return _Groups(sizes_N, means_N.masked_fill(alone_N, 0.0), stds_N.masked_fill(alone_N, 1.0))


def _discounted_returns(table: RewardTable, gamma: float) -> Tensor:
    """Returns the return-to-go of every token, with the reward at the last one; float64 [T]."""
    return _sums_to_go(_paid(table), table.lengths_N, gamma)


def _paid(table: RewardTable) -> Tensor:
    """Returns what each token is paid, float64 [T]: minus its penalty, and the reward at a sample's last."""
    lengths_N = table.lengths_N
    ends_N = lengths_N.cumsum(0) - 1
    paid_T = torch.zeros(int(lengths_N.sum()), dtype=torch.float64)
    if table.penalties_T is not None:
        paid_T -= table.penalties_T.double()
    spoke_N = lengths_N > 0
    paid_T[ends_N[spoke_N]] += table.rewards_N.double()[spoke_N]
    return paid_T


def _sums_to_go(values_T: Tensor, lengths_N: Tensor, factor: float) -> Tensor:
    """Returns of every token its value and those after it in its sample, each one times `factor` once more;
    float64 [T]. Changes `values_T`."""
    # From the last token of each sample to its first, all samples at once, the longest first: those that are
    # long enough for a step are the first ones. A table of samples and positions would be mostly padding.
    ends_N = (lengths_N.cumsum(0) - 1)[lengths_N.argsort(descending=True, stable=True)]
    num_shorter_L = torch.bincount(lengths_N).cumsum(0)[:-1]
    running_N = torch.zeros(len(lengths_N), dtype=torch.float64)
    for step, num_shorter in enumerate(num_shorter_L.tolist()):
        at = ends_N[: len(lengths_N) - num_shorter] - step
        running_N = values_T[at] + factor * running_N[: len(at)]
        values_T[at] = running_N
    return values_T


@dataclass(frozen=True, slots=True)
class ValueEstimate:
    """What a critic's values say of all completion tokens, float32 [T] each.

    `advantages_T`: for the policy. `returns_T`: what the values should have been.
    """

    advantages_T: Tensor
    returns_T: Tensor


def gae_estimate(
    table: RewardTable, values_T: Tensor, *, gamma: float, lam: float, whitens: bool
) -> ValueEstimate:
    """Returns generalised advantages, and the returns that the values are trained towards.

    A step of gamma and lambda is one sampled token; tokens of an environment between two of them are none,
    and have no value. After a sample's last token there is nothing: its value is 0.

    Args:
        values_T: the critic's value before each completion token, in the order of the table.
        whitens: scales the advantages to mean 0 and variance 1; returns are made of those before.

    Source:
        Schulman et al., arXiv 1506.02438, eq. 16; returns are advantages plus values, as in verl and
        OpenRLHF (TD(lambda)).
    """
    now_T, ends_N = values_T.double(), table.lengths_N.cumsum(0) - 1
    next_T = now_T.roll(-1)
    next_T[ends_N[table.lengths_N > 0]] = 0.0
    errors_T = _paid(table) + gamma * next_T - now_T
    found_T = _sums_to_go(errors_T, table.lengths_N, gamma * lam)
    advantages_T = _whitened(found_T, table) if whitens else found_T
    return ValueEstimate(advantages_T.float(), (found_T + now_T).float())


def _whitened(values_T: Tensor, table: RewardTable) -> Tensor:
    """Returns the values scaled to mean 0 and unbiased variance 1 over all tokens that are trained on."""
    trained_T = values_T
    if table.is_masked_N is not None:
        trained_T = values_T[~table.is_masked_N.repeat_interleave(table.lengths_N)]
    if not len(trained_T):
        return torch.zeros_like(values_T)
    variance = trained_T.var() if len(trained_T) > 1 else values_T.new_ones(())
    return (values_T - trained_T.mean()) * torch.rsqrt(variance + VARIANCE_FLOOR)
