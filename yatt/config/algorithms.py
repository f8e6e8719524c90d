"""The names of estimators, losses, aggregations and KL estimates, for the config and for the mathematics."""

from typing import Literal

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
GROUP_BASELINES = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
"""Estimators that compare the completions of one prompt."""

PolicyLoss = Literal["ppo", "gspo", "cispo", "gmpo"]
SEQUENCE_LOSSES = ("gspo", "gmpo")
"""Losses with one ratio per sequence."""

AggregationMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
KlType = Literal["k1", "k2", "k3"]
