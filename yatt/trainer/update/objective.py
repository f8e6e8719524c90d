"""The loss of one micro-batch, and the sums for an iteration's metrics.

Suffix: T completion tokens of the micro-batch on this rank.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from yatt.algo.algorithm import Algorithm
from yatt.algo.correction import ImportanceWeights, importance_weights, probability_differences
from yatt.algo.kl import LikeliestKl, adapted_coefficient, kl_estimate
from yatt.algo.view import LossView
from yatt.config.schema import AlgorithmSection
from yatt.trainer.attention.batches import MicroBatch
from yatt.trainer.attention.context_parallel import sum_over_context_parallel
from yatt.trainer.forward.passes import HeadInput, Reader, counts_tokens

SUMS = (
    "pg_loss",
    "pg_clipfrac",
    "pg_clipfrac_lower",
    "ppo_kl",
    "entropy",
    "kl_loss",
    "is_weight",
    "is_weight_squared",
    "is_limited",
    "kept",
    "diff",
    "diff_squared",
    "tokens",
)
TAUGHT_SUMS = ("distill_kl", "mass_top_k", "taught")


@dataclass(slots=True)
class KlCoefficient:
    """The present coefficient of the KL penalty; part of the training state if it is adaptive."""

    value: float

    def adapt(self, section: AlgorithmSection, kl: float, num_samples: int) -> None:
        """Changes it after an iteration with this mean KL per token, if the run file has a target."""
        if section.kl_target:
            self.value = adapted_coefficient(
                self.value,
                kl=kl,
                target=section.kl_target,
                num_samples=num_samples,
                horizon=section.kl_horizon,
            )


@dataclass(frozen=True, slots=True)
class Kept:
    """The tokens of a micro-batch that are left after a rejection.

    Args:
        index_K: their indices among the micro-batch's tokens on this rank, int64.
        weights_K: their weights in the mini-batch's loss, float32.
        lengths_S: number of kept tokens of each sample on all ranks, int64.
    """

    index_K: Tensor
    weights_K: Tensor
    lengths_S: Tensor


@dataclass(frozen=True, slots=True)
class Target:
    """Advantages and log-probs for the loss of a micro-batch, float32 [T] each.

    `old_T` None means the current policy; `reference_T` None means that there is no reference. `kept` None
    means all tokens.
    """

    advantages_T: Tensor
    old_T: Tensor | None
    reference_T: Tensor | None
    kept: Kept | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """Sums over the tokens of micro-batches, named by SUMS, float64 [13]; and the largest difference. Those
    from `pg_loss` to `kept` are of the tokens that are trained on: neither rejected nor of masked samples.
    `taught_sums`: named by TAUGHT_SUMS, of those of them that a teacher has taught, float64 [3]."""

    sums: Tensor
    largest_diff: Tensor
    taught_sums: Tensor | None = None


def kept_view(micro: MicroBatch, target: Target, logprobs_T: Tensor) -> LossView:
    """The micro-batch's tokens without those that were rejected."""
    kept = target.kept

    def chosen(values_T: Tensor) -> Tensor:
        return values_T if kept is None else values_T[kept.index_K]

    old_T = logprobs_T.detach() if target.old_T is None else target.old_T
    return LossView(
        logprobs_T=chosen(logprobs_T),
        old_T=chosen(old_T),
        sampler_T=chosen(micro.sampler_T),
        advantages_T=chosen(target.advantages_T),
        samples_T=chosen(micro.samples_T),
        lengths_S=micro.lengths_N if kept is None else kept.lengths_S,
        reference_T=None if target.reference_T is None else chosen(target.reference_T),
        sum_over_ranks=sum_over_context_parallel,
    )


