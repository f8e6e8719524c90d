"""The completion tokens of one micro-batch on this rank, as a loss needs them.

Under context parallelism the tokens of one sample lie on several ranks. `sample_sums` adds over all of them,
forwards and backwards, so that a loss over whole sequences is the same in every layout.

Suffixes: T completion tokens of the micro-batch on this rank, S samples of the micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SumOverRanks = Callable[[Tensor], Tensor]


def sum_of_one_rank(values_S: Tensor) -> Tensor:
    """The sum over ranks where no sample is cut."""
    return values_S


@dataclass(frozen=True, slots=True, kw_only=True)
class LossView:
    """What a policy loss is made of.

    Args:
        logprobs_T: log-probs under the policy, float32, differentiable.
        old_T: log-probs before the first update of this batch, float32.
        sampler_T: log-probs of the engine that sampled the tokens, float32.
        advantages_T: float32.
        samples_T: the sample of each token, int64, from 0 on; the same numbers on every rank.
        lengths_S: completion tokens of each sample on all ranks, int64. Rejected tokens are in none of these.
        reference_T: log-probs under the reference model, float32; None if there is none.
        sum_over_ranks: adds a tensor [S] over the ranks that hold parts of the same samples. Its gradient is
            the sum of theirs.
    """

    logprobs_T: Tensor
    old_T: Tensor
    sampler_T: Tensor
    advantages_T: Tensor
    samples_T: Tensor
    lengths_S: Tensor
    reference_T: Tensor | None = None
    sum_over_ranks: SumOverRanks = sum_of_one_rank

    def sample_sums(self, values_T: Tensor) -> Tensor:
        """Sum of the values of each sample's tokens, [S]. Collective over the ranks that share samples."""
        zeros_S = values_T.new_zeros(len(self.lengths_S))
        return self.sum_over_ranks(torch.index_add(zeros_S, 0, self.samples_T, values_T))

    def sample_means(self, values_T: Tensor) -> Tensor:
        """Mean of the values of each sample's tokens, [S]; 0 for a sample without tokens. Collective."""
        return self.sample_sums(values_T) / self.lengths_S.clamp(min=1)

    def of_tokens(self, values_S: Tensor) -> Tensor:
        """The value of each token's sample, [T]."""
        return values_S[self.samples_T]
