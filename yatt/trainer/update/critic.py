"""The critic: values of completion tokens, and their update towards returns.

The critic is a second model in the trainer's layout, with an optimizer of its own. What it computes per token
goes by a token's index among all completion tokens of the batch, so every rank has all values, and whatever
is made of them does not depend on the layout.

Suffixes: T completion tokens of the micro-batch on this rank; F completion tokens of the whole rollout batch;
R rows; H hidden size.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from yatt.algo.advantage import RewardTable, ValueEstimate, gae_estimate
from yatt.config.schema import CriticSection, RunConfig
from yatt.records.message import SampleFact
from yatt.trainer.attention.batches import MicroBatch
from yatt.trainer.forward.passes import (
    HeadInput,
    Tick,
    counts_tokens,
    gather_parameters,
    learning_rate,
    optimizer_step,
    run_pass,
)
from yatt.trainer.forward.routes import Routes
from yatt.trainer.mcore.model import Policy
from yatt.trainer.state.host_copy import HostCopy
from yatt.trainer.update.profile import PartTimes

VARIANCE_FLOOR = 1e-5
"""As verl's, in the denominator of the explained variance."""


def critic_config(config: RunConfig) -> RunConfig:
    """The run's config with the critic in the policy's place: its folder, its optimizer, its epochs."""
    trainer = replace(config.trainer, ppo_epochs=config.critic.epochs)
    return replace(config, model=config.critic_model, optimizer=config.critic.optimizer, trainer=trainer)


@contextlib.contextmanager
def critic_turn(config: RunConfig, host: HostCopy, timing: PartTimes) -> Iterator[None]:
    """While it lasts a critic that swaps with the policy is on the device in its place."""
    if not config.critic.swap:
        yield
        return
    timing.of("swap_in_critic", host.swap_in)
    yield
    timing.of("swap_out_critic", host.swap_out)


def row_values(micro: MicroBatch, given: HeadInput) -> Tensor:
    """The value before each completion token of a micro-batch, float32 [T]: of the hidden state that
    predicts it."""
    values_R = given.hidden_RH.float() @ given.weight_VH[0].float()
    return values_R[: len(micro.labels_T)]


def token_values(
    critic: Policy, steps: Sequence[Sequence[MicroBatch]], facts: Sequence[SampleFact], tick: Tick
) -> Tensor:
    """The values of all completion tokens, float32 [F] on CPU, the same on every rank. Collective."""
    micros = [*itertools.chain(*steps)]

    def finish(_: int, micro: MicroBatch, given: HeadInput) -> Tensor:
        return row_values(micro, given)

    found = run_pass(critic.chunks, micros, finish, tick, trains=False)
    flat_F = torch.zeros(sum(fact.num_completion_tokens for fact in facts), device=critic.device)
    if counts_tokens():
        for micro, values_T in zip(micros, found, strict=True):
            flat_F[micro.flat_T] = values_T
    dist.all_reduce(flat_F)  # exact: one rank has a token's value, the others have 0
    return flat_F.cpu()


def trained_tokens(facts: Sequence[SampleFact]) -> Tensor:
    """Whether each completion token's sample is trained on, bool [F]."""
    lengths_N = torch.tensor([fact.num_completion_tokens for fact in facts], dtype=torch.int64)
    return torch.tensor([not fact.is_masked for fact in facts]).repeat_interleave(lengths_N)


def critic_estimate(config: RunConfig, table: RewardTable, values_F: Tensor) -> ValueEstimate:
    """Advantages and returns as the run file wants them."""
    section = config.algorithm
    return gae_estimate(table, values_F, gamma=section.gamma, lam=section.lam, whitens=section.whiten)


