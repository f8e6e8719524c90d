"""Packs rollouts into micro-batches.

Sequences are concatenated (THD). Each is padded at its end to the multiple that context and sequence
parallelism need; causal attention masks this padding. Sequences are ordered by length, so that attention can
compute adjacent sequences of equal length as one batch. If all have one length, they form a plain batch.

On CPU, padding sequences fill a stream up to one of few lengths, because a matrix product there compiles and
keeps a kernel for each shape (`cpu_matmul`).

Suffixes: S tokens on this context-parallel rank, B sequences, T completion tokens, R rows of logits, K
likeliest tokens of a teacher.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from yatt.core.samples.placeholders import placed_in
from yatt.records.episode import Likeliest, Turn
from yatt.records.message import PlacedMedia, Rollout
from yatt.trainer.attention.media_batch import (
    AddedLevels,
    MediaBatch,
    PlacedSequence,
    media_batch,
)
from yatt.trainer.attention.varlen import VarlenBounds, varlen_bounds


@dataclass(frozen=True, slots=True)
class TaughtTokens:
    """A teacher's likeliest tokens in the places of completion tokens, on the host.

    Args:
        ids_TK: int32; -1 where there are fewer than K.
        logprobs_TK: the teacher's, float32; minus infinity there.
        coefs_T: factor of each token's loss, float32; 0: no teacher has said anything.
    """

    ids_TK: Tensor
    logprobs_TK: Tensor
    coefs_T: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One sequence to train on.

    Args:
        ids: int64, all turns in sequence.
        is_sampled: bool, the loss mask: which of them the policy sampled. The first is never one.
        sampler_logprobs: float32, of the sampled tokens.
        token_rewards: float32, added to their advantages; None: 0.
        likeliest: a teacher's likeliest tokens in the places of sampled ones, by the first of these.
        start: index of its first sampled token among those of the whole rollout batch.
        media: pictures in it; their places count from the first token.
    """

    ids: NDArray[np.int64]
    is_sampled: NDArray[np.bool_]
    sampler_logprobs: NDArray[np.float32]
    start: int
    media: tuple[PlacedMedia, ...] = ()
    token_rewards: NDArray[np.float32] | None = None
    likeliest: tuple[tuple[int, Likeliest], ...] = ()

    @property
    def num_completion_tokens(self) -> int:
        """Number of tokens to train on."""
        return int(np.count_nonzero(self.is_sampled))


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLayout:
    """Padding and context-parallel split of sequences. Every sequence's length is a multiple of `align`.

    `has_few_lengths`: whether streams are filled up, see `bucketed_length`. `merge_size`: as
    `Shape.picture_merge`.
    """

    align: int
    cp_size: int = 1
    cp_rank: int = 0
    has_few_lengths: bool = False
    merge_size: int | None = None


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):  # type: ignore[misc]  # megatron-core has no types
    """The bounds of the sequences of a stream, before the context-parallel split.

    `runs` says it without a copy from the device: (tokens on this rank, number of sequences) of adjacent
    sequences of one length, in order. `media` is what a model that takes pictures needs; `added` are the
    features that its first layers add, from its forward pass to its backward pass.
    """

    runs: tuple[tuple[int, int], ...]
    cut: SequenceLayout
    media: MediaBatch | None = None
    added: AddedLevels | None = None

    @functools.cached_property
    def varlen(self) -> VarlenBounds:
        """The same for the kernel that computes a stream at once."""
        lengths = [length for length, count in self.runs for _ in range(count)]
        return varlen_bounds(lengths, self.cut.cp_size, self.cut.cp_rank, self.cu_seqlens_q.device)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What came with completion tokens, float32: the sampler's log-probs, and what their advantages gain
    (None: nothing); and what a teacher has said."""

    logprobs_T: Tensor
    rewards_T: Tensor | None
    taught: TaughtTokens | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Inputs of one forward pass, and the positions of its completion tokens.

    Args:
        tokens: int64 [1, S] packed, or [B, S / B] where all sequences are of one length.
        positions: int64, of each token in its sequence, shaped like `tokens`.
        labels_T: int64, the completion tokens predicted on this rank.
        rows_R: int64, R >= T: index in the hidden states [S / B, B], flattened, of the position that predicts
            each of them; rows beyond T are padding and are not used.
        flat_T: int64, their index among the completion tokens of the whole rollout batch.
        weights_T: float32, loss weight of each of them.
        sampled: what came with each of them.
        samples_T: int64, the sample of each of them, by its place in this micro-batch.
        lengths_N: int64, completion tokens of each sample, those on other context-parallel ranks included.
        packed: bounds of the sequences, before the context-parallel split; None for a plain batch.
    """

    tokens: Tensor
    positions: Tensor
    labels_T: Tensor
    rows_R: Tensor
    flat_T: Tensor
    weights_T: Tensor
    sampled: SampledTokens
    samples_T: Tensor
    lengths_N: Tensor
    packed: PackedSequences | None

    @property
    def sampler_T(self) -> Tensor:
        """The sampler's log-prob of each completion token, float32."""
        return self.sampled.logprobs_T

    @property
    def is_trained_T(self) -> Tensor:
        """Whether each token is trained on, bool; those of masked samples are not."""
        return self.weights_T > 0


