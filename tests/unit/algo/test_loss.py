"""The policy loss against its formula written out for one token, and aggregation against whole matrices."""

import math

import pytest
import torch

from yatt.algo.kl import adapted_coefficient, kl_estimate
from yatt.algo.loss import BatchTotals, ClipRange, policy_losses, token_weights

LENGTHS = [5, 2, 7, 1, 3, 4]
NORM_LENGTH = 8


def random_tokens(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(LENGTHS), generator=generator) * scale


def one_token_loss(logprob, old, advantage, clip):
    ratio = math.exp(logprob - old)
    surrogate = min(ratio * advantage, min(max(ratio, 1 - clip.low), 1 + clip.high) * advantage)
    if clip.dual and advantage < 0:
        surrogate = max(surrogate, clip.dual * advantage)
    return -surrogate


@pytest.mark.parametrize("clip", [ClipRange(low=0.2, high=0.28), ClipRange(low=0.2, high=0.2, dual=3.0)])
def test_each_token_has_the_clipped_loss_of_the_paper(clip):
    logprobs, old, gains = random_tokens(0), random_tokens(1), random_tokens(2)
    got = policy_losses(logprobs, old, gains, clip)
    expected = [one_token_loss(*row, clip) for row in torch.stack([logprobs, old, gains], 1).tolist()]
    torch.testing.assert_close(got.losses_T, torch.tensor(expected), atol=1e-6, rtol=1e-5)
    assert got.is_clipped_T.any()
    assert bool(clip.dual) == bool(got.is_dual_clipped_T.any())


def reference_aggregate(mode, losses, lengths):
    rows = torch.tensor(losses).split(lengths)
    if mode == "token-mean":
        return torch.cat(rows).mean()
    if mode == "seq-mean-token-sum":
        return torch.stack([row.sum() for row in rows]).mean()
    if mode == "seq-mean-token-mean":
        return torch.stack([row.mean() for row in rows]).mean()
    return torch.stack([row.sum() / NORM_LENGTH for row in rows]).mean()


@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
@pytest.mark.parametrize("cut", [[6], [1, 1, 1, 1, 1, 1], [2, 4], [3, 0, 3]])
def test_any_cut_into_micro_batches_adds_up_to_the_whole_mini_batch(mode, cut):
    losses = random_tokens(3)
    totals = BatchTotals(num_tokens=sum(LENGTHS), num_samples=len(LENGTHS))
    parts = torch.tensor(LENGTHS).split(cut)
    rows = losses.split([int(part.sum()) for part in parts])
    total = sum(
        (row * token_weights(mode, part, totals, NORM_LENGTH)).sum()
        for row, part in zip(rows, parts, strict=True)
    )
    torch.testing.assert_close(
        total, reference_aggregate(mode, losses.tolist(), LENGTHS), atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimates_are_schulmans(kind):
    logprobs, reference = random_tokens(4), random_tokens(5)
    estimates = kl_estimate(kind, logprobs, reference)
    for got, p, q in torch.stack([estimates, logprobs, reference], 1).tolist():
        r = math.exp(q - p)
        expected = {"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "k3": min((r - 1) - math.log(r), 10.0)}[
            kind
        ]
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_k1_and_k3_average_to_the_true_kl():
    p = torch.tensor([0.5, 0.3, 0.2]).log()
    q = torch.tensor([0.2, 0.3, 0.5]).log()
    true = (p.exp() * (p - q)).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((p.exp() * kl_estimate(kind, p, q)).sum(), true)


def test_k3_is_limited_as_in_verl():
    logprobs = torch.tensor([-0.1, -2.0, -8.0], requires_grad=True)
    reference = torch.tensor([-30.0, -0.01, -0.5])
    log_ratio = (reference - logprobs.detach()).clamp(-20, 20)
    verls = (log_ratio.exp() - log_ratio - 1).clamp(-10, 10)
    estimate = kl_estimate("k3", logprobs, reference)
    torch.testing.assert_close(estimate, verls)
    (gradient,) = torch.autograd.grad(estimate.sum(), logprobs)
    assert gradient[0] == 0 and gradient[2] == 0, "limited"
    assert gradient[1] == pytest.approx(1 - math.exp(1.99), rel=1e-5)


def ziegler(values, target, horizon, batch):
    """arXiv 1909.08593, 2.2, iterated: the coefficient after each KL."""
    beta, seen = 0.1, []
    for kl in values:
        error = max(-0.2, min(0.2, (kl - target) / target))
        beta *= 1 + (batch / horizon) * error
        seen.append(beta)
    return seen


def test_the_adaptive_coefficient_is_zieglers():
    values, coefficient, seen = [0.0, 0.02, 0.05, 0.051, 0.06, 1.0], 0.1, []
    for kl in values:
        coefficient = adapted_coefficient(coefficient, kl=kl, target=0.05, num_samples=64, horizon=500.0)
        seen.append(coefficient)
    assert seen == pytest.approx(ziegler(values, 0.05, 500.0, 64), rel=1e-12)
    assert seen[0] < 0.1 < seen[-1] / seen[-2] * 0.1, "it falls below the target and rises above it"
