"""Corrections against their definitions, sequence by sequence."""

import math

import pytest
import torch

from tests.unit.algo.test_policy_loss import LENGTHS, view_of
from yatt.algo.correction import importance_weights, kept_tokens, probability_differences
from yatt.config.schema import CorrectionSection, RejectionSection

LEVELS = ("token", "sequence", "geometric")
RANGES = {"token": (0.7, 1.4), "sequence": (0.7, 1.4), "geometric": (0.9, 1.1)}


def drawn(seed: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the trainer and of the sampler."""
    generator = torch.Generator().manual_seed(seed)
    old = -2 + torch.randn(sum(LENGTHS), generator=generator)
    return old, old + scale * torch.randn(len(old), generator=generator)


def corrected_view(old: torch.Tensor, sampler: torch.Tensor, lengths=LENGTHS):
    from dataclasses import replace

    return replace(view_of(old, old, torch.ones(len(lengths)), lengths=lengths), sampler_T=sampler)


def ratios(level: str, old: torch.Tensor, sampler: torch.Tensor) -> list[float]:
    """Probability ratios in plain Python, token by token."""
    found: list[float] = []
    for mine, theirs in zip(old.split(LENGTHS), sampler.split(LENGTHS), strict=True):
        each = [math.exp(p) / math.exp(q) for p, q in zip(mine.tolist(), theirs.tolist(), strict=True)]
        whole = math.prod(each)
        if level == "sequence":
            each = [whole] * len(each)
        elif level == "geometric":
            each = [whole ** (1 / len(each))] * len(each)
        found += each
    return found


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seed", range(3))
def test_weights_are_truncated_or_masked_ratios(level: str, seed: int) -> None:
    low, high = RANGES[level]
    old, sampler = drawn(seed, 0.4)
    expected = ratios(level, old, sampler)
    view = corrected_view(old.requires_grad_(), sampler)
    cut = importance_weights(CorrectionSection(rule="truncate", level=level, high=1.1), view)
    assert cut.weights_T.tolist() == pytest.approx([min(r, 1.1) for r in expected], rel=1e-5)
    assert cut.is_limited_T.tolist() == [r >= 1.1 for r in expected]
    masked = importance_weights(CorrectionSection(rule="mask", level=level, low=low, high=high), view)
    inside = [r if low <= r <= high else 0.0 for r in expected]
    assert masked.weights_T.tolist() == pytest.approx(inside, rel=1e-5)
    assert 0 < sum(masked.is_limited_T.tolist()) < len(expected)
    assert not cut.weights_T.requires_grad and not masked.weights_T.requires_grad


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("seed", range(3))
def test_rejected_are_the_tokens_or_sequences_outside(level: str, seed: int) -> None:
    low, high = RANGES[level]
    old, sampler = drawn(seed, 0.4)
    kept = kept_tokens(RejectionSection(level=level, low=low, high=high), corrected_view(old, sampler))
    assert kept.tolist() == [low <= r <= high for r in ratios(level, old, sampler)]
    assert 0 < sum(kept.tolist()) < len(kept)


def test_a_veto_removes_the_sequences_that_have_a_far_token() -> None:
    old, sampler = drawn(1, 0.01)
    old[5], old[16] = sampler[5] - 10, sampler[16] - 9  # second sequence, fifth sequence
    kept = kept_tokens(RejectionSection(veto=1e-4), corrected_view(old, sampler))
    gone = kept_tokens(RejectionSection(veto=1e-3), corrected_view(old, sampler))
    second = set(range(5, 7))
    fifth = set(range(15, 18))
    assert {i for i, is_kept in enumerate(kept.tolist()) if not is_kept} == second
    assert {i for i, is_kept in enumerate(gone.tolist()) if not is_kept} == second | fifth


def test_without_a_rule_all_weights_are_one_and_extremes_stay_finite() -> None:
    old, sampler = torch.tensor([-200.0, -0.1]), torch.tensor([-0.1, -200.0])
    for level in LEVELS:
        view = corrected_view(old, sampler, lengths=[2, 0])
        assert importance_weights(CorrectionSection(rule="none"), view).weights_T.tolist() == [1.0, 1.0]
        for rule in ("truncate", "mask"):
            weights = importance_weights(CorrectionSection(rule=rule, level=level), view).weights_T
            assert torch.isfinite(weights).all()


def test_differences_are_of_probabilities() -> None:
    old, sampler = torch.tensor([0.5, 0.9, 0.1]).log(), torch.tensor([0.5, 0.1, 0.2]).log()
    assert probability_differences(old, sampler).tolist() == pytest.approx([0.0, 0.8, 0.1])