def sample_of(rollout: Rollout, start: int) -> TrainSample:
    """Decodes one received rollout into arrays."""
    turns = rollout.turns
    return TrainSample(
        ids=np.concatenate([np.frombuffer(turn.token_ids, dtype="<i4") for turn in turns]).astype(np.int64),
        is_sampled=np.repeat([turn.is_sampled for turn in turns], [turn.num_tokens for turn in turns]),
        sampler_logprobs=np.concatenate([np.frombuffer(turn.logprobs, dtype="<f4") for turn in turns]),
        start=start,
        media=placed_in(turns),
        token_rewards=_token_rewards(turns),
        likeliest=_likeliest(turns),
    )


def _likeliest(turns: Sequence[Turn]) -> tuple[tuple[int, Likeliest], ...]:
    ends = itertools.accumulate(turn.num_tokens if turn.is_sampled else 0 for turn in turns)
    return tuple(
        (end - turn.num_tokens, turn.likeliest)
        for turn, end in zip(turns, ends, strict=True)
        if turn.likeliest is not None
    )


def _token_rewards(turns: Sequence[Turn]) -> NDArray[np.float32] | None:
    """The rewards of all sampled tokens; a turn without any has zeros. None if no turn has some."""
    if not any(turn.token_rewards for turn in turns):
        return None
    parts = [
        np.frombuffer(turn.token_rewards or bytes(4 * turn.num_tokens), dtype="<f4")
        for turn in turns
        if turn.is_sampled
    ]
    found: NDArray[np.float32] = np.concatenate(parts)
    return found


def one_turn(prompt: Sequence[int], completion: Sequence[int], start: int) -> TrainSample:
    """A prompt and its completion; log-probs of the sampler are 0."""
    return TrainSample(
        ids=np.array([*prompt, *completion], np.int64),
        is_sampled=np.repeat([False, True], [len(prompt), len(completion)]),
        sampler_logprobs=np.zeros(len(completion), np.float32),
        start=start,
    )


def micro_batch(
    samples: Sequence[TrainSample],
    weights: Sequence[NDArray[np.float32]],
    cut: SequenceLayout,
    device: torch.device,
) -> MicroBatch:
    """Packs these samples. Without samples, the result is one padding sequence that trains nothing.

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
    is_plain = cut.cp_size == 1 and cut.merge_size is None and len(set(lengths)) == 1
    shape = (len(lengths), lengths[0]) if is_plain else (1, len(held_S))
    shown = [PlacedSequence(max(len(samples[index].ids) - 1, 1), samples[index].media) for index in order]
    media = None
    if cut.merge_size is not None:
        media = media_batch(shown, lengths, held_S, cut.merge_size, device)

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        tokens=tensor(stream.tokens[held_S].reshape(shape)),
        positions=tensor(positions_S.reshape(shape)),
        labels_T=tensor(stream.labels[held_T]),
        rows_R=tensor(_rows(where_T, shape, cut)),
        flat_T=torch.from_numpy(stream.flat[held_T]),
        weights_T=tensor(stream.weights[held_T]),
        sampled=SampledTokens(
            tensor(stream.sampler[held_T]),
            tensor(stream.rewards[held_T]) if stream.has_rewards else None,
            stream.taught_at(held_T) if any(each.likeliest for each in samples) else None,
        ),
        samples_T=tensor(stream.samples[held_T]),
        lengths_N=torch.tensor([each.num_completion_tokens for each in samples], device=device),
        packed=None if is_plain else _packed(lengths, cut, device, media),
    )


def bucketed_length(length: int) -> int:
    """Rounds up to a bucket: eight buckets per power of two; exact below 64."""
    step = 1 if length < 64 else 1 << (length.bit_length() - 4)
    return length + -length % step


def _filled_up(lengths: list[int], cut: SequenceLayout) -> list[int]:
    """Adds lengths of padding sequences, if the stream must have one of few lengths.

    Several sequences of one length stay a plain batch: if this recurs, the data has few lengths anyway.
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
    """Converts indices of a batch [B, S / B] to indices of hidden states [S / B, B]; the padding is 0.

    There is at least one row; under sequence parallelism, a multiple of the ranks that share the rows.
    """
    num_rows = bucketed_length(len(where_T)) if cut.has_few_lengths else len(where_T)
    rows_R = np.zeros(max(num_rows, 1) + -max(num_rows, 1) % cut.align, np.int64)
    sequences_T, places_T = np.divmod(where_T, shape[1])
    rows_R[: len(where_T)] = places_T * shape[0] + sequences_T
    return rows_R


