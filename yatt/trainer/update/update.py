"""Trains one iteration: takes rollouts, updates the parameters and returns metrics.

Every rank has the whole table of facts, so every rank computes all advantages and all loss denominators;
only log-probs and gradients need the model. The result does not depend on the layout, and the same inputs
give bit-equal parameters.

Suffix: F completion tokens of the whole rollout batch.
"""

import itertools
from dataclasses import dataclass, replace

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor, nn

from yatt.algo.advantage import RewardTable, ValueEstimate
from yatt.algo.algorithm import Algorithm
from yatt.algo.kl import kl_estimate
from yatt.algo.loss import BatchTotals, token_weights
from yatt.config.schema import RunConfig
from yatt.core.figures.efficiency import peak_flops_per_s
from yatt.core.samples.placeholders import placed_in
from yatt.models.flops import BACKWARD, forward_flops, picture_flops, training_flops
from yatt.records.message import MiniBatchPlan, Rollout, SampleFact, Train, Trained
from yatt.records.usage import RankUsage
from yatt.trainer.attention.batches import MicroBatch, SequenceLayout, TrainSample, micro_batch, sample_of
from yatt.trainer.attention.media_batch import Picture, shown_picture
from yatt.trainer.forward.passes import (
    Tick,
    completion_logprobs,
    counts_tokens,
    gather_parameters,
    learning_rate,
    optimizer_step,
    reader_of,
)
from yatt.trainer.forward.routes import Routes
from yatt.trainer.forward.stats import batch_metrics, sample_advantages, update_metrics
from yatt.trainer.mcore.model import Policy, broadcast_over_model
from yatt.trainer.mcore.tower import PictureFeatures
from yatt.trainer.state.host_copy import HostCopy
from yatt.trainer.update.critic import (
    CriticUpdate,
    critic_estimate,
    critic_turn,
    token_values,
    trained_tokens,
    update_critic,
)
from yatt.trainer.update.objective import KlCoefficient, Measured, Objective, Target, summed_totals
from yatt.trainer.update.profile import PartTimes, RankProfiler
from yatt.trainer.update.rejection import rejected_targets

ROLLOUTS = msgspec.msgpack.Decoder(tuple[Rollout, ...])
PIECE_BYTES = 64 << 20


def forget_peaks(device: torch.device) -> None:
    """Begins a new measurement of the largest device memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _picture_flops(learner: "Learner", rollouts: dict[int, Rollout]) -> int:
    """Operations of the whole batch's pictures in the tower, each once for a model copy. Collective."""
    flops = sum(picture_flops(learner.policy.shape, each.grid) for each in _pictures_of(rollouts))
    if learner.config.vision.train != "none":
        flops *= (1 + BACKWARD) * learner.config.trainer.ppo_epochs
    total = torch.tensor([flops], dtype=torch.int64, device=learner.policy.device)
    dist.all_reduce(total, group=mpu.get_data_parallel_group())
    return int(total)


def _pictures_of(rollouts: dict[int, Rollout]) -> tuple[Picture, ...]:
    """The pictures of samples, each once, in one order on every rank."""
    return tuple(
        dict.fromkeys(
            shown_picture(each) for number in sorted(rollouts) for each in placed_in(rollouts[number].turns)
        )
    )


@dataclass(frozen=True, slots=True)
class Learner:
    """The policy and its routes, the reference model and the critic if they are needed, their host copy, the
    run config, and the rank's profiles."""

    config: RunConfig
    algorithm: Algorithm
    policy: Policy
    reference: list[nn.Module]
    host: HostCopy
    kl: KlCoefficient
    profiler: RankProfiler
    routes: Routes
    pictures: tuple[PictureFeatures, ...] = ()
    critic: Policy | None = None


def update_usage(learner: Learner, order: Train) -> RankUsage:
    """Measures the policy's update with a batch, after it. The last token of a sample is only a label."""
    config, policy, flops = learner.config, learner.policy, 0
    passes = [(fact.num_tokens - 1, fact.num_completion_tokens) for fact in order.facts]
    if order.iteration > config.critic.warmup_iterations:
        shape = replace(policy.shape, vocab_size=1) if config.run.kind == "reward_model" else policy.shape
        flops = config.trainer.ppo_epochs * training_flops(forward_flops(shape), passes)
    if policy.device.type != "cuda":
        return RankUsage(flops=flops)
    return RankUsage(
        flops=flops,
        peak_flops_per_s=peak_flops_per_s(torch.cuda.get_device_name(policy.device), config.model.dtype),
        max_allocated_bytes=torch.cuda.max_memory_allocated(policy.device),
        max_reserved_bytes=torch.cuda.max_memory_reserved(policy.device),
    )


