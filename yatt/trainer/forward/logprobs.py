"""Log-probs and entropy of tokens from hidden states, without the logits of all tokens at once.

The logits are computed for one chunk of rows at a time, and again in the backward pass. So one number per
token is stored, and memory holds only a few copies of one chunk. Tensor parallelism may split the
vocabulary.

Suffixes: R rows (tokens), C rows of one chunk, V entries of the vocabulary on this rank, H hidden size, K
entries of the vocabulary that are wanted of a row.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from yatt.trainer.mcore.cpu_matmul import fast_matmul

FAR_BELOW = -1e30
"""Used instead of minus infinity, because a product with zero must stay zero."""

CHUNK_BYTES = 64 << 20
"""Maximum bytes of one chunk's float32 logits on this rank, within `MIN_CHUNK` and `MAX_CHUNK` rows."""
MIN_CHUNK, MAX_CHUNK = 128, 1024


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The vocabulary's split over tensor-parallel ranks; entries from `vocab_size` on are padding."""

    group: dist.ProcessGroup
    vocab_size: int


def token_logprobs(
    hidden_RH: Tensor, weight_VH: Tensor, labels_R: Tensor, shard: VocabularyShard, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy of each distribution, with the softmax at `temperature`.

    Args:
        hidden_RH: the same on every rank of the group. weight_VH: this rank's part of the output layer.
        labels_R: int64, in the whole vocabulary.

    Returns:
        Both float32 [R], the same on every rank of the group, differentiable in hidden states and weight. The
        gradient of the hidden states is this rank's part of a sum over the group.
    """
    head = _Head(shard, temperature, labels_R - shard.group.rank() * weight_VH.size(0))
    logprobs_R, entropy_R = _ChunkedHead.apply(hidden_RH, weight_VH, head)  # type: ignore[no-untyped-call]
    return logprobs_R, entropy_R


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Of each row float32: the label's log-prob [R], the entropy [R], the log-probs of the wanted entries
    [R, K], meaningless where none is wanted, and the logarithm of the probability of all others [R]."""

    labels_R: Tensor
    entropy_R: Tensor
    wanted_RK: Tensor
    rest_R: Tensor


def wanted_logprobs(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    labels_R: Tensor,
    shard: VocabularyShard,
    temperature: float,
    wanted_RK: Tensor,
) -> RowLogprobs:
    """The same as `token_logprobs`, and of each row the log-probs of some entries and of all others together.

    The others' probability is a sum over the others, not 1 less the sum of the wanted: so its logarithm is
    right, and its gradient at most the probabilities, however little is left.

    Args:
        wanted_RK: int32, different entries of the whole vocabulary; below 0: none. Not all of them.
    """
    first = shard.group.rank() * weight_VH.size(0)
    head = _Head(shard, temperature, labels_R - first, wanted_RK - first)
    return RowLogprobs(*_ChunkedHead.apply(hidden_RH, weight_VH, head))  # type: ignore[no-untyped-call]


def chunk_rows(num_entries: int) -> int:
    """Number of rows per chunk, with `num_entries` logits per row."""
    return min(max(CHUNK_BYTES // (4 * num_entries), MIN_CHUNK), MAX_CHUNK)


@dataclass(frozen=True, slots=True)
class _Head:
    """The output layer. `labels_R` and `wanted_RK` are relative to this rank's first entry; others are out of
    range."""

    shard: VocabularyShard
    temperature: float
    labels_R: Tensor
    wanted_RK: Tensor | None = None

    def logits(self, hidden_CH: Tensor, weight_VH: Tensor) -> Tensor:
        """Logits in float32, divided by the temperature; padding entries are `FAR_BELOW`."""
        logits_CV = fast_matmul(hidden_CH, weight_VH.t()).float()
        logits_CV /= self.temperature
        num_real = self.shard.vocab_size - self.shard.group.rank() * weight_VH.size(0)
        logits_CV[:, max(num_real, 0) :] = FAR_BELOW
        return logits_CV

    def of_labels(self, logits_CV: Tensor, rows: slice) -> Tensor:
        """The label's logit of each row; 0 if the label is on another rank."""
        here_C, is_here_C = self.here(rows, logits_CV.size(1))
        return logits_CV.gather(1, here_C[:, None]).squeeze(1) * is_here_C

    def here(self, rows: slice, num_entries: int) -> tuple[Tensor, Tensor]:
        """A valid local index for each label of these rows, and whether the label is on this rank."""
        return _here(self.labels_R[rows], num_entries)


def _here(entries: Tensor, num_entries: int) -> tuple[Tensor, Tensor]:
    """A valid local index for each entry, int64, and whether the entry is on this rank."""
    is_here = (entries >= 0) & (entries < num_entries)
    return entries.clamp(0, num_entries - 1).long(), is_here


def _without_wanted(logits_CV: Tensor, here_CK: Tensor, is_here_CK: Tensor) -> Tensor:
    """Sets the wanted entries to `FAR_BELOW`, in place."""
    highest_CK = torch.where(is_here_CK, FAR_BELOW, torch.inf).to(logits_CV.dtype)
    return logits_CV.scatter_reduce_(1, here_CK, highest_CK, "amin")


def _summed(
    tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def _chunks(num_rows: int, num_entries: int) -> list[slice]:
    step = chunk_rows(num_entries)
    return [slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step)]


class _Wanted:
    """The wanted entries of all rows, while the chunks are computed."""

    def __init__(self, entries_RK: Tensor, like_R: Tensor) -> None:
        self._entries_RK = entries_RK
        self._logits_RK = like_R.new_empty(entries_RK.shape)
        self._rest_top_R, self._rest_sum_R = torch.empty_like(like_R), torch.empty_like(like_R)

    def note_logits(self, logits_CV: Tensor, rows: slice) -> None:
        """Takes the wanted entries' logits; 0 where the entry is on another rank, or none."""
        here_CK, is_here_CK = _here(self._entries_RK[rows], logits_CV.size(1))
        self._logits_RK[rows] = logits_CV.gather(1, here_CK) * is_here_CK

    def note_rest(self, shifted_CV: Tensor, spare_CV: Tensor, rows: slice) -> None:
        """Adds up the other entries of a chunk.

        Args:
            shifted_CV: logits less the row's maximum; overwritten, as `spare_CV` is.
        """
        _without_wanted(shifted_CV, *_here(self._entries_RK[rows], shifted_CV.size(1)))
        self._rest_top_R[rows] = shifted_CV.max(dim=1).values
        torch.sub(shifted_CV, self._rest_top_R[rows, None], out=spare_CV)
        self._rest_sum_R[rows] = spare_CV.exp_().sum(1)

    def logprobs(self, top_R: Tensor, log_sum_R: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        """Log-probs of the wanted entries, and of the others together. Collective."""
        top_R = self._rest_top_R + top_R
        largest_R = _summed(top_R.clone(), group, dist.ReduceOp.MAX)
        rest_R = _summed(self._rest_sum_R * (top_R - largest_R).exp(), group).log() + largest_R
        return _summed(self._logits_RK, group) - log_sum_R[:, None], rest_R - log_sum_R


def _wanted_gradient(
    head: _Head, logs_CV: Tensor, probs_CV: Tensor, rows: slice, of_wanted: list[Tensor | None]
) -> Tensor:
    """The gradient of a chunk's logits from its wanted entries and the others together.

    Args:
        of_wanted: the others' log-probs [R], and the gradients of the outputs [R, K] and [R].
    """
    assert head.wanted_RK is not None, "this is their gradient"
    rest_R, wanted_grad_RK, rest_grad_R = of_wanted
    here_CK, is_here_CK = _here(head.wanted_RK[rows], logs_CV.size(1))
    grad_CV, total_C = torch.zeros_like(probs_CV), probs_CV.new_zeros(len(probs_CV))
    if rest_grad_R is not None and rest_R is not None:
        torch.sub(logs_CV, rest_R[rows, None], out=grad_CV)
        _without_wanted(grad_CV, here_CK, is_here_CK).exp_().mul_(rest_grad_R[rows, None])
        total_C += rest_grad_R[rows]
    if wanted_grad_RK is not None:
        grad_CV.scatter_add_(1, here_CK, wanted_grad_RK[rows] * is_here_CK)
        total_C += wanted_grad_RK[rows].sum(1)
    return grad_CV.addcmul_(probs_CV, total_C[:, None], value=-1)


class _ChunkedHead(torch.autograd.Function):
    """Log softmax at a label, and entropy, of `hidden @ weight.t() / temperature`.

    With x the logits of one row, m their maximum on this rank, S = sum exp(x - m) and
    B = sum exp(x - m)(x - m) over this rank's entries, L = log sum exp x over all entries: the entropy is the
    sum over ranks of exp(m - L) (S (L - m) - B). With p = softmax(x) and H its entropy:
    d log p_y / dx_j = [j = y] - p_j, and
    dH / dx_j = -p_j (log p_j + H). With r the probability of the entries that are not wanted:
    d log r / dx_j = [j not wanted] p_j / r - p_j.
    """

    @staticmethod
    def forward(ctx: Any, hidden_RH: Tensor, weight_VH: Tensor, head: _Head) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        num_rows, group = hidden_RH.size(0), head.shard.group
        top_R, sum_R, weighted_R, label_R = hidden_RH.new_empty(4, num_rows, dtype=torch.float32)
        wanted = None if head.wanted_RK is None else _Wanted(head.wanted_RK, top_R)
        for rows in _chunks(num_rows, weight_VH.size(0)):
            logits_CV = head.logits(hidden_RH[rows], weight_VH)
            label_R[rows] = head.of_labels(logits_CV, rows)
            if wanted is not None:
                wanted.note_logits(logits_CV, rows)
            top_R[rows] = logits_CV.max(dim=1).values
            logits_CV -= top_R[rows, None]
            probs_CV = logits_CV.exp()
            sum_R[rows] = probs_CV.sum(1)
            weighted_R[rows] = probs_CV.mul_(logits_CV).sum(1)
            if wanted is not None:
                wanted.note_rest(logits_CV, probs_CV, rows)
        largest_R = _summed(top_R.clone(), group, dist.ReduceOp.MAX)
        log_sum_R = _summed(sum_R * (top_R - largest_R).exp(), group).log() + largest_R
        part_R = (top_R - log_sum_R).exp() * (sum_R * (log_sum_R - top_R) - weighted_R)
        label_R, entropy_R = _summed(torch.stack([label_R, part_R]), group)
        found = () if wanted is None else wanted.logprobs(top_R, log_sum_R, group)
        ctx.save_for_backward(hidden_RH, weight_VH, log_sum_R, entropy_R, *found[1:])
        ctx.head = head
        return label_R - log_sum_R, entropy_R.clone(), *found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor, None]:
        hidden_RH, weight_VH, log_sum_R, entropy_R, *rest = ctx.saved_tensors
        head, (logprob_grad_R, entropy_grad_R, *wanted_grads) = ctx.head, grads
        hidden_grad_RH = torch.zeros_like(hidden_RH)
        weight_grad_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        for rows in _chunks(hidden_RH.size(0), weight_VH.size(0)):
            logs_CV = head.logits(hidden_RH[rows], weight_VH)
            logs_CV -= log_sum_R[rows, None]
            probs_CV = logs_CV.exp()
            if wanted_grads:
                grad_CV = _wanted_gradient(head, logs_CV, probs_CV, rows, [*rest, *wanted_grads])
            else:
                grad_CV = torch.zeros_like(probs_CV)
            if entropy_grad_R is not None:
                logs_CV += entropy_R[rows, None]
                of_entropy_CV = logs_CV.mul_(probs_CV).mul_(-entropy_grad_R[rows, None])
                grad_CV = grad_CV.add_(of_entropy_CV) if wanted_grads else of_entropy_CV
            if logprob_grad_R is not None:
                here_C, is_here_C = head.here(rows, weight_VH.size(0))
                grad_CV -= probs_CV.mul_(logprob_grad_R[rows, None])
                grad_CV.scatter_add_(1, here_C[:, None], (logprob_grad_R[rows] * is_here_C)[:, None])
            del logs_CV, probs_CV
            grad_CV = (grad_CV / head.temperature).to(weight_VH.dtype)
            hidden_grad_RH[rows] = fast_matmul(grad_CV, weight_VH)
            weight_grad_VH += fast_matmul(grad_CV.t(), hidden_RH[rows])
        return hidden_grad_RH, weight_grad_VH.to(weight_VH.dtype), None
