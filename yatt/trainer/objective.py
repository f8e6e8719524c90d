"""The loss of one micro-batch, and the sums for an iteration's metrics.

Suffix: T completion tokens of the micro-batch on this rank.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from yatt.algo.algorithm import Algorithm
from yatt.algo.correction import probability_differences, truncated_importance_weights
from yatt.algo.kl import kl_estimate
from yatt.algo.view import LossView
from yatt.config.schema import AlgorithmSection
from yatt.trainer.batches import MicroBatch
from yatt.trainer.context_parallel import sum_over_context_parallel
from yatt.trainer.passes import HeadInput, Reader, counts_tokens

SUMS = (
    "pg_loss",
    "pg_clipfrac",
    "pg_clipfrac_lower",
    "ppo_kl",
    "entropy",
    "kl_loss",
    "diff",
    "diff_squared",
    "tis_weight",
    "tis_weight_squared",
    "tis_truncated",
    "tokens",
)


@dataclass(frozen=True, slots=True)
class Target:
    """Advantages and log-probs for the loss of a micro-batch, float32 [T] each.

    `old_T` None means the current policy; `reference_T` None means no KL term in the loss.
    """

    advantages_T: Tensor
    old_T: Tensor | None
    reference_T: Tensor | None


@dataclass(frozen=True, slots=True)
class Measured:
    """Sums over the tokens of micro-batches, named by SUMS, float64 [12]; and the largest difference."""

    sums: Tensor
    largest_diff: Tensor


class Objective:
    """The loss function that the run file configures.

    Args:
        reader: computes log-probs from hidden states.
        targets: one for each micro-batch of the mini-batch.
    """

    def __init__(
        self, section: AlgorithmSection, algorithm: Algorithm, reader: Reader, targets: list[Target]
    ) -> None:
        self._section, self._algorithm = section, algorithm
        self._reader, self._targets = reader, targets

    def __call__(self, index: int, micro: MicroBatch, given: HeadInput) -> tuple[Tensor, Tensor, Measured]:
        """Loss summed over tokens, number of tokens (int32), and measurements, for the schedule."""
        target, section = self._targets[index], self._section
        logprobs_T, entropy_T = self._reader(micro, given)
        old_T = logprobs_T.detach() if target.old_T is None else target.old_T
        view = LossView(
            logprobs_T=logprobs_T, old_T=old_T, advantages_T=target.advantages_T,
            samples_T=micro.samples_T, lengths_S=micro.lengths_N, sum_over_ranks=sum_over_context_parallel,
        )  # fmt: skip
        policy = self._algorithm.loss(view)
        losses_T = policy.losses_T
        tis_T = torch.ones_like(losses_T)
        if section.tis_clip:
            tis_T = truncated_importance_weights(old_T, micro.sampler_T, section.tis_clip)
            losses_T = losses_T * tis_T
        pg_loss = (losses_T * micro.weights_T).sum()
        loss = pg_loss
        if section.entropy_coeff:
            loss = loss - section.entropy_coeff * (entropy_T * micro.weights_T).sum()
        kl_T = torch.zeros_like(entropy_T)
        if target.reference_T is not None:
            kl_T = kl_estimate(section.kl_type, logprobs_T, target.reference_T)
            loss = loss + section.kl_coef * (kl_T * micro.weights_T).sum()
        diff_T = probability_differences(old_T, micro.sampler_T)
        parts = [
            pg_loss,
            policy.is_clipped_T,
            policy.is_dual_clipped_T,
            policy.approx_kl_T,
            entropy_T,
            kl_T,
            diff_T,
            diff_T.double().square(),
            tis_T,
            tis_T.double().square(),
            tis_T >= section.tis_clip if section.tis_clip else torch.zeros_like(tis_T),
            torch.ones_like(diff_T),
        ]
        sums = torch.stack([part.detach().double().sum() for part in parts])
        largest = torch.cat([diff_T, diff_T.new_zeros(1)]).max().double()
        return loss, sums[-1].to(torch.int32), Measured(sums, largest)


def totals(measured: list[Measured], device: torch.device) -> dict[str, float]:
    """Sums over all micro-batches of all ranks by name, and 'largest_diff'; the same on every rank."""
    sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
    largest = torch.zeros((), dtype=torch.float64, device=device)
    if measured and counts_tokens():
        sums = torch.stack([one.sums for one in measured]).sum(0)
        largest = torch.stack([one.largest_diff for one in measured]).max()
    dist.all_reduce(sums)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return {**dict(zip(SUMS, sums.tolist(), strict=True)), "largest_diff": float(largest)}