@dataclass(frozen=True, slots=True)
class _KnownLogprobs:
    """Log-probs per micro-batch, in order; an empty list means not computed."""

    old: list[Tensor]
    reference: list[Tensor]


def train_iteration(learner: Learner, order: Train, tick: Tick) -> Trained:
    """Makes all optimizer steps of one iteration. Collective over all ranks."""
    timing = PartTimes(learner.profiler)
    rollouts = received_rollouts(learner, order)
    steps = mini_batches(learner, order, rollouts)
    known = _known_logprobs(learner, steps, tick, timing)
    with critic_turn(learner.config, learner.host, timing):
        values_F = _values(learner, order, steps, tick, timing)
        estimate, kl_penalty = timing.of(
            "adv", lambda: _advantages(learner, order.facts, steps, known, values_F)
        )
        metrics = batch_metrics(order.facts, estimate.advantages_T)
        if learner.critic is not None:
            work = CriticUpdate(steps, values_F, estimate, trained_tokens(order.facts))
            critic = learner.critic
            metrics |= timing.of("update_critic", lambda: update_critic(learner.config, critic, work, tick))
    costs: list[tuple[int, int, float]] = []
    if order.iteration > learner.config.critic.warmup_iterations:
        targets = _targets(learner, steps, known, estimate.advantages_T)
        found, costs = _train_policy(learner, order, steps, targets, tick, timing)
        metrics |= found | _adapted_kl(learner, found, kl_penalty, len(order.facts))
    usage = update_usage(learner, order)
    if learner.policy.shape.vision is not None:
        usage = msgspec.structs.replace(usage, flops=usage.flops + _picture_flops(learner, rollouts))
    return Trained(
        metrics=metrics,
        timing_s=timing.seconds,
        costs=tuple(costs),
        usage=usage,
        advantages=sample_advantages(order.facts, estimate.advantages_T),
    )


def received_rollouts(learner: Learner, order: Train) -> dict[int, Rollout]:
    """This rank's rollouts, with what is kept of their pictures. Collective; the measured peak of the GPU's
    memory begins here."""
    forget_peaks(learner.policy.device)
    rollouts = share_rollouts(order.rollouts, learner.policy.device)
    for features in learner.pictures:
        _share_pictures(features, order.iteration, rollouts)
    return rollouts


def _train_policy(
    learner: Learner, order: Train, steps: list[list[MicroBatch]], targets: list[list[Target]], tick: Tick,
    timing: PartTimes,
) -> tuple[dict[str, float], list[tuple[int, int, float]]]:  # fmt: skip
    """All of the policy's optimizer steps: metrics, and the costs of micro-batches."""
    section, metrics = learner.config.algorithm, dict[str, float]()
    if section.rejection.is_on:
        targets, metrics = rejected_targets(section, steps, targets)
    measured, norms, costs = timing.of("update_actor", lambda: _updates(learner, order, steps, targets, tick))
    totals = summed_totals(measured, learner.policy.device, has_teacher=learner.config.top_k > 0)
    metrics |= update_metrics(totals, norms)
    metrics |= learner.routes.finish()
    metrics["actor/lr"] = learning_rate(learner.policy)
    return metrics, costs


def _adapted_kl(
    learner: Learner, metrics: dict[str, float], kl_penalty: float | None, num_samples: int
) -> dict[str, float]:
    """Metrics of the KL penalty; its coefficient is adapted after them."""
    section, found = learner.config.algorithm, dict[str, float]()
    if kl_penalty is not None:
        found["actor/reward_kl_penalty"] = kl_penalty
    if section.kl_in != "none":
        found["actor/kl_coef"] = learner.kl.value
        learner.kl.adapt(section, metrics["actor/kl_loss"] if kl_penalty is None else kl_penalty, num_samples)
    return found


def _values(
    learner: Learner, order: Train, steps: list[list[MicroBatch]], tick: Tick, timing: PartTimes
) -> Tensor:
    """The critic's values of all completion tokens, float32 [F] on CPU; empty without a critic."""
    if learner.critic is None:
        return torch.zeros(0)
    critic = learner.critic
    return timing.of("values", lambda: token_values(critic, steps, order.facts, tick))