class _Stream:
    """The packed stream. Position i has input tokens[i] and predicts labels[i]; flat[i] is -1 if unused."""

    def __init__(self, length: int) -> None:
        self.tokens, self.labels = np.zeros(length, np.int64), np.zeros(length, np.int64)
        self.flat, self.samples = np.full(length, -1, np.int64), np.zeros(length, np.int64)
        self.weights, self.sampler = np.zeros(length, np.float32), np.zeros(length, np.float32)
        self.rewards, self.has_rewards = np.zeros(length, np.float32), False
        self.likeliest: list[tuple[NDArray[np.int64], Likeliest]] = []  # with the places of their tokens

    def put(self, at: int, number: int, sample: TrainSample, weights: NDArray[np.float32]) -> None:
        """Writes one sequence from position `at` on; its last token is only a label."""
        last = at + len(sample.ids) - 1
        completion = at + np.flatnonzero(sample.is_sampled[1:])
        self.tokens[at : max(last, at + 1)] = sample.ids[: max(last - at, 1)]
        self.labels[at:last] = sample.ids[1:]
        self.flat[completion] = np.arange(sample.start, sample.start + sample.num_completion_tokens)
        self.weights[completion] = weights
        self.sampler[completion] = sample.sampler_logprobs
        if sample.token_rewards is not None:
            self.rewards[completion], self.has_rewards = sample.token_rewards, True
        for first, each in sample.likeliest:
            num_tokens = len(each.ids) // (4 * each.count)
            self.likeliest.append((completion[first : first + num_tokens], each))
        self.samples[completion] = number

    def taught_at(self, held_T: NDArray[np.int64]) -> TaughtTokens:
        """What a teacher has said of these places."""
        rows, most = np.full(len(self.flat), -1, np.int64), max(each.count for _, each in self.likeliest)
        rows[held_T] = np.arange(len(held_T))
        ids_TK = np.full((len(held_T), most), -1, np.int32)
        logprobs_TK = np.full((len(held_T), most), -np.inf, np.float32)
        coefs_T = np.zeros(len(held_T), np.float32)
        for places, each in self.likeliest:
            is_held, rows_T = rows[places] >= 0, rows[places]
            for target, raw in ((ids_TK, each.ids), (logprobs_TK, each.logprobs)):
                found = np.frombuffer(raw, target.dtype.newbyteorder("<")).reshape(len(places), each.count)
                target[rows_T[is_held], : each.count] = found[is_held]
            coefs_T[rows_T[is_held]] = each.coef
        return TaughtTokens(*(torch.from_numpy(each) for each in (ids_TK, logprobs_TK, coefs_T)))


def _held_positions(bounds: list[int], cut: SequenceLayout) -> NDArray[np.int64]:
    """Stream positions on this context-parallel rank r of n: chunks r and 2n-1-r of each sequence."""
    if cut.cp_size == 1:
        return np.arange(bounds[-1])
    held = []
    for begin, end in itertools.pairwise(bounds):
        chunks = np.split(np.arange(begin, end), 2 * cut.cp_size)
        held += [chunks[cut.cp_rank], chunks[2 * cut.cp_size - 1 - cut.cp_rank]]
    return np.concatenate(held)


def _packed(
    lengths: list[int], cut: SequenceLayout, device: torch.device, media: MediaBatch | None
) -> PackedSequences:
    bounds = [0, *itertools.accumulate(lengths)]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        runs=tuple((length // cut.cp_size, len(list(same))) for length, same in itertools.groupby(lengths)),
        cut=cut,
        media=media,
    )
