"""An iteration's metrics with verl's names, from sums that are the same on every rank."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from yatt.core.figures.fact_metrics import fact_metrics
from yatt.records.message import SampleFact, pack_floats


def batch_metrics(facts: Sequence[SampleFact], advantages_F: Tensor) -> dict[str, float]:
    """Metrics of the rollout batch: `fact_metrics`, and of the advantages.

    Args:
        advantages_F: of all completion tokens.
    """
    return fact_metrics(facts) | {
        "critic/advantages/mean": float(advantages_F.double().mean()),
        "critic/advantages/max": float(advantages_F.max()),
        "critic/advantages/min": float(advantages_F.min()),
    }


def sample_advantages(facts: Sequence[SampleFact], advantages_F: Tensor) -> bytes:
    """Returns the mean advantage over each sample's tokens, packed float32, in the order of the facts.

    Args:
        advantages_F: float32, of all completion tokens, on CPU.
    """
    lengths_N = torch.tensor([fact.num_completion_tokens for fact in facts], dtype=torch.int64)
    samples_F = torch.arange(len(facts)).repeat_interleave(lengths_N)
    sums_N = torch.zeros(len(facts), dtype=torch.float64).index_add(0, samples_F, advantages_F.double())
    return pack_floats((sums_N / lengths_N.clamp(min=1)).tolist())


def update_metrics(sums: dict[str, float], grad_norms: Sequence[float]) -> dict[str, float]:
    """Metrics of the passes: token means over all optimizer steps; step means of loss and gradient norm.

    Tokens that are not trained on, rejected ones and those of masked samples, are only in the means of the
    differences between sampler and trainer.

    `rollout_corr/rollout_is_eff_sample_size` is the effective sample size of the importance weights w, as a
    share of the tokens: (sum w)^2 / (n sum w^2); Kish (1965). 1 means that all weights are equal.
    """
    tokens, kept = max(sums["tokens"], 1.0), max(sums["kept"], 1.0)
    diff = sums["diff"] / tokens
    metrics = {"actor/pg_loss": sums["pg_loss"] / tokens} | {  # its weights have the number of all tokens
        f"actor/{name}": sums[name] / kept
        for name in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "entropy", "kl_loss")
    }
    if taught := sums.get("taught", 0.0):
        metrics["distill/kl"] = sums["distill_kl"] / taught
        metrics["distill/mass_top_k"] = sums["mass_top_k"] / taught
    return metrics | {
        "actor/grad_norm": sum(grad_norms) / len(grad_norms),
        "rollout_corr/rollout_is_mean": sums["is_weight"] / kept,
        "rollout_corr/rollout_is_limited": sums["is_limited"] / kept,
        "rollout_corr/rollout_is_eff_sample_size": sums["is_weight"] ** 2
        / max(kept * sums["is_weight_squared"], 1e-30),
        "training/rollout_probs_diff_mean": diff,
        "training/rollout_probs_diff_max": sums["largest_diff"],
        "training/rollout_probs_diff_std": math.sqrt(max(sums["diff_squared"] / tokens - diff**2, 0.0)),
    }


def given_metrics(facts: Sequence[SampleFact], num_steps: int, sums: Sequence[float]) -> dict[str, float]:
    """Metrics of an iteration with given completions.

    `train/loss` is the mean over optimizer steps, `train/nll` the negative log-likelihood per token. Of pairs
    `train/accuracy` is the share in which the preferred completion has the higher reward: dpo's implicit one,
    or a reward model's score.

    Args:
        sums: over optimizer steps the loss; over all tokens their number and the negative log-likelihood;
            over all pairs the reward of the preferred completion and of the other, right pairs, and pairs.
    """
    loss, num_tokens, nll, chosen, rejected, *counts = sums
    right, num_pairs = map(round, counts)  # each is a sum of the shares of samples' tokens
    found = {name: value for name, value in fact_metrics(facts).items() if not name.startswith("critic/")}
    found["train/loss"] = loss / num_steps
    if not num_pairs:
        return found | {"train/nll": nll / max(num_tokens, 1.0)}
    return found | {
        "train/chosen_reward": chosen / num_pairs,
        "train/rejected_reward": rejected / num_pairs,
        "train/margin": (chosen - rejected) / num_pairs,
        "train/accuracy": right / num_pairs,
    }


def load_metrics(counts_LE: Tensor) -> dict[str, float]:
    """Metrics of the load of experts: an expert's tokens by the mean of its layer. Padding counts too.

    The violation of a layer is its largest load less 1; 0 is balanced.

    Args:
        counts_LE: int64, tokens of each layer's experts; layers without tokens have no experts.
    """
    counts_LE = counts_LE[counts_LE.sum(1) > 0].double()
    if not len(counts_LE):
        return {}
    load_LE = counts_LE / counts_LE.mean(1, keepdim=True)
    return {
        "moe/load/max": float(load_LE.max(1).values.mean()),
        "moe/load/min": float(load_LE.min(1).values.mean()),
        "moe/max_violation": float(load_LE.max()) - 1,
        "moe/idle_experts": float((counts_LE == 0).double().mean()),
    }