def _updates(
    learner: Learner, order: Train, steps: list[list[MicroBatch]], targets: list[list[Target]], tick: Tick
) -> tuple[list[Measured], list[float], list[tuple[int, int, float]]]:
    """All optimizer steps: measurements, gradient norms, and the costs of micro-batches."""
    measured: list[Measured] = []
    norms: list[float] = []
    sizes = sizes_of_micros(order)
    costs: list[tuple[int, int, float]] = []
    section = learner.config.algorithm
    num_ticks = learner.config.trainer.ppo_epochs * sum(map(len, steps)) * len(learner.policy.chunks)
    tick = learner.profiler.before_last(tick, num_ticks)
    for _ in range(learner.config.trainer.ppo_epochs):
        first = 0
        for micros, wanted in zip(steps, targets, strict=True):
            reader = reader_of(learner.policy, learner.config.rollout.temperature)
            objective = Objective(section, learner.algorithm, learner.kl.value, reader, wanted)
            got, norm, seconds = optimizer_step(
                learner.policy, micros, objective, tick, learner.routes.update
            )
            learner.routes.end_update()
            costs.extend((*sizes[first + i], taken) for i, taken in enumerate(seconds))
            measured.extend(got)
            norms.append(norm)
            first += len(micros)
    gather_parameters(learner.policy)
    return measured, norms, costs


def share_rollouts(rollouts: tuple[Rollout, ...], device: torch.device) -> dict[int, Rollout]:
    """Broadcasts a data-parallel rank's rollouts to all ranks of its model copy. Collective over these."""
    body = torch.frombuffer(bytearray(msgspec.msgpack.encode(rollouts)), dtype=torch.uint8)
    size = torch.tensor([len(body)], device=device)
    broadcast_over_model(size)
    if len(body) != int(size):
        body = torch.empty(int(size), dtype=torch.uint8)
    for piece in torch.split(body, PIECE_BYTES):  # a teacher's likeliest tokens make it large
        shared = piece.to(device)
        broadcast_over_model(shared)
        piece.copy_(shared)
    return {rollout.sample_id: rollout for rollout in ROLLOUTS.decode(body.numpy().data)}


def _share_pictures(features: PictureFeatures, iteration: int, rollouts: dict[int, Rollout]) -> None:
    """Gives every rank of this model copy's first stage what is kept of the pictures of these rollouts."""
    features.begin_iteration(iteration)
    features.share(_pictures_of(rollouts), mpu.get_tensor_and_context_parallel_group())


def sequence_cut(learner: Learner) -> SequenceLayout:
    """Padding and split of sequences in this layout."""
    layout = learner.config.trainer
    cp = layout.context_parallel_size
    tp = layout.tensor_model_parallel_size if layout.sequence_parallel else 1
    align = tp * (2 * cp if cp > 1 else 1)
    return SequenceLayout(
        align=align,
        cp_size=cp,
        cp_rank=mpu.get_context_parallel_rank(),
        has_few_lengths=learner.policy.device.type == "cpu",
        merge_size=learner.policy.shape.picture_merge,
    )


def mini_batches(learner: Learner, order: Train, rollouts: dict[int, Rollout]) -> list[list[MicroBatch]]:
    """This rank's micro-batches of each optimizer step."""
    facts = {fact.sample_id: fact for fact in order.facts}
    starts = dict(zip(facts, _starts(order.facts), strict=True))
    samples = {number: sample_of(rollout, starts[number]) for number, rollout in rollouts.items()}
    for number, sample in samples.items():
        assert sample.num_completion_tokens == facts[number].num_completion_tokens, (
            f"sample {number} has {sample.num_completion_tokens} completion tokens, "
            f"its fact says {facts[number].num_completion_tokens}"
        )
    return [_micro_batches(learner, plan, facts, samples) for plan in order.plan]


def _micro_batches(
    learner: Learner, plan: MiniBatchPlan, facts: dict[int, SampleFact], samples: dict[int, TrainSample]
) -> list[MicroBatch]:
    everyone = [facts[number] for rank in plan.micro_batches for micro in rank for number in micro]
    # As in TRL, a masked sample counts in a mean over samples; its tokens do not count in a mean over tokens.
    whole = BatchTotals(
        num_tokens=sum(fact.num_completion_tokens for fact in everyone if not fact.is_masked),
        num_samples=len(everyone),
    )
    # The weights already average; this cancels megatron-core's division by all tokens, masked or not.
    num_divided = sum(fact.num_completion_tokens for fact in everyone)
    mine = [*plan.micro_batches[mpu.get_data_parallel_rank()]]
    if learner.config.trainer.virtual_pipeline_model_parallel_size > 1:  # required by the schedule
        mine += [()] * (-len(mine) % learner.config.trainer.pipeline_model_parallel_size)
    cut = sequence_cut(learner)
    section = learner.config.algorithm
    norm_length = section.loss_scale_factor or learner.config.rollout.max_response_tokens
    mode = "seq-mean-token-mean" if learner.config.has_pairs else section.loss_agg_mode

    def packed(numbers: tuple[int, ...]) -> MicroBatch:
        chosen = [samples[number] for number in numbers]
        lengths_N = torch.tensor([sample.num_completion_tokens for sample in chosen], dtype=torch.int64)
        weights_T = token_weights(mode, lengths_N, whole, norm_length) * num_divided
        weights = [
            row.numpy() * (not facts[number].is_masked)
            for number, row in zip(numbers, torch.split(weights_T, lengths_N.tolist()), strict=True)
        ]
        return micro_batch(chosen, weights, cut, learner.policy.device)

    return [packed(numbers) for numbers in mine]


