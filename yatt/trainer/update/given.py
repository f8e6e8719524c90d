"""Trains on completions that are given: fine-tuning, and pairs of which one is preferred (`run.kind`).

Suffixes: T completion tokens of the micro-batch on this rank, S its samples, P its pairs.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from yatt.algo.given import dpo_losses, ranking_losses, sft_losses
from yatt.algo.view import LossView
from yatt.config.schema import RunConfig
from yatt.records.message import Train, Trained
from yatt.trainer.attention.batches import MicroBatch
from yatt.trainer.attention.context_parallel import sum_over_context_parallel
from yatt.trainer.forward.passes import (
    HeadInput,
    Reader,
    Tick,
    completion_logprobs,
    counts_tokens,
    gather_parameters,
    learning_rate,
    optimizer_step,
    reader_of,
    run_pass,
)
from yatt.trainer.forward.stats import given_metrics
from yatt.trainer.update.critic import row_values
from yatt.trainer.update.profile import PartTimes
from yatt.trainer.update.update import (
    Learner,
    mini_batches,
    received_rollouts,
    sizes_of_micros,
    update_usage,
)

TEMPERATURE = 1.0


def train_given(learner: Learner, order: Train, tick: Tick) -> Trained:
    """Makes all optimizer steps of one iteration. Collective over all ranks."""
    timing = PartTimes(learner.profiler)
    steps = mini_batches(learner, order, received_rollouts(learner, order))
    micros = [*itertools.chain(*steps)]
    policy, reader = learner.policy, reader_of(learner.policy, TEMPERATURE)
    reference: list[Tensor] = []
    if learner.reference:
        reference = timing.of("ref", lambda: completion_logprobs(learner.reference, micros, reader, tick))
    sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=policy.device)
    norms, costs, sizes = list[float](), list[tuple[int, int, float]](), sizes_of_micros(order)

    def update() -> None:
        first = 0
        ticks = learner.profiler.before_last(tick, len(micros) * len(policy.chunks))
        for own, num_tokens in zip(steps, _tokens_of_steps(order), strict=True):
            known = reference[first : first + len(own)]
            objective = _Objective(learner.config, reader, known, num_tokens)
            measured, norm, seconds = optimizer_step(policy, own, objective, ticks, learner.routes.update)
            learner.routes.end_update()
            costs.extend((*sizes[first + i], taken) for i, taken in enumerate(seconds))
            norms.append(norm)
            if counts_tokens():
                sums.add_(torch.stack(measured).sum(0))
            first += len(own)
        gather_parameters(policy)

    timing.of("update_actor", update)
    dist.all_reduce(sums)
    metrics = given_metrics(order.facts, len(steps), sums.tolist())
    metrics |= learner.routes.finish()
    metrics |= {"actor/grad_norm": sum(norms) / len(norms), "actor/lr": learning_rate(policy)}
    usage = update_usage(learner, order)
    return Trained(metrics=metrics, timing_s=timing.seconds, costs=tuple(costs), usage=usage)


def _tokens_of_steps(order: Train) -> list[int]:
    """Completion tokens of each mini-batch, over all ranks."""
    numbers = {fact.sample_id: fact.num_completion_tokens for fact in order.facts}
    return [
        sum(numbers[n] for rank in plan.micro_batches for micro in rank for n in micro) for plan in order.plan
    ]


def measure_given(learner: Learner, order: Train, tick: Tick) -> Trained:
    """Measures the loss of held-out completions; changes nothing. Collective over all ranks."""
    (micros,) = mini_batches(learner, order, received_rollouts(learner, order))
    policy, reader = learner.policy, reader_of(learner.policy, TEMPERATURE)
    (num_tokens,) = _tokens_of_steps(order)
    known = completion_logprobs(learner.reference, micros, reader, tick) if learner.reference else []
    objective = _Objective(learner.config, reader, known, num_tokens)

    def finish(index: int, micro: MicroBatch, given: HeadInput) -> Tensor:
        return objective(index, micro, given)[2]

    measured = run_pass(policy.chunks, micros, finish, tick, trains=False)
    sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=policy.device)
    if counts_tokens():
        sums += torch.stack(measured).sum(0)
    dist.all_reduce(sums)
    return Trained(metrics=given_metrics(order.facts, 1, sums.tolist()), timing_s={})


NUM_SUMS = 7
"""See `yatt.trainer.forward.stats.given_metrics`."""


class _Objective:
    """The loss of a mini-batch's micro-batches, as `run.kind` says.

    Args:
        reference: log-probs under the reference model of each micro-batch, float32 [T]; empty: there is
            none.
        num_tokens: completion tokens of the mini-batch over all ranks. Tokens' weights have this factor,
            because the schedule divides by it; the loss that is measured has not.
    """

    def __init__(
        self, config: RunConfig, reader: Reader, reference: Sequence[Tensor], num_tokens: int
    ) -> None:
        self._kind, self._section, self._num_tokens = config.run.kind, config.preference, max(num_tokens, 1)
        self._reader, self._reference = reader, reference

    def __call__(self, index: int, micro: MicroBatch, given: HeadInput) -> tuple[Tensor, Tensor, Tensor]:
        """Loss summed over tokens, number of tokens (int32), and measurements, for the schedule."""
        is_scored = self._kind == "reward_model"
        logprobs_T = row_values(micro, given) if is_scored else self._reader(micro, given)[0]
        view = LossView(
            logprobs_T=logprobs_T,
            old_T=logprobs_T.detach(),
            sampler_T=micro.sampler_T,
            advantages_T=torch.ones_like(micro.sampler_T),
            samples_T=micro.samples_T,
            lengths_S=micro.lengths_N,
            reference_T=self._reference[index] if self._reference else None,
            sum_over_ranks=sum_over_context_parallel,
        )
        losses_T, measured = self._losses(view)
        loss = (losses_T * micro.weights_T).sum()
        num_tokens = torch.tensor(len(losses_T), dtype=torch.int32, device=losses_T.device)
        own_loss = loss.detach().double() / self._num_tokens
        sums = torch.stack([own_loss, num_tokens.double(), *measured])
        return loss, num_tokens, sums

    def _losses(self, view: LossView) -> tuple[Tensor, list[Tensor]]:
        """Losses of each token; and sums over all tokens or samples, to which each rank adds the part of its
        tokens."""
        none = view.logprobs_T.new_zeros(1, dtype=torch.float64)
        if self._kind == "sft":
            losses_T = sft_losses(view)
            return losses_T, [losses_T.detach().double().sum(), *none.expand(4)]
        found = (dpo_losses if self._kind == "dpo" else ranking_losses)(view, self._section)
        chosen_P, rejected_P = found.compared_S[0::2], found.compared_S[1::2]
        share_T = view.of_tokens(1.0 / view.lengths_S.clamp(min=1).double())  # a sample's add up to 1
        is_chosen_T = view.samples_T % 2 == 0
        pairs_T = view.samples_T // 2
        chosen_T, rejected_T = chosen_P[pairs_T], rejected_P[pairs_T]
        measured = (chosen_T, rejected_T, chosen_T > rejected_T, torch.ones_like(chosen_T))
        return found.losses_T, [*none, *((share_T * each * is_chosen_T).sum() for each in measured)]
