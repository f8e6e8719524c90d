"""The figures that a simulation needs beside the run file: lengths, speeds of engines, seconds of the rest.

They are measured in a run or given by the user. None of them has a default that would hide that it is
missing, except the share of groups that are kept.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

from yatt.config.check import num_trainer_nodes
from yatt.config.schema import RunConfig
from yatt.core.gpus.engine_model import EngineSpeed
from yatt.core.gpus.placement import ROLLOUT, genrm_role

NUM_QUANTILES = 1001
OUTERMOST = 0.5 / NUM_QUANTILES
"""Probability beyond the first and the last quantile of a log-normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Figures of a run; what is unknown is empty or None.

    Attributes:
        lengths: quantiles of the tokens of the policy per completion, from 0% to 100% at even distances.
        verdicts: mean tokens of verdicts per completion, by role of the GenRM.
        questions: mean number of questions per completion, by role of the GenRM.
        speeds: of one engine, by role.
        switch_s: seconds in which a slab changes its role.
        train_gpu_s: GPU seconds from a batch that is complete to the weights of the next policy version, per
            completion of the batch.
        kept: share of the groups that are not dropped.
    """

    lengths: Sequence[float] = ()
    verdicts: Mapping[str, float] = field(default_factory=dict)
    questions: Mapping[str, float] = field(default_factory=dict)
    speeds: Mapping[str, EngineSpeed] = field(default_factory=dict)
    switch_s: float | None = None
    train_gpu_s: float | None = None
    kept: float | None = None

    def over(self, measured: "RunFigures") -> "RunFigures":
        """Returns these figures, completed by measured ones."""
        return RunFigures(
            lengths=self.lengths or measured.lengths,
            verdicts={**measured.verdicts, **self.verdicts},
            questions={**measured.questions, **self.questions},
            speeds={**measured.speeds, **self.speeds},
            switch_s=measured.switch_s if self.switch_s is None else self.switch_s,
            train_gpu_s=measured.train_gpu_s if self.train_gpu_s is None else self.train_gpu_s,
            kept=measured.kept if self.kept is None else self.kept,
        )


def missing_figures(figures: RunFigures, config: RunConfig) -> list[str]:
    """Returns what must be given before this config can be simulated, one sentence for each figure."""
    judges = [genrm.name for genrm in config.engine_genrms]
    faults = []
    if not figures.lengths:
        faults.append("lengths of completions: write --lengths MEAN,SIGMA, for example --lengths 1500,0.8")
    faults += [
        f"speed of {role} engines: write --speed {role}=STEP_S,SEQUENCE_S, the seconds of an engine step and "
        "those for each running sequence"
        for role in (ROLLOUT, *map(genrm_role, judges))
        if role not in figures.speeds
    ]
    faults += [
        f"tokens of verdicts of {name}: write --verdict-tokens {name}=MEAN, per completion"
        for name in judges
        if genrm_role(name) not in figures.verdicts
    ]
    if figures.switch_s is None:
        faults.append("seconds in which a GPU set changes its role: write --switch-s S")
    if figures.train_gpu_s is None:
        faults.append("seconds of training: write --train-s S, with saves and weight updates")
    return faults


def train_gpu_s(train_s: float, config: RunConfig) -> float:
    """Returns GPU seconds of training per completion, from the seconds of an iteration of this config."""
    num_gpus = num_trainer_nodes(config) * config.launch.gpus_per_node
    return train_s * num_gpus / (config.trainer.train_batch_size * config.rollout.n)


def log_normal(mean: float, sigma: float, most: float) -> tuple[float, ...]:
    """Returns quantiles of log-normal lengths.

    Args:
        mean: tokens, before lengths are cut.
        sigma: standard deviation of the logarithm.
        most: longer completions are cut to this number of tokens.
    """
    normal = NormalDist(math.log(mean) - sigma**2 / 2, sigma or 1e-9)
    shares = (OUTERMOST + i * (1 - 2 * OUTERMOST) / (NUM_QUANTILES - 1) for i in range(NUM_QUANTILES))
    return tuple(max(min(_exp(normal.inv_cdf(share)), most), 1.0) for share in shares)


def drawn_length(quantiles: Sequence[float], numbers: random.Random) -> float:
    """Draws a length from a distribution given by its quantiles."""
    return _length_at(quantiles, numbers.random())


def even_lengths(quantiles: Sequence[float], num: int) -> list[float]:
    """Returns `num` lengths of a distribution given by its quantiles, from the shortest to the longest."""
    return [_length_at(quantiles, i / (num - 1)) for i in range(num)]


def _length_at(quantiles: Sequence[float], share: float) -> float:
    place = share * (len(quantiles) - 1)
    low = int(place)
    high = min(low + 1, len(quantiles) - 1)
    return max(quantiles[low] + (place - low) * (quantiles[high] - quantiles[low]), 1.0)


def mean_length(quantiles: Sequence[float]) -> float:
    """Returns the mean of a distribution given by its quantiles."""
    inner = sum(quantiles) - (quantiles[0] + quantiles[-1]) / 2
    return inner / (len(quantiles) - 1) if len(quantiles) > 1 else quantiles[0]


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))