def sizes_of_micros(order: Train) -> list[tuple[int, int]]:
    """Tokens and sum of squared lengths per micro-batch of this rank, over all mini-batches."""
    lengths = {fact.sample_id: fact.num_tokens for fact in order.facts}
    mine = [micro for plan in order.plan for micro in plan.micro_batches[mpu.get_data_parallel_rank()]]
    return [(sum(lengths[n] for n in micro), sum(lengths[n] ** 2 for n in micro)) for micro in mine]


def _known_logprobs(
    learner: Learner, steps: list[list[MicroBatch]], tick: Tick, timing: PartTimes
) -> _KnownLogprobs:
    """Computes old log-probs if the policy changes before their last use; reference log-probs if needed."""
    config, micros = learner.config, list(itertools.chain(*steps))
    old: list[Tensor] = []
    reference: list[Tensor] = []
    reader = reader_of(learner.policy, config.rollout.temperature)
    section = config.algorithm
    is_used = section.kl_in == "reward" or section.rejection.is_on or learner.algorithm.needs.old_logprobs
    if config.trainer.ppo_epochs * len(steps) > 1 or is_used:
        chunks = learner.policy.chunks
        old = timing.of(
            "old_log_prob", lambda: completion_logprobs(chunks, micros, reader, tick, learner.routes.old)
        )
    if learner.reference:
        models = learner.reference
        reference = timing.of("ref", lambda: completion_logprobs(models, micros, reader, tick))
    return _KnownLogprobs(old, reference)


def _advantages(
    learner: Learner,
    facts: tuple[SampleFact, ...],
    steps: list[list[MicroBatch]],
    known: _KnownLogprobs,
    values_F: Tensor,
) -> tuple[ValueEstimate, float | None]:
    """Advantages of all completion tokens on CPU, the same on every rank, without returns if there is no
    critic; and the mean KL per token to the reference, if it is subtracted from the reward."""
    section, penalties_F, kl_penalty = learner.config.algorithm, None, None
    lengths_N = torch.tensor([fact.num_completion_tokens for fact in facts], dtype=torch.int64)
    if section.kl_in == "reward":
        flat_F = torch.zeros(int(lengths_N.sum()), device=learner.policy.device)
        if counts_tokens():
            micros = itertools.chain(*steps)
            for micro, old_T, reference_T in zip(micros, known.old, known.reference, strict=True):
                flat_F[micro.flat_T] = learner.kl.value * kl_estimate(section.kl_type, old_T, reference_T)
        dist.all_reduce(flat_F)  # exact: one rank has a token's value, the others have 0
        penalties_F = flat_F.cpu()
        kl_penalty = float(penalties_F.double().mean()) / learner.kl.value if len(penalties_F) else 0.0
    table = RewardTable(
        rewards_N=torch.tensor([fact.reward for fact in facts], dtype=torch.float64),
        groups_N=torch.tensor([fact.prompt_group for fact in facts], dtype=torch.int64),
        lengths_N=lengths_N,
        penalties_T=penalties_F,
        is_masked_N=torch.tensor([fact.is_masked for fact in facts]),
    )
    if learner.critic is not None:
        return critic_estimate(learner.config, table, values_F), kl_penalty
    return ValueEstimate(learner.algorithm.advantages(table), torch.zeros(0)), kl_penalty


def _targets(
    learner: Learner, steps: list[list[MicroBatch]], known: _KnownLogprobs, advantages_F: Tensor
) -> list[list[Target]]:
    """Targets of each mini-batch's micro-batches."""
    numbers = itertools.count()

    def target(micro: MicroBatch) -> Target:
        index = next(numbers)
        own_T = advantages_F[micro.flat_T].to(learner.policy.device)
        return Target(
            advantages_T=own_T if micro.sampled.rewards_T is None else own_T + micro.sampled.rewards_T,
            old_T=known.old[index] if known.old else None,
            reference_T=known.reference[index] if known.reference else None,
        )

    return [[target(micro) for micro in micros] for micros in steps]


def _starts(facts: tuple[SampleFact, ...]) -> list[int]:
    """Index of each sample's first completion token among all completion tokens."""
    return [0, *itertools.accumulate(fact.num_completion_tokens for fact in facts)][:-1]
