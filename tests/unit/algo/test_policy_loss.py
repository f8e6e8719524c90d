"""GSPO, CISPO and GMPO against their papers' objectives, sequence by sequence: losses and gradients."""

import pytest
import torch

from yatt.algo.loss import BatchTotals, ClipRange, cispo, gmpo, gspo, token_weights
from yatt.algo.view import LossView

LENGTHS = [5, 2, 7, 1, 3, 4]
CLIP = ClipRange(low=0.2, high=0.28)
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def drawn(seed: int, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs, old log-probs, and one advantage a sample."""
    generator = torch.Generator().manual_seed(seed)
    num = sum(LENGTHS)
    logprobs = -2 + torch.randn(num, generator=generator)
    old = logprobs + scale * torch.randn(num, generator=generator)
    return logprobs, old, torch.randn(len(LENGTHS), generator=generator)


def view_of(logprobs, old, advantages, lengths=LENGTHS) -> LossView:
    lengths_S = torch.tensor(lengths)
    samples_T = torch.arange(len(lengths)).repeat_interleave(lengths_S)
    return LossView(
        logprobs_T=logprobs, old_T=old, sampler_T=old, advantages_T=advantages.repeat_interleave(lengths_S),
        samples_T=samples_T, lengths_S=lengths_S,
    )  # fmt: skip


def gradient(loss, logprobs):
    (found,) = torch.autograd.grad(loss, logprobs)
    return found


def gspo_paper(logprobs, old, advantages):
    """Eq. 5: the mean over sequences of min(s A, clip(s) A), s = (p(y) / p_old(y)) ** (1 / |y|)."""
    terms = []
    for log_p, log_old, gain in zip(logprobs.split(LENGTHS), old.split(LENGTHS), advantages, strict=True):
        s = ((log_p.sum() - log_old.sum()) / len(log_p)).exp()
        terms.append(torch.minimum(s * gain, s.clamp(1 - CLIP.low, 1 + CLIP.high) * gain))
    return -torch.stack(terms).mean()


def cispo_paper(logprobs, old, advantages):
    """Eq. 4: the mean over all tokens of sg(clip(r)) A log p."""
    terms = []
    for log_p, log_old, gain in zip(logprobs.split(LENGTHS), old.split(LENGTHS), advantages, strict=True):
        weight = (log_p - log_old).exp().clamp(1 - CLIP.low, 1 + CLIP.high).detach()
        terms.append(weight * gain * log_p)
    return -torch.cat(terms).mean()


def gmpo_paper(logprobs, old, advantages):
    """Eq. 4: mean over sequences of (prod_t |min(r A, clip(r, e^-low, e^high) A)|) ** (1 / |y|) sgn(A)."""
    terms = []
    bounds = torch.tensor(-CLIP.low).exp(), torch.tensor(CLIP.high).exp()
    for log_p, log_old, gain in zip(logprobs.split(LENGTHS), old.split(LENGTHS), advantages, strict=True):
        ratio = (log_p - log_old).exp()
        worst = torch.minimum(ratio * gain, ratio.clamp(*bounds) * gain).abs()
        terms.append(worst.log().mean().exp() * gain.sign())
    return -torch.stack(terms).mean()


CASES = {
    "gspo": (gspo, gspo_paper, "seq-mean-token-mean", 0.9),
    "cispo": (cispo, cispo_paper, "token-mean", 0.5),
    "gmpo": (gmpo, gmpo_paper, "seq-mean-token-mean", 0.5),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_are_those_of_the_paper(name: str, seed: int) -> None:
    loss, paper, mode, scale = CASES[name]
    logprobs, old, advantages = drawn(seed, scale)
    totals = BatchTotals(num_tokens=sum(LENGTHS), num_samples=len(LENGTHS))
    weights = token_weights(mode, torch.tensor(LENGTHS), totals, 8)
    mine = logprobs.clone().requires_grad_()
    found = loss(view_of(mine, old, advantages), CLIP)
    total = (found.losses_T * weights).sum()
    theirs = logprobs.clone().requires_grad_()
    expected = paper(theirs, old, advantages)
    torch.testing.assert_close(total, expected, **TOLERANCE)
    torch.testing.assert_close(gradient(total, mine), gradient(expected, theirs), **TOLERANCE)
    assert found.is_clipped_T.any(), "the case has clipped tokens"


@pytest.mark.parametrize("name", CASES)
def test_a_sample_without_tokens_and_extreme_ratios_give_finite_numbers(name: str) -> None:
    loss = CASES[name][0]
    logprobs = torch.tensor([-90.0, -0.01], requires_grad=True)
    view = view_of(logprobs, torch.tensor([-0.01, -90.0]), torch.tensor([1.0, 2.0]), lengths=[2, 0])
    total = loss(view, CLIP).losses_T.sum()
    assert torch.isfinite(total) and torch.isfinite(gradient(total, logprobs)).all()
