"""Every estimator against a reference written from its paper, sample by sample, in plain Python."""

import math
import statistics
from dataclasses import replace

import pytest
import torch

from yatt.algo.advantage import RewardTable, advantages

REWARDS = [1.0, 0.0, 0.5, 0.25, 1.0, 1.0, 1.0, 0.7]
GROUPS = [7, 3, 7, 3, 5, 7, 5, 9]
LENGTHS = [3, 1, 2, 4, 2, 1, 3, 2]
PENALTIES = [0.01 * i for i in range(sum(LENGTHS))]


def table(penalties=None):
    return RewardTable(
        rewards_N=torch.tensor(REWARDS),
        groups_N=torch.tensor(GROUPS),
        lengths_N=torch.tensor(LENGTHS),
        penalties_T=None if penalties is None else torch.tensor(penalties),
    )


def spread(per_sample):
    return [value for value, length in zip(per_sample, LENGTHS, strict=True) for _ in range(length)]


def peers(index, scores):
    return [score for score, group in zip(scores, GROUPS, strict=True) if group == GROUPS[index]]


def grpo(index, scores):
    mates = peers(index, scores)
    if len(mates) == 1:
        return scores[index] / (1 + 1e-6)
    return (scores[index] - statistics.mean(mates)) / (statistics.stdev(mates) + 1e-6)


def dr_grpo(index, scores):
    mates = peers(index, scores)
    return scores[index] - (statistics.mean(mates) if len(mates) > 1 else 0.0)


def rloo(index, scores):
    mates = peers(index, scores)
    if len(mates) == 1:
        return scores[index]
    others = list(mates)
    others.remove(scores[index])
    return scores[index] - statistics.mean(others)


def whiten(values):
    mean, variance = statistics.mean(values), statistics.variance(values)
    return [(value - mean) / (variance + 1e-8) ** 0.5 for value in values]


def scores_after(penalties):
    scores, start = [], 0
    for reward, length in zip(REWARDS, LENGTHS, strict=True):
        scores.append(reward - sum(penalties[start : start + length]))
        start += length
    return scores


def returns_to_go(penalties, gamma):
    values, start = [], 0
    for reward, length in zip(REWARDS, LENGTHS, strict=True):
        paid = [-penalty for penalty in penalties[start : start + length]]
        paid[-1] += reward
        values += [sum(gamma ** (k - t) * paid[k] for k in range(t, length)) for t in range(length)]
        start += length
    return values


@pytest.mark.parametrize("penalties", [None, PENALTIES], ids=["plain", "kl-in-reward"])
@pytest.mark.parametrize("reference", [grpo, dr_grpo, rloo], ids=lambda function: function.__name__)
def test_group_estimators_equal_their_papers(reference, penalties):
    scores = scores_after(penalties or [0.0] * len(PENALTIES))
    expected = spread([reference(index, scores) for index in range(len(scores))])
    got = advantages(reference.__name__, table(penalties))
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("penalties", [None, PENALTIES], ids=["plain", "kl-in-reward"])
def test_reinforce_plus_plus_whitens_returns_to_go_over_all_tokens(penalties, gamma):
    expected = whiten(returns_to_go(penalties or [0.0] * len(PENALTIES), gamma))
    got = advantages("reinforce_plus_plus", table(penalties), gamma)
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-6, rtol=1e-6)


def test_reinforce_plus_plus_baseline_whitens_the_group_difference():
    expected = whiten(spread([dr_grpo(index, REWARDS) for index in range(len(REWARDS))]))
    torch.testing.assert_close(
        advantages("reinforce_plus_plus_baseline", table()), torch.tensor(expected), atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_whitening_is_over_the_tokens_that_are_trained_on(estimator):
    """The rewards of masked samples count in their groups all the same."""
    masked = [index % 3 == 1 for index in range(len(REWARDS))]
    values = returns_to_go([0.0] * len(PENALTIES), 1.0)
    if estimator.endswith("baseline"):
        values = spread([dr_grpo(index, REWARDS) for index in range(len(REWARDS))])
    trained = [value for value, is_masked in zip(values, spread(masked), strict=True) if not is_masked]
    mean, std = statistics.mean(trained), math.sqrt(statistics.variance(trained) + 1e-8)
    got = advantages(estimator, replace(table(), is_masked_N=torch.tensor(masked)))
    assert got.tolist() == pytest.approx([(value - mean) / std for value in values], abs=1e-6)
    nobody = replace(table(), is_masked_N=torch.zeros(len(REWARDS), dtype=torch.bool))
    assert torch.equal(advantages(estimator, nobody), advantages(estimator, table())), "bit for bit"
    everyone = replace(table(), is_masked_N=torch.ones(len(REWARDS), dtype=torch.bool))
    assert not advantages(estimator, everyone).any()


def test_a_sample_without_tokens_has_no_advantage_and_harms_nobody():
    got = advantages(
        "reinforce_plus_plus",
        RewardTable(
            rewards_N=torch.tensor([1.0, 5.0, 0.0]),
            groups_N=torch.tensor([0, 0, 0]),
            lengths_N=torch.tensor([1, 0, 1]),
        ),
    )
    assert got.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-6)


def test_returns_of_one_long_sample_among_many_take_no_table_of_samples_and_positions():
    """320 GB it would have."""
    num, longest, gamma = 2_000_000, 20_000, 0.999
    lengths_N = torch.ones(num, dtype=torch.int64)
    lengths_N[7] = longest
    rewards_N = torch.arange(num) / num
    found_T = advantages(
        "reinforce_plus_plus",
        RewardTable(rewards_N=rewards_N, groups_N=torch.zeros(num, dtype=torch.int64), lengths_N=lengths_N),
        gamma,
    )
    returns_T = rewards_N.double().repeat_interleave(lengths_N)
    left_T = torch.arange(longest - 1, -1, -1, dtype=torch.float64)
    returns_T[7 : 7 + longest] = rewards_N[7].double() * gamma**left_T
    whole_T = (returns_T - returns_T.mean()) / (returns_T.var() + 1e-8).sqrt()
    assert torch.allclose(found_T, whole_T.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "estimator", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
def test_without_any_reward_nothing_is_learned_but_what_else_is_in_the_loss(estimator):
    """As with a teacher whose distribution is the loss; also with one completion per prompt."""
    for groups in (GROUPS, range(len(GROUPS))):
        nothing = replace(table(), rewards_N=torch.zeros(len(GROUPS)), groups_N=torch.tensor([*groups]))
        assert not advantages(estimator, nothing).any()
