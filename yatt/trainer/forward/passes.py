"""Forward and backward passes over micro-batches, through megatron-core's own schedules.

Suffix: T completion tokens of one micro-batch on this rank.

Prompts have no loss, and logits of completions are computed chunk by chunk (`yatt.trainer.forward.logprobs`).
So for one forward call the language-model head returns its input, narrowed to the trained positions, and its
weight; megatron-core has no such option for training. Suffixes: S tokens, B sequences, H hidden size, R rows
wanted.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn

from yatt.algo.kl import LikeliestKl, likeliest_kl
from yatt.clock import monotonic_s
from yatt.trainer.attention.batches import MicroBatch, TaughtTokens
from yatt.trainer.forward.logprobs import VocabularyShard, token_logprobs, wanted_logprobs
from yatt.trainer.forward.routes import Around, nothing_around
from yatt.trainer.mcore.model import Policy, ValueHead


@dataclass(slots=True)
class HeadWeight:
    """The head's weight [V / tp, H] in the forward call; with tied embeddings, the embedding's weight."""

    tensor: Tensor | None = None


@contextlib.contextmanager
def head_at(model: nn.Module, rows_R: Tensor) -> Iterator[HeadWeight]:
    """Makes `model` return the head's input [1, R, H]; a stage without head returns its usual output.

    Args:
        model: a chunk of the policy or reference, wrapped or not.
        rows_R: int64, indices in the flattened hidden states [S / B, B, H].
    """
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    found = HeadWeight()
    if not model.post_process:
        yield found
        return
    head: Any = model.output_layer

    def forward(hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        found.tensor = head.weight if weight is None else weight
        return _narrowed(hidden, rows_R, head), None

    head.forward = forward  # on this object only; the module's hooks still run
    try:
        yield found
    finally:
        del head.forward


def _narrowed(hidden: Tensor, rows_R: Tensor, head: Any) -> Tensor:
    """Selects rows [R, 1, H] of hidden states [S, B, H] (or this rank's part of S), on every TP rank.

    Each rank computes the gradient through its part of the vocabulary; the backward pass sums them. A value
    head is whole on each rank: there the gradients are equal, and a sum would be as many times too large.
    """
    is_whole = isinstance(head, ValueHead)
    if head.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=not is_whole)
    rows = hidden.flatten(0, 1).index_select(0, rows_R)[:, None]
    if head.sequence_parallel or is_whole:
        return rows
    copied: Tensor = copy_to_tensor_model_parallel_region(rows)
    return copied


@dataclass(frozen=True, slots=True)
class HeadInput:
    """Factors of the logits: hidden states [R, H] of a micro-batch's rows, and head weight [V / tp, H]."""

    hidden_RH: Tensor
    weight_VH: Tensor


Finish = Callable[[int, MicroBatch, HeadInput], Any]
"""Takes a micro-batch's index, the micro-batch and the head's input; returns the result for the schedule."""
Tick = Callable[[], None]
"""Called once per micro-batch, to report progress."""


def run_pass(
    chunks: Sequence[nn.Module],
    micros: Sequence[MicroBatch],
    finish: Finish,
    tick: Tick,
    *,
    trains: bool,
    around: Around = nothing_around,
) -> list[Any]:
    """Runs all micro-batches, with gradients if `trains`. Collective over the whole model.

    Args:
        around: surrounds each forward pass of a model chunk.

    Returns:
        Result of `finish` per micro-batch; empty on pipeline stages other than the last.
    """

    def forward_step(items: Iterator[tuple[int, MicroBatch]], model: nn.Module) -> tuple[Tensor, Any]:
        index, micro = next(items)
        tick()
        with around(model, micro), head_at(model, micro.rows_R) as weight:
            output = model(micro.tokens, micro.positions, None, packed_seq_params=micro.packed)

        def finish_this(hidden: Tensor, non_loss_data: bool = False) -> Any:  # noqa: ARG001  (megatron's call)
            assert weight.tensor is not None, "the last stage has a head"
            # megatron's mixed-precision wrapper converts the model's output to float32
            return finish(
                index, micro, HeadInput(hidden.flatten(0, 1).to(weight.tensor.dtype), weight.tensor)
            )

        return output, finish_this

    iterators = [enumerate(micros) for _ in chunks]
    schedule = get_forward_backward_func()
    longest = max(micro.tokens.size(1) for micro in micros)
    run = functools.partial(
        schedule,
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micros),
        seq_length=longest,
        micro_batch_size=1,
        decoder_seq_length=longest,
    )
    if trains:
        return list(run(forward_only=False))
    with torch.no_grad():
        return list(run(forward_only=True, collect_non_loss_data=True))


