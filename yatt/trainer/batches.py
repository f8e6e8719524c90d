"""Rollouts to packed micro-batches.

Sequences lie one after the other (THD); each is padded to the multiple that context and sequence
parallelism need, at its end, where causal attention keeps padding from being seen. Sequences are
ordered by length, so that attention can take neighbours of equal length as one batch; where all are
of one length they are a plain batch, and nothing loops over them.

On CPU a stream is filled up to one of few lengths by sequences of padding, because a matrix product
there compiles and keeps a kernel for each shape (`cpu_matmul`).

Suffixes: S tokens on this context-parallel rank, B sequences, T completion tokens, R rows of logits.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from yatt.records.message import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One sequence to train on.

    `ids` int64 is prompt and completion; `sampler_logprobs` float32 is of the completion; `start` is
    where its completion tokens begin among those of the whole rollout batch.
    """

    ids: NDArray[np.int64]
    num_prompt_tokens: int
    sampler_logprobs: NDArray[np.float32]
    start: int

    @property
    def num_completion_tokens(self) -> int:
        """Tokens that are trained on."""
        return len(self.ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLayout:
    """How sequences are cut: `align` is the multiple of every sequence's length.

    `has_few_lengths`: whether streams are filled up, see `bucketed_length`.
    """

    align: int
    cp_size: int = 1
    cp_rank: int = 0
    has_few_lengths: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward pass takes, and where its completion tokens are.

    Args:
        tokens: int64 [1, S] packed, or [B, S / B] where all sequences are of one length.
        positions: int64, of each token in its sequence, shaped like `tokens`.
        labels_T: int64, the completion tokens predicted on this rank.
        rows_R: int64, R >= T: index in the hidden states [S / B, B], flattened, of the position that predicts
            each of them; rows beyond T fill up and are read by nobody.
        flat_T: int64, their place among the completion tokens of the whole rollout batch.
        weights_T, sampler_T: float32, loss weight and sampler's log-prob of each of them.
        samples_T: int64, the sample of each of them, by its place in this micro-batch.
        lengths_N: int64, completion tokens of each sample, those on other context-parallel ranks included.
        packed: bounds of the sequences, before the context-parallel cut; None for a plain batch.
    """

    tokens: Tensor
    positions: Tensor
    labels_T: Tensor
    rows_R: Tensor
    flat_T: Tensor
    weights_T: Tensor
    sampler_T: Tensor
    samples_T: Tensor
    lengths_N: Tensor
    packed: PackedSeqParams | None


def sample_of(rollout: Rollout, start: int) -> TrainSample:
    """Arrays of one rollout as it came over the wire."""
    prompt = np.frombuffer(rollout.prompt_ids, dtype="<i4")
    completion = np.frombuffer(rollout.completion_ids, dtype="<i4")
    return TrainSample(
        ids=np.concatenate([prompt, completion]).astype(np.int64),
        num_prompt_tokens=len(prompt),
        sampler_logprobs=np.frombuffer(rollout.sampler_logprobs, dtype="<f4"),
        start=start,
    )


def micro_batch(
    samples: Sequence[TrainSample],
    weights: Sequence[NDArray[np.float32]],
    cut: SequenceLayout,
    device: torch.device,
) -> MicroBatch:
    """Pack these samples; none at all gives a pass over one padding sequence that trains nothing.

    Args:
        weights: loss weight of each completion token of each sample.
    """
    order = sorted(range(len(samples)), key=lambda index: len(samples[index].ids))
    spans = [max(len(samples[index].ids) - 1, 1) for index in order] or [cut.align]
    lengths = _filled_up([span + -span % cut.align for span in spans], cut)
    bounds = [0, *itertools.accumulate(lengths)]
    stream = _Stream(bounds[-1])
    for index, first in zip(order, bounds[:-1], strict=False):
        stream.put(first, index, samples[index], weights[index])
    held_S = _held_positions(bounds, cut)
    where_T = np.flatnonzero(stream.flat[held_S] >= 0)
    held_T = held_S[where_T]
    positions_S = np.concatenate([np.arange(length) for length in lengths])[held_S]
    is_plain = cut.cp_size == 1 and len(set(lengths)) == 1
    shape = (len(lengths), lengths[0]) if is_plain else (1, len(held_S))

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        tokens=tensor(stream.tokens[held_S].reshape(shape)),
        positions=tensor(positions_S.reshape(shape)),
        labels_T=tensor(stream.labels[held_T]),
        rows_R=tensor(_rows(where_T, shape, cut)),
        flat_T=torch.from_numpy(stream.flat[held_T]),
        weights_T=tensor(stream.weights[held_T]),
        sampler_T=tensor(stream.sampler[held_T]),
        samples_T=tensor(stream.samples[held_T]),
        lengths_N=torch.tensor([each.num_completion_tokens for each in samples], device=device),
        packed=None if is_plain else _packed(bounds, max(lengths), device),
    )


def bucketed_length(length: int) -> int:
    """`length` or up to an eighth more, from 64 on: eight lengths between a power of two and the next."""
    step = 1 if length < 64 else 1 << (length.bit_length() - 4)
    return length + -length % step


def _filled_up(lengths: list[int], cut: SequenceLayout) -> list[int]:
    """These lengths, and those of sequences of padding if the stream is to have one of few lengths.

    Several sequences of one length stay a plain batch: where that happens again and again, lengths are fixed.
    """
    if not cut.has_few_lengths or (len(lengths) > 1 and len(set(lengths)) == 1):
        return lengths
    missing = bucketed_length(sum(lengths)) - sum(lengths)
    missing += -missing % cut.align
    if len(lengths) == 1:
        return [lengths[0] + missing]
    longest = max(lengths)
    rest = [missing % longest] if missing % longest else []
    return lengths + rest + [longest] * (missing // longest)


def _rows(where_T: NDArray[np.int64], shape: tuple[int, int], cut: SequenceLayout) -> NDArray[np.int64]:
    """Places of a batch [B, S / B], which the model's hidden states have as [S / B, B]; filled up with 0.

    Never none at all, and under sequence parallelism a multiple of the ranks that share them.
    """
    num_rows = bucketed_length(len(where_T)) if cut.has_few_lengths else len(where_T)
    rows_R = np.zeros(max(num_rows, 1) + -max(num_rows, 1) % cut.align, np.int64)
    sequences_T, places_T = np.divmod(where_T, shape[1])
    rows_R[: len(where_T)] = places_T * shape[0] + sequences_T
    return rows_R


class _Stream:
    """The packed stream: position i sees tokens[i] and predicts labels[i]; flat is -1 where nothing is."""

    def __init__(self, length: int) -> None:
        self.tokens, self.labels = np.zeros(length, np.int64), np.zeros(length, np.int64)
        self.flat, self.samples = np.full(length, -1, np.int64), np.zeros(length, np.int64)
        self.weights, self.sampler = np.zeros(length, np.float32), np.zeros(length, np.float32)

    def put(self, at: int, number: int, sample: TrainSample, weights: NDArray[np.float32]) -> None:
        """Lay one sequence from position `at`; its last token is only a label."""
        last = at + len(sample.ids) - 1
        completion = slice(at + sample.num_prompt_tokens - 1, last)
        self.tokens[at : max(last, at + 1)] = sample.ids[: max(last - at, 1)]
        self.labels[at:last] = sample.ids[1:]
        self.flat[completion] = np.arange(sample.start, sample.start + sample.num_completion_tokens)
        self.weights[completion] = weights
        self.sampler[completion] = sample.sampler_logprobs
        self.samples[completion] = number


def _held_positions(bounds: list[int], cut: SequenceLayout) -> NDArray[np.int64]:
    """Places in the stream this context-parallel rank holds: chunks r and 2n-1-r of each sequence."""
    if cut.cp_size == 1:
        return np.arange(bounds[-1])
    held = []
    for begin, end in itertools.pairwise(bounds):
        chunks = np.split(np.arange(begin, end), 2 * cut.cp_size)
        held += [chunks[cut.cp_rank], chunks[2 * cut.cp_size - 1 - cut.cp_rank]]
    return np.concatenate(held)


def _packed(bounds: list[int], longest: int, device: torch.device) -> PackedSeqParams:
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
