"""The trainer's side of the sync probe: log-probs of a few random sequences, and the effect of rounding."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from yatt.records.episode import PlacedMedia
from yatt.trainer.attention.batches import MicroBatch, SequenceLayout, micro_batch, one_turn
from yatt.trainer.forward.passes import Tick, completion_logprobs, counts_tokens, reader_of
from yatt.trainer.mcore.model import Policy

ROUNDINGS = 4
"""Number of passes with different roundings; their mean varies by about a third for 30 tokens."""

ROUNDING_EVERY = 16
"""Publications from one measurement of the rounding error to the next; weights change little in between."""


class ProbeSequence(NamedTuple):
    """Token ids, and the places of pictures among them."""

    ids: list[int]
    media: tuple[PlacedMedia, ...] = ()


def probe_logprobs(
    policy: Policy, sequences: list[ProbeSequence], cut: SequenceLayout, tick: Tick
) -> list[Tensor]:
    """Log-prob (temperature 1) of every token but the first of each sequence. Collective over all ranks.

    Args:
        sequences: of two tokens or more each; features of their pictures are there.

    Returns:
        float32 on CPU, the same on every rank.
    """
    micros, start = [], 0
    for ids, media in sequences:
        sample = replace(one_turn(ids[:1], ids[1:], start), media=media)
        micros.append(micro_batch([sample], [sample.sampler_logprobs], cut, policy.device))
        start += len(ids) - 1
    flat = torch.zeros(start, device=policy.device)
    if micros:
        missing = -len(micros) % (policy.mcore.virtual_pipeline_model_parallel_size or 1)
        micros += [micro_batch([], [], cut, policy.device)] * missing
        got = completion_logprobs(policy.chunks, micros, reader_of(policy, 1.0), tick)
        _fill(flat, micros, got)
    lengths = [len(ids) - 1 for ids, _ in sequences]
    return list(torch.split(flat.cpu(), lengths)) if lengths else []


def probe_rounding(
    policy: Policy, sequences: list[ProbeSequence], plain: list[Tensor], cut: SequenceLayout, tick: Tick
) -> float:
    """|Difference| of the probe's log-probs when every layer's output is rounded once more: the largest mean
    of a sequence. Collective.

    Two correct programs for the same weights differ by their roundings. Their effect on the log-probs depends
    on the weights (a deep random model amplifies them, a trained one hardly), so it is measured: each output
    h of a layer becomes h (1 + u e), with u uniform in [-1, 1] and e the dtype's epsilon.

    Args:
        plain: result of `probe_logprobs` for the same sequences.

    Returns:
        The mean in nats; 0 without sequences.
    """
    if not plain:
        return 0.0
    moved = []
    for seed in range(ROUNDINGS):
        with _rounded_once_more(policy, seed):
            got = probe_logprobs(policy, sequences, cut, tick)
        moved.append(max(float((a - b).abs().mean()) for a, b in zip(got, plain, strict=True)))
    return sum(moved) / ROUNDINGS


class MeasuredRounding:
    """The result of `probe_rounding`, measured at the first publication of an attempt and at every
    `ROUNDING_EVERY`-th version; it takes `ROUNDINGS` times as long as the probe itself."""

    def __init__(self) -> None:
        self._newest: float | None = None

    def at(
        self,
        policy_version: int,
        policy: Policy,
        sequences: list[ProbeSequence],
        plain: list[Tensor],
        cut: SequenceLayout,
        tick: Tick,
    ) -> float:
        """Returns the newest result; measures first if it is time. Collective; see `probe_rounding`."""
        if self._newest is None or policy_version % ROUNDING_EVERY == 0:
            self._newest = probe_rounding(policy, sequences, plain, cut, tick)
        return self._newest


@contextlib.contextmanager
def _rounded_once_more(policy: Policy, seed: int) -> Iterator[None]:
    """Adds a hook to every layer. Ranks with the same activations draw the same numbers."""
    generator = torch.Generator(policy.device)

    def move(layer: TransformerLayer, _: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        hidden, context = output
        generator.manual_seed(1_000 * seed + layer.layer_number)
        noise = torch.rand(hidden.shape, generator=generator, device=hidden.device).mul_(2).sub_(1)
        moved = hidden.float() * (1 + noise * torch.finfo(hidden.dtype).eps)
        return moved.to(hidden.dtype), context

    layers = [module for model in policy.models for module in model.modules()]
    hooks = [layer.register_forward_hook(move) for layer in layers if isinstance(layer, TransformerLayer)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _fill(flat: Tensor, micros: list[MicroBatch], got: list[Tensor]) -> None:
    """Writes each token's log-prob at its index, and sums over all ranks."""
    if counts_tokens() and mpu.get_data_parallel_rank() == 0:
        for micro, logprobs_T in zip(micros, got, strict=True):
            flat[micro.flat_T] = logprobs_T
    dist.all_reduce(flat)
