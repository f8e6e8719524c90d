"""The seam for algorithms: what one needs, its advantages, its loss.

An algorithm decides nothing about layouts: it gets the table of rewards, which every rank has, and the tokens
of a micro-batch (`LossView`). How token losses add up to the loss of a mini-batch is the config's
`algorithm.loss_agg_mode`. KL and entropy terms and corrections are added by the trainer.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from yatt.algo.advantage import RewardTable, advantages
from yatt.algo.loss import ClipRange, TokenLosses, loss_of
from yatt.algo.view import LossView
from yatt.config.sections.algorithm import GROUP_BASELINES, AlgorithmSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What an algorithm needs beside rewards.

    Args:
        old_logprobs: log-probs before the first update, also where a batch is trained on once.
        reference: log-probs under the reference model (`LossView.reference_T`), also without a KL term.
        group_baseline: several completions per prompt.
    """

    old_logprobs: bool = False
    reference: bool = False
    group_baseline: bool = False


class Algorithm(Protocol):
    """An algorithm. One object serves a whole run; it keeps no state between iterations."""

    @property
    def needs(self) -> Needs:
        """What the trainer has to prepare."""
        ...

    def advantages(self, table: RewardTable) -> Tensor:
        """Advantages of all completion tokens, float32 [T], in the order of the table."""
        ...

    def loss(self, view: LossView) -> TokenLosses:
        """The loss of each token. Called by all ranks that share the micro-batch, in the same order."""
        ...


class ConfiguredAlgorithm:
    """The estimator and the policy loss that the config names."""

    def __init__(self, section: AlgorithmSection) -> None:
        self._section, self._loss = section, loss_of(section.policy_loss)
        self._clip = ClipRange(
            low=section.clip_ratio_low, high=section.clip_ratio_high, dual=section.clip_ratio_c
        )

    @property
    def needs(self) -> Needs:
        """Several completions per prompt for a group estimator. Where a batch is trained on once, the policy
        is its own old policy."""
        return Needs(group_baseline=self._section.adv_estimator in GROUP_BASELINES)

    def advantages(self, table: RewardTable) -> Tensor:
        """See `yatt.algo.advantage.advantages`."""
        return advantages(self._section.adv_estimator, table, self._section.gamma)

    def loss(self, view: LossView) -> TokenLosses:
        """See `yatt.algo.loss`."""
        return self._loss(view, self._clip)
