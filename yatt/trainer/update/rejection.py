"""Removes tokens that differ too much between sampler and trainer, before the first update of a batch.

Denominators of means then depend on log-probs. They are counted once per mini-batch over all ranks, so the
result does not depend on the layout.

Suffixes: T completion tokens of a micro-batch on this rank, K those that are kept, S its samples.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from yatt.algo.correction import kept_tokens
from yatt.algo.view import LossView
from yatt.config.sections.algorithm import AggregationMode, AlgorithmSection
from yatt.trainer.attention.batches import MicroBatch
from yatt.trainer.forward.passes import counts_tokens
from yatt.trainer.update.objective import Kept, Target, kept_view

COUNTS = (
    "tokens",
    "kept_tokens",
    "trained_tokens",
    "kept_trained_tokens",
    "samples",
    "kept_samples",
    "cut_samples",
)
"""Per mini-batch: tokens; those of samples that are trained on (not masked); samples, those with any token
left or none from the start, those with any token removed."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Which tokens of a micro-batch are kept, bool [T], and how many of each sample on all ranks, [S]."""

    view: LossView
    kept_T: Tensor
    kept_S: Tensor


def rejected_targets(
    section: AlgorithmSection, steps: list[list[MicroBatch]], targets: list[list[Target]]
) -> tuple[list[list[Target]], dict[str, float]]:
    """Targets without the rejected tokens, and metrics. Collective over all ranks.

    Args:
        targets: with log-probs from before the update; without any on pipeline stages that have none.
    """
    found: list[list[_Verdict]] = []
    if all(target.old_T is not None for step in targets for target in step):
        found = [
            [_judged(section, *pair) for pair in zip(*step, strict=True)]
            for step in zip(steps, targets, strict=True)
        ]
    device = steps[0][0].weights_T.device
    counts = torch.zeros(len(steps), len(COUNTS), dtype=torch.float64, device=device)
    if counts_tokens():
        for row, micros, verdicts in zip(counts, steps, found, strict=True):
            for micro, verdict in zip(micros, verdicts, strict=True):
                row += _counted(micro, verdict)
    dist.all_reduce(counts)
    rows = [dict(zip(COUNTS, row, strict=True)) for row in counts.tolist()]
    whole = {name: sum(row[name] for row in rows) for name in COUNTS}
    metrics = {
        "rollout_corr/rollout_rs_masked_fraction": 1 - whole["kept_tokens"] / max(whole["tokens"], 1.0),
        "rollout_corr/rollout_rs_seq_masked_fraction": whole["cut_samples"] / max(whole["samples"], 1.0),
    }
    if not found:
        return targets, metrics
    return [
        [
            replace(target, kept=_kept(section.loss_agg_mode, micro, verdict, row))
            for micro, target, verdict in zip(*step, strict=True)
        ]
        for row, *step in zip(rows, steps, targets, found, strict=True)
    ], metrics


def _judged(section: AlgorithmSection, micro: MicroBatch, target: Target) -> _Verdict:
    assert target.old_T is not None, "rejection has log-probs from before the update"
    view = kept_view(micro, target, target.old_T)
    kept_T = kept_tokens(section.rejection, view)
    return _Verdict(view, kept_T, view.sample_sums(kept_T.float()).long())


def _counted(micro: MicroBatch, verdict: _Verdict) -> Tensor:
    """The counts of a micro-batch on this rank; samples are counted by the first context-parallel rank."""
    is_trained_T, kept_T = micro.is_trained_T, verdict.kept_T
    lengths_S, kept_S = micro.lengths_N, verdict.kept_S
    tokens = [torch.ones_like(kept_T), kept_T, is_trained_T, is_trained_T & kept_T]
    samples = [torch.ones_like(lengths_S), (kept_S > 0) | (lengths_S == 0), kept_S < lengths_S]
    is_first = mpu.get_context_parallel_rank() == 0
    sums = [each.double().sum() for each in tokens] + [each.double().sum() * is_first for each in samples]
    return torch.stack(sums)


def _kept(mode: AggregationMode, micro: MicroBatch, verdict: _Verdict, counts: dict[str, float]) -> Kept:
    """Weights as if the rejected tokens and samples had never been there."""
    index_K = verdict.kept_T.nonzero().squeeze(1)
    if mode == "token-mean":
        factor = counts["trained_tokens"] / max(counts["kept_trained_tokens"], 1.0)
    else:
        factor = counts["samples"] / max(counts["kept_samples"], 1.0)
    weights_K = micro.weights_T[index_K].double() * factor
    if mode == "seq-mean-token-mean":
        shares_S = micro.lengths_N.double() / verdict.kept_S.clamp(min=1)
        weights_K = weights_K * shares_S[micro.samples_T[index_K]]
    return Kept(index_K, weights_K.float(), verdict.kept_S)
