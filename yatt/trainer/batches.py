"""Rollouts to packed micro-batches.

Sequences lie one after the other (THD); each is padded to the multiple that context and sequence
parallelism need, at its end, where causal attention keeps padding from being seen. Sequences are
ordered by length, so that attention can take neighbours of equal length as one batch.

Suffixes: S tokens of a packed stream on this context-parallel rank, T completion tokens.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from yatt.records.message import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sequence to train on. `ids` int64 prompt and completion; logprobs float32 of the completion.

    `start` is where its completion tokens begin among those of the whole rollout batch.
    """

    ids: Tensor
    num_prompt_tokens: int
    sampler_logprobs: Tensor
    start: int

    @property
    def num_completion_tokens(self) -> int:
        """Tokens that are trained on."""
        return len(self.ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """How sequences are cut: `align` is the multiple of every sequence's length."""

    align: int
    cp_size: int = 1
    cp_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward pass takes, and where its completion tokens are.

    Args:
        tokens: int64 [1, S].
        positions: int64 [1, S], of each token in its sequence.
        labels_T: int64, the completion tokens predicted on this rank.
        where_T: int64, index in S of the position that predicts each of them.
        flat_T: int64, their place among the completion tokens of the whole rollout batch.
        weights_T, sampler_T: float32, loss weight and sampler's log-prob of each of them.
        packed: bounds of the sequences, before the context-parallel cut.
    """

    tokens: Tensor
    positions: Tensor
    labels_T: Tensor
    where_T: Tensor
    flat_T: Tensor
    weights_T: Tensor
    sampler_T: Tensor
    packed: PackedSeqParams


def sample_of(rollout: Rollout, start: int) -> Sample:
    """Tensors of one rollout as it came over the wire."""
    prompt, completion = (
        _from_bytes(rollout.prompt_ids, torch.int32),
        _from_bytes(rollout.completion_ids, torch.int32),
    )
    return Sample(
        ids=torch.cat([prompt, completion]).long(),
        num_prompt_tokens=len(prompt),
        sampler_logprobs=_from_bytes(rollout.sampler_logprobs, torch.float32),
        start=start,
    )


def micro_batch(
    samples: Sequence[Sample], weights: Sequence[Tensor], cut: Slice, device: torch.device
) -> MicroBatch:
    """Pack these samples; none at all gives a pass over one padding sequence that trains nothing.

    Args:
        weights: float32, loss weight of each completion token of each sample.
    """
    order = sorted(range(len(samples)), key=lambda index: len(samples[index].ids))
    rows = [_row(samples[index], weights[index], cut.align) for index in order] or [_empty_row(cut.align)]
    lengths = [row.tokens.numel() for row in rows]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    mine_S = _held_positions(bounds.tolist(), cut)
    flat_S = torch.cat([row.flat for row in rows])[mine_S]
    where_T = (flat_S >= 0).nonzero().squeeze(1)

    def joined(parts: list[Tensor], at: Tensor) -> Tensor:
        return torch.cat(parts)[mine_S][at].to(device)

    everywhere = torch.arange(len(mine_S))
    cu_seqlens = bounds.to(torch.int32).to(device)
    return MicroBatch(
        tokens=joined([row.tokens for row in rows], everywhere)[None],
        positions=joined([torch.arange(length) for length in lengths], everywhere)[None],
        labels_T=joined([row.labels for row in rows], where_T),
        where_T=where_T.to(device),
        flat_T=flat_S[where_T],
        weights_T=joined([row.weights for row in rows], where_T),
        sampler_T=joined([row.sampler for row in rows], where_T),
        packed=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """One padded sequence: position i sees tokens[i] and predicts labels[i]; flat is -1 where nothing is."""

    tokens: Tensor
    labels: Tensor
    flat: Tensor
    weights: Tensor
    sampler: Tensor


def _row(sample: Sample, weights: Tensor, align: int) -> _Row:
    length = max(len(sample.ids) - 1, 1)
    padded = length + -length % align
    first, last = sample.num_prompt_tokens - 1, len(sample.ids) - 1
    row = _empty_row(padded)
    row.tokens[:length] = sample.ids[:length]
    row.labels[:last] = sample.ids[1:]
    row.flat[first:last] = torch.arange(sample.start, sample.start + sample.num_completion_tokens)
    row.weights[first:last] = weights
    row.sampler[first:last] = sample.sampler_logprobs
    return row


def _empty_row(length: int) -> _Row:
    return _Row(
        tokens=torch.zeros(length, dtype=torch.int64),
        labels=torch.zeros(length, dtype=torch.int64),
        flat=torch.full((length,), -1, dtype=torch.int64),
        weights=torch.zeros(length),
        sampler=torch.zeros(length),
    )


def _held_positions(bounds: list[int], cut: Slice) -> Tensor:
    """Places in the whole stream this context-parallel rank holds: chunks r and 2n-1-r of each sequence."""
    if cut.cp_size == 1:
        return torch.arange(bounds[-1])
    held = []
    for begin, end in itertools.pairwise(bounds):
        chunks = torch.arange(begin, end).chunk(2 * cut.cp_size)
        held += [chunks[cut.cp_rank], chunks[2 * cut.cp_size - 1 - cut.cp_rank]]
    return torch.cat(held)


def _from_bytes(raw: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