def value_losses(values_T: Tensor, old_T: Tensor, returns_T: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """The loss of each value, float [T], and whether the clipped one counts, bool [T].

    Source:
        PPO's reference implementation, and verl: half of the larger squared error, of the value and of the
        value within `clip` of the old one; 0 is off.
    """
    losses_T = (values_T - returns_T).square()
    if not clip:
        return losses_T / 2, torch.zeros_like(losses_T, dtype=torch.bool)
    held_T = torch.maximum(torch.minimum(values_T, old_T + clip), old_T - clip)
    clipped_T = (held_T - returns_T).square()
    return torch.maximum(losses_T, clipped_T) / 2, clipped_T > losses_T


class _ValueObjective:
    """The loss of a mini-batch's micro-batches: sums with known weights, as the policy's
    (`algorithm.loss_agg_mode`), so that any layout gives the same. The sums of measurements are loss, clipped
    tokens, values, tokens; float64 [4]."""

    def __init__(self, section: CriticSection, returns_F: Tensor, old_F: Tensor) -> None:
        self._clip, self._returns_F, self._old_F = section.value_clip, returns_F, old_F

    def __call__(self, _: int, micro: MicroBatch, given: HeadInput) -> tuple[Tensor, Tensor, Tensor]:
        """Loss summed over tokens, number of tokens (int32), and measurements, for the schedule."""
        values_T = row_values(micro, given)
        old_T, returns_T = self._old_F[micro.flat_T], self._returns_F[micro.flat_T]
        losses_T, is_clipped_T = value_losses(values_T, old_T, returns_T, self._clip)
        loss = (losses_T * micro.weights_T).sum()
        parts = [loss, is_clipped_T * micro.is_trained_T, values_T * micro.is_trained_T, micro.is_trained_T]
        sums = torch.stack([part.detach().double().sum() for part in parts])
        return loss, torch.tensor(len(values_T), dtype=torch.int32, device=values_T.device), sums


@dataclass(frozen=True, slots=True)
class CriticUpdate:
    """What an iteration's update of the critic needs.

    Args:
        steps: this rank's micro-batches of each optimizer step.
        values_F: the values before the update.
        is_trained_F: which tokens are trained on, bool; those of masked samples are not.
    """

    steps: Sequence[Sequence[MicroBatch]]
    values_F: Tensor
    estimate: ValueEstimate
    is_trained_F: Tensor


def update_critic(config: RunConfig, critic: Policy, work: CriticUpdate, tick: Tick) -> dict[str, float]:
    """Makes all optimizer steps of the critic in an iteration; returns its metrics. Collective."""
    section, norms = config.critic, list[float]()
    sums = torch.zeros(4, dtype=torch.float64, device=critic.device)
    returns_F, old_F = (each.to(critic.device) for each in (work.estimate.returns_T, work.values_F))
    objective = _ValueObjective(section, returns_F, old_F)
    routes = Routes(
        critic.chunks,
        critic.shape,
        critic.device,
        is_replayed=False,
        is_recomputed=config.trainer.recompute != "none",
    )
    for _ in range(section.epochs):
        for micros in work.steps:
            measured, norm, _ = optimizer_step(critic, micros, objective, tick, routes.update)
            routes.end_update()
            norms.append(norm)
            if counts_tokens():
                sums += torch.stack(measured).sum(0)
    gather_parameters(critic)
    dist.all_reduce(sums)
    loss, clipped, values, trained = sums.tolist()
    num_tokens = section.epochs * len(old_F)
    return value_metrics(work) | {
        "critic/vf_loss": loss / max(num_tokens, 1),  # its weights have the number of all tokens
        "critic/vf_clipfrac": clipped / max(trained, 1.0),
        "critic/vpred_mean": values / max(trained, 1.0),
        "critic/grad_norm": sum(norms) / len(norms),
        "critic/lr": learning_rate(critic),
    }


def value_metrics(work: CriticUpdate) -> dict[str, float]:
    """Metrics of values and returns of the tokens that are trained on, before the update.

    `vf_explained_var`: 1 less the variance of return minus value by that of the return; 1 is perfect, 0 a
    constant.
    """
    values, returns = (each[work.is_trained_F].double() for each in (work.values_F, work.estimate.returns_T))
    if not len(values):
        return {}
    found = {"critic/vf_explained_var": 0.0}
    if len(values) > 1:
        share = (returns - values).var() / (returns.var() + VARIANCE_FLOOR)
        found["critic/vf_explained_var"] = 1.0 - float(share)
    for name, each in (("values", values), ("returns", returns)):
        found |= {
            f"critic/{name}/mean": float(each.mean()),
            f"critic/{name}/max": float(each.max()),
            f"critic/{name}/min": float(each.min()),
        }
    return found
