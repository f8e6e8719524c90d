"""Generalised advantages against their definition, sample by sample, in plain Python."""

from dataclasses import replace

import pytest
import torch

from yatt.algo import advantage
from yatt.algo.advantage import RewardTable, gae_estimate

LENGTHS = [5, 0, 1, 7]
TOTAL = sum(LENGTHS)
GENERATOR = torch.Generator().manual_seed(0)
REWARDS = torch.rand(len(LENGTHS), generator=GENERATOR)
VALUES = torch.randn(TOTAL, generator=GENERATOR)
PENALTIES = torch.rand(TOTAL, generator=GENERATOR) * 0.1
TABLE = RewardTable(rewards_N=REWARDS, groups_N=torch.arange(len(LENGTHS)), lengths_N=torch.tensor(LENGTHS))


def defined(penalties: torch.Tensor | None, gamma: float, lam: float) -> list[float]:
    """The sum of discounted errors, eq. 16 of arXiv 1506.02438."""
    found, at = list[float](), 0
    for reward, length in zip(REWARDS.double().tolist(), LENGTHS, strict=True):
        values = [*VALUES[at : at + length].double().tolist(), 0.0]
        paid = [0.0] * length if penalties is None else (-penalties[at : at + length].double()).tolist()
        if length:
            paid[-1] += reward
        errors = [paid[t] + gamma * values[t + 1] - values[t] for t in range(length)]
        found += [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, length)) for t in range(length)]
        at += length
    return found


@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0)])
@pytest.mark.parametrize("penalties", [None, PENALTIES], ids=["plain", "kl-in-reward"])
def test_advantages_are_their_definition(penalties: torch.Tensor | None, gamma: float, lam: float) -> None:
    table = replace(TABLE, penalties_T=penalties)
    got = gae_estimate(table, VALUES, gamma=gamma, lam=lam, whitens=False)
    wanted = torch.tensor(defined(penalties, gamma, lam), dtype=torch.float64)
    torch.testing.assert_close(got.advantages_T, wanted.float())
    torch.testing.assert_close(got.returns_T, (wanted + VALUES.double()).float())
    assert got.advantages_T.dtype == got.returns_T.dtype == torch.float32


def test_without_discounts_it_is_the_reward_less_the_value() -> None:
    got = gae_estimate(TABLE, VALUES, gamma=1.0, lam=1.0, whitens=False)
    rewards = REWARDS.repeat_interleave(TABLE.lengths_N)
    torch.testing.assert_close(got.advantages_T, rewards - VALUES)
    torch.testing.assert_close(got.returns_T, rewards)


def test_whitening_is_over_tokens_that_are_trained_on_and_leaves_returns() -> None:
    masked = torch.tensor([False, False, False, True])
    table = replace(TABLE, is_masked_N=masked)
    plain = gae_estimate(table, VALUES, gamma=0.9, lam=0.9, whitens=False)
    got = gae_estimate(table, VALUES, gamma=0.9, lam=0.9, whitens=True)
    trained = got.advantages_T[: TOTAL - LENGTHS[-1]]
    assert abs(float(trained.mean())) < 1e-6 and abs(float(trained.std()) - 1) < 1e-6
    assert abs(float(got.advantages_T.mean())) > 1e-3, "those of masked samples do not count"
    assert torch.equal(got.returns_T, plain.returns_T)


def test_no_tokens_have_no_advantages() -> None:
    empty = replace(TABLE, lengths_N=torch.zeros(4, dtype=torch.int64))
    got = gae_estimate(empty, VALUES[:0], gamma=1.0, lam=1.0, whitens=True)
    assert got.advantages_T.shape == got.returns_T.shape == (0,)


def test_group_estimators_refuse_its_name() -> None:
    with pytest.raises(AssertionError, match="gae_estimate"):
        advantage.advantages("gae", TABLE)
