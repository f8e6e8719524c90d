"""The run file's section about the loss and the advantages, and the names that it may contain.

The names stand only here: estimators, policy losses, aggregations, KL estimates, corrections.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from yatt.config.sections.operation import rule
from yatt.config.sections.ranges import (
    COUNT_OR_NONE,
    FILE,
    FINITE,
    LINE,
    MOST,
    SHARE,
    Range,
    at_least,
    range_above,
    range_between,
)

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"]
GAE = "gae"
"""The estimator that needs a critic."""

GROUP_BASELINES = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
"""Estimators that compare the completions of one prompt."""

PolicyLoss = Literal["ppo", "gspo", "cispo", "gmpo"]
SEQUENCE_LOSSES = ("gspo", "gmpo")
"""Losses with one ratio per sequence."""

AggregationMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
KlType = Literal["k1", "k2", "k3"]

CorrectionRule = Literal["none", "truncate", "mask"]
CorrectionLevel = Literal["token", "sequence", "geometric"]
"""Ratio of a token: its own; the product of its sequence's ratios; their geometric mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSection:
    """Importance weights for the difference between sampler and trainer: each token's loss is multiplied by
    the ratio of its probabilities, trainer before the update to sampler."""

    rule: CorrectionRule = "truncate"
    """truncate: ratios above `high` become `high` (TIS). mask: ratios outside of [low, high] become 0, and
    these tokens still count in means (IcePop). none: all weights are 1."""

    level: CorrectionLevel = "token"
    """Ratio of each token, product over the sequence, or geometric mean over the sequence."""

    low: Annotated[float, at_least(0)] = 0.0
    """Lower limit, of mask."""

    high: Annotated[float, range_above(0)] = 2.0
    """Upper limit."""

    def __post_init__(self) -> None:
        rule(self.low < self.high, f"low {self.low:g} is not below high {self.high:g}.")
        rule(not self.low or self.rule == "mask", f"low {self.low:g} has no effect with {self.rule}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionSection:
    """Tokens that differ too much between sampler and trainer are removed from the batch: unlike masked ones,
    they do not count in means. Needs a pass for log-probs before the update. Off by default."""

    level: Literal["none", "token", "sequence", "geometric"] = "none"
    """none: only `veto`. token: remove tokens with a ratio outside of [low, high]. sequence, geometric:
    remove the whole sequence by the product, or the geometric mean, of its ratios."""

    low: Annotated[float, at_least(0)] = 0.5
    """Smallest ratio that is kept."""

    high: Annotated[float, range_above(0)] = 2.0
    """Largest ratio that is kept."""

    veto: Annotated[float, range_between(0, 1)] = 0.0
    """Remove the whole sequence if one of its tokens has a ratio below this; 0 is off, 1e-4 is common."""

    def __post_init__(self) -> None:
        rule(self.low < self.high, f"low {self.low:g} is not below high {self.high:g}.")

    @property
    def is_on(self) -> bool:
        """Whether anything can be removed."""
        return self.level != "none" or self.veto > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSection:
    """The loss and the advantages."""

    adv_estimator: Estimator = "grpo"
    """Estimator of advantages: from a group's rewards; of reinforce_plus_plus from the batch's. gae: from the
    values of a critic (PPO, section `critic`), also with rollout.n: 1."""

    policy_loss: PolicyLoss = "ppo"
    """Policy loss. ppo clips the ratio of each token. gspo clips one ratio per sequence: use
    seq-mean-token-mean and clip ratios of about 3e-4. cispo clips the weight, not the gradient. gmpo takes
    the geometric mean of a sequence's ratios: clip ratios bound log-ratios, 0.4 is common."""

    path: Annotated[str, FILE] = ""
    """Python file with an algorithm of your own (docs/extending.md); it replaces adv_estimator and
    policy_loss."""

    factory: Annotated[str, LINE] = "make_algorithm"
    """Name in that file: a function from the algorithm section of the config to the algorithm."""

    clip_ratio_low: Annotated[float, range_between(0, 1)] = 0.2
    """Lower clip range: PPO clips the probability ratio below 1 minus this."""

    clip_ratio_high: Annotated[float, at_least(0)] = 0.2
    """Upper clip range. DAPO's clip-higher: a value above clip_ratio_low."""

    clip_ratio_c: Annotated[float, Range(low=1, high=MOST, low_open=True, also=0, also_means="off")] = 0.0
    """Lower bound of dual clip for negative advantages; 0 is off, 3.0 is common."""

    loss_agg_mode: AggregationMode = "token-mean"
    """Aggregation of token losses to the loss of a mini-batch, as in verl."""

    loss_scale_factor: Annotated[int, COUNT_OR_NONE] = 0
    """Divisor of seq-mean-token-sum-norm; 0 is max_response_tokens (Dr. GRPO's constant)."""

    kl_in: Literal["none", "loss", "reward"] = "none"
    """Where the KL penalty to the reference model is applied."""

    kl_type: KlType = "k3"
    """Estimator of the KL divergence (http://joschu.net/blog/kl-approx.html)."""

    kl_coef: Annotated[float, at_least(0)] = 0.001
    """Coefficient of the KL penalty; with `kl_target`, its first value."""

    kl_target: Annotated[float, at_least(0)] = 0.0
    """Adaptive KL: the coefficient is changed after each iteration so that the mean KL per token comes to
    this; 0: the coefficient is constant."""

    kl_horizon: Annotated[float, range_above(0)] = 10000.0
    """Completions over which the adaptive coefficient reacts; fewer: faster."""

    entropy_coeff: Annotated[float, FINITE] = 0.0
    """Coefficient of the entropy bonus."""

    gamma: Annotated[float, SHARE] = 1.0
    """Discount per sampled token, of reinforce_plus_plus and gae."""

    lam: Annotated[float, range_between(0, 1)] = 1.0
    """gae: lambda. 1: a token's advantage is the reward after it less its value. Below 1: less variance, and
    the critic's bias. One step per sampled token: an environment's tokens are none."""

    whiten: bool = True
    """gae: scale advantages to mean 0 and variance 1 over all tokens that are trained on."""

    correction: CorrectionSection = field(default_factory=CorrectionSection)
    rejection: RejectionSection = field(default_factory=RejectionSection)
    mask_truncated: bool = False
    """Do not train on completions truncated at max_response_tokens; their reward still counts for their
    group."""

    overlong_buffer_tokens: Annotated[int, COUNT_OR_NONE] = 0
    """Length of DAPO's soft overlong punishment: over this many last tokens of max_response_tokens the reward
    falls linearly, by `overlong_penalty_factor` at full length. 0 is off."""

    overlong_penalty_factor: Annotated[float, at_least(0)] = 1.0
    """Penalty of a completion of maximum length."""

    filter_groups: bool = False
    """Dynamic sampling: replace prompt groups whose rewards are all equal."""

    filter_by: Annotated[str, LINE] = ""
    """filter_groups: name of a reward or GenRM; groups whose completions all have the same score of it are
    replaced too. DAPO filters by accuracy: with overlong_buffer_tokens, completions that are all right, or
    all wrong, have different rewards if their lengths differ. If it is empty,
    or a completion has no score of it, only the rewards are compared."""

    max_groups_opened_factor: Annotated[float, at_least(1)] = 10.0
    """Maximum number of opened prompt groups per batch size; then the run stops and reports how many were
    accepted. If the recent acceptance rate needs at most twice as many, up to four times are allowed."""