class Objective:
    """The loss function that the run file configures.

    Args:
        kl_coef: present coefficient of the KL term.
        reader: computes log-probs from hidden states.
        targets: one for each micro-batch of the mini-batch.
    """

    def __init__(
        self,
        section: AlgorithmSection,
        algorithm: Algorithm,
        kl_coef: float,
        reader: Reader,
        targets: list[Target],
    ) -> None:
        self._section, self._algorithm, self._kl_coef = section, algorithm, kl_coef
        self._reader, self._targets = reader, targets

    def __call__(self, index: int, micro: MicroBatch, given: HeadInput) -> tuple[Tensor, Tensor, Measured]:
        """Loss summed over tokens, number of tokens (int32), and measurements, for the schedule."""
        target, section = self._targets[index], self._section
        taught, distilled = micro.sampled.taught, None
        if taught is None:
            logprobs_T, entropy_T = self._reader(micro, given)
        else:
            logprobs_T, entropy_T, distilled = self._reader.taught(micro, given, taught)
        view = kept_view(micro, target, logprobs_T)
        weights_T, is_trained_T = micro.weights_T, micro.is_trained_T
        if target.kept is not None:
            index_K, weights_T = target.kept.index_K, target.kept.weights_K
            entropy_T, is_trained_T = entropy_T[index_K], is_trained_T[index_K]
        policy = self._algorithm.loss(view)
        losses_T = policy.losses_T
        corrected = self._corrected(micro, target, logprobs_T)
        if section.correction.rule != "none":
            losses_T = losses_T * corrected.weights_T
        pg_loss = (losses_T * weights_T).sum()
        loss = pg_loss
        if section.entropy_coeff:
            loss = loss - section.entropy_coeff * (entropy_T * weights_T).sum()
        kl_T = torch.zeros_like(entropy_T)
        if section.kl_in == "loss":
            assert view.reference_T is not None, "a KL term has a reference"
            kl_T = kl_estimate(section.kl_type, view.logprobs_T, view.reference_T)
            loss = loss + self._kl_coef * (kl_T * weights_T).sum()
        taught_sums = None
        if taught is not None and distilled is not None:
            distill_loss, taught_sums = _distill_loss(taught.coefs_T, distilled, target.kept, weights_T)
            loss = loss + distill_loss
        old_T = logprobs_T if target.old_T is None else target.old_T
        diff_T = probability_differences(old_T, micro.sampler_T)
        of_trained = [
            policy.is_clipped_T,
            policy.is_dual_clipped_T,
            policy.approx_kl_T,
            entropy_T,
            kl_T,
            corrected.weights_T,
            corrected.weights_T.double().square(),
            corrected.is_limited_T,
            torch.ones_like(entropy_T),
        ]
        measured = replace(_measured(pg_loss, of_trained, is_trained_T, diff_T), taught_sums=taught_sums)
        return loss, measured.sums[-1].to(torch.int32), measured

    def _corrected(self, micro: MicroBatch, target: Target, logprobs_T: Tensor) -> ImportanceWeights:
        """The importance weights of the tokens that are left after a rejection. The ratio of a sequence is of
        all its tokens: how likely the sampler was to write it does not depend on what is trained on."""
        whole = importance_weights(
            self._section.correction, kept_view(micro, replace(target, kept=None), logprobs_T)
        )
        if target.kept is None:
            return whole
        index_K = target.kept.index_K
        return ImportanceWeights(whole.weights_T[index_K], whole.is_limited_T[index_K])


def _measured(pg_loss: Tensor, of_trained: list[Tensor], is_trained_T: Tensor, diff_T: Tensor) -> Measured:
    """The sums in the order of SUMS.

    Args:
        of_trained: values of the tokens that are left after a rejection, of which those of masked samples do
            not count.
        diff_T: of all tokens.
    """
    parts = [
        pg_loss,
        *(part.detach() * is_trained_T for part in of_trained),
        diff_T,
        diff_T.double().square(),
        torch.ones_like(diff_T),
    ]
    sums = torch.stack([part.detach().double().sum() for part in parts])
    return Measured(sums, torch.cat([diff_T, diff_T.new_zeros(1)]).max().double())


def _distill_loss(
    coefs_T: Tensor, distilled: LikeliestKl, kept: Kept | None, weights_T: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss of the tokens that a teacher has taught, and their sums for metrics.

    Args:
        kept: the tokens that are left after a rejection.
        weights_T: of the tokens that are left; 0 of masked samples.
    """
    coefs_T, kl_T, mass_T = coefs_T.to(weights_T.device), distilled.kl_T, distilled.mass_T
    if kept is not None:
        coefs_T, kl_T, mass_T = coefs_T[kept.index_K], kl_T[kept.index_K], mass_T[kept.index_K]
    is_taught_T = (coefs_T > 0) & (weights_T > 0)
    parts = [kl_T.detach() * is_taught_T, mass_T * is_taught_T, is_taught_T]
    return (coefs_T * kl_T * weights_T).sum(), torch.stack([part.double().sum() for part in parts])


def summed_totals(
    measured: list[Measured], device: torch.device, *, has_teacher: bool = False
) -> dict[str, float]:
    """Sums over all micro-batches of all ranks by name, and 'largest_diff'; the same on every rank.

    Args:
        has_teacher: those named by TAUGHT_SUMS too.
    """
    sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
    largest = torch.zeros((), dtype=torch.float64, device=device)
    if measured and counts_tokens():
        sums = torch.stack([one.sums for one in measured]).sum(0)
        largest = torch.stack([one.largest_diff for one in measured]).max()
    dist.all_reduce(sums)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    totals = {**dict(zip(SUMS, sums.tolist(), strict=True)), "largest_diff": float(largest)}
    return totals | _taught_totals(measured, device) if has_teacher else totals


def _taught_totals(measured: list[Measured], device: torch.device) -> dict[str, float]:
    sums = torch.zeros(len(TAUGHT_SUMS), dtype=torch.float64, device=device)
    for one in measured if counts_tokens() else ():
        if one.taught_sums is not None:
            sums += one.taught_sums
    dist.all_reduce(sums)
    return dict(zip(TAUGHT_SUMS, sums.tolist(), strict=True))