@dataclass(frozen=True, slots=True)
class Reader:
    """Computes log-probs from a model's hidden states, at the sampling temperature."""

    shard: VocabularyShard
    temperature: float

    def __call__(self, micro: MicroBatch, given: HeadInput) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the micro-batch's completion tokens, float32 [T] each."""
        num_tokens, labels_R = len(micro.labels_T), self._labels_R(micro, given)
        logprobs_R, entropy_R = token_logprobs(
            given.hidden_RH, given.weight_VH, labels_R, self.shard, self.temperature
        )
        return logprobs_R[:num_tokens], entropy_R[:num_tokens]

    def taught(
        self, micro: MicroBatch, given: HeadInput, taught: TaughtTokens
    ) -> tuple[Tensor, Tensor, LikeliestKl]:
        """The same, and their divergence from the teacher's likeliest tokens. What the teacher's vocabulary
        has beyond the model's, which is padding, counts among its other tokens."""
        num_tokens, device = len(micro.labels_T), given.hidden_RH.device
        ids_TK, teacher_TK = taught.ids_TK.to(device), taught.logprobs_TK.to(device)
        is_padding_TK = ids_TK >= self.shard.vocab_size
        ids_TK = ids_TK.masked_fill(is_padding_TK, -1)
        teacher_TK = teacher_TK.masked_fill(is_padding_TK, -torch.inf)
        wanted_RK = F.pad(ids_TK, (0, 0, 0, given.hidden_RH.size(0) - num_tokens), value=-1)
        found = wanted_logprobs(
            given.hidden_RH,
            given.weight_VH,
            self._labels_R(micro, given),
            self.shard,
            self.temperature,
            wanted_RK,
        )
        kl = likeliest_kl(teacher_TK, found.wanted_RK[:num_tokens], found.rest_R[:num_tokens])
        return found.labels_R[:num_tokens], found.entropy_R[:num_tokens], kl

    def _labels_R(self, micro: MicroBatch, given: HeadInput) -> Tensor:
        """The labels, padded to R rows, so that the shapes of matrix products are few."""
        return F.pad(micro.labels_T, (0, given.hidden_RH.size(0) - len(micro.labels_T)))


def reader_of(policy: Policy, temperature: float) -> Reader:
    """Reader for this model's vocabulary."""
    return Reader(VocabularyShard(policy.groups.tp, policy.shape.vocab_size), temperature)


def completion_logprobs(
    chunks: Sequence[nn.Module],
    micros: Sequence[MicroBatch],
    reader: Reader,
    tick: Tick,
    around: Around = nothing_around,
) -> list[Tensor]:
    """Log-probs of all completion tokens, float32 [T] per micro-batch; empty except on the last stage."""

    def finish(_: int, micro: MicroBatch, given: HeadInput) -> Tensor:
        return reader(micro, given)[0]

    return run_pass(chunks, micros, finish, tick, trains=False, around=around)


class Stopwatch:
    """Times micro-batches one by one, on the device that computes them."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Records the start of a micro-batch."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(monotonic_s())

    def seconds(self) -> list[float]:
        """Seconds per micro-batch. The last one overlaps the gradient reduction and is left out. Call it only
        after the device has finished."""
        pairs = itertools.pairwise(self._marks)
        if self._on_gpu:
            return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
        return [end - begin for begin, end in pairs]


def optimizer_step(
    policy: Policy,
    micros: Sequence[MicroBatch],
    finish: Finish,
    tick: Tick,
    around: Around = nothing_around,
) -> tuple[list[Any], float, list[float]]:
    """Makes one update from these micro-batches.

    The schedule advances first, so that the first step of a warm-up has a learning rate above 0.

    Returns:
        Measurements of `finish` (without loss and token count), the gradient norm before clipping, and the
        seconds per micro-batch without the last; empty with pipeline stages, because they overlap.

    Raises:
        FloatingPointError: the gradient is not finite; parameters and optimizer are unchanged.
    """
    for chunk in policy.chunks:
        chunk.zero_grad_buffer()
    policy.optimizer.zero_grad()
    watch = Stopwatch(policy.device)

    def timed_tick() -> None:
        watch.mark()
        tick()

    measured = run_pass(policy.chunks, micros, finish, timed_tick, trains=True, around=around)
    policy.scheduler.step(increment=1)
    _, grad_norm, _ = policy.optimizer.step()
    seconds = watch.seconds() if mpu.get_pipeline_model_parallel_world_size() == 1 else []
    return measured, float(grad_norm), seconds


def gather_parameters(policy: Policy) -> None:
    """Gathers the updated parameters on every rank, after the last update of an iteration."""
    if policy.chunks[0].ddp_config.overlap_param_gather:
        for chunk in policy.chunks:
            chunk.start_param_sync(force_sync=True)


def learning_rate(policy: Policy) -> float:
    """Learning rate of the last optimizer step; not of a tower that has its own."""
    groups, lr = policy.optimizer.param_groups, policy.scheduler.max_lr
    return float(next((group for group in groups if group["max_lr"] == lr), groups[0])["lr"])


def counts_tokens() -> bool:
    """Whether this rank adds its values to sums over all ranks, so that every token is counted once."""
    is_last = mpu.is_pipeline_last_stage(ignore_virtual=True)
    return bool(is_last and mpu.get_tensor_model_parallel_rank() == 0)
