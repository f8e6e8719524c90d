"""A checksum of a tensor's bytes, computed on the tensor's device; also in parts, which have boxes of it.

The trainer computes it from its live parameters; an engine computes it from what it reads and from what it
holds. It detects stale, mixed and damaged weights, but not an adversary.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

WORD_BYTES = 8
CPU_CHUNK_WORDS = 1 << 15
"""256 KiB: a chunk stays in a core's cache, because it is summed twice."""

ROW_WORDS = 512

GPU_CHUNK_WORDS = 1 << 24
_MODULUS = 1 << 64


def tensor_checksum(tensor: Tensor) -> str:
    """``dtype/shape/hex``: see `described_sum` and `box_sum`; the box is the whole tensor."""
    zeros = (0,) * tensor.dim()
    return described_sum(dtype_name(tensor), tuple(tensor.shape), box_sum(tensor, zeros, tuple(tensor.shape)))


def described_sum(dtype: str, shape: Sequence[int], total: int | None) -> str:
    """``dtype/shape/hex``; without the number if it is not known."""
    return f"{dtype}/{'x'.join(map(str, shape))}/{'' if total is None else f'{total:016x}'}"


def dtype_name(tensor: Tensor) -> str:
    """Torch's name of the dtype, without the module's."""
    return str(tensor.dtype).removeprefix("torch.")


def box_sum(box: Tensor, offset: Sequence[int], shape: Sequence[int]) -> int:
    """What a box of a tensor contributes to the tensor's checksum; a checksum is the sum over its boxes,
    modulo 2^64.

    A tensor's checksum is the sum of (2 i + 1) x_i modulo 2^64 over its bytes in words x_i. The bytes are
    those of the contiguous tensor, padded with zeros to a whole word. An odd factor has an inverse modulo
    2^64, so a change of one word always changes the sum.

    Args:
        offset, shape: the box's first element and the shape of the whole tensor, of one or two dimensions.
    """
    box, size = box.detach(), box.element_size()
    stride = math.prod(shape[1:]) * size
    first = offset[0] * stride + sum(offset[1:]) * size if offset else 0
    if tuple(box.shape[1:]) == tuple(shape[1:]):
        return _run_sum(box, first) % _MODULUS
    assert box.dim() == 2, "tensors of more dimensions are cut along the first"
    sizes = (stride, first, box.shape[1] * size)
    if all(number % WORD_BYTES == 0 for number in sizes) and box.data_ptr() % WORD_BYTES == 0:
        words = box.contiguous().view(torch.int64)
        return _rows_sum(words, first // WORD_BYTES, stride // WORD_BYTES) % _MODULUS
    return sum(_run_sum(row, first + index * stride) for index, row in enumerate(box)) % _MODULUS


def _run_sum(run: Tensor, first_byte: int) -> int:
    """The sum over consecutive bytes of the tensor, from `first_byte` on."""
    base, lead = divmod(first_byte, WORD_BYTES)
    words = _words(run, lead)
    whole = len(words) // ROW_WORDS * ROW_WORDS
    total = _rows_sum(words[:whole].view(-1, ROW_WORDS), base, ROW_WORDS) if whole else 0
    rest = words[whole:]
    return total + int((rest * _factors(base + whole, len(rest), words)).sum())


def _rows_sum(words: Tensor, base: int, stride: int) -> int:
    """The sum over rows of words; row r begins at word `base` + r x `stride`.

    The factor of a word is that of its column in the first row, and 2 `stride` more in each further row. So
    only the sums of columns and of rows are multiplied: additions are several times as fast.
    """
    rows, width = words.shape
    height = max(1, (CPU_CHUNK_WORDS if words.device.type == "cpu" else GPU_CHUNK_WORDS) // width)
    columns = torch.zeros(width, dtype=torch.int64, device=words.device)
    sums = torch.empty(rows, dtype=torch.int64, device=words.device)
    for start in range(0, rows, height):
        chunk = words[start : start + height]
        columns += chunk.sum(0)
        torch.sum(chunk, 1, out=sums[start : start + height])
    places = torch.arange(rows, device=words.device).mul_(2 * stride)
    return int((columns * _factors(base, width, words)).sum()) + int((sums * places).sum())


def _factors(base: int, size: int, words: Tensor) -> Tensor:
    return torch.arange(base, base + size, device=words.device).mul_(2).add_(1)


def _words(run: Tensor, lead: int) -> Tensor:
    """The bytes as words, after `lead` bytes of zeros."""
    raw = run.contiguous().reshape(-1).view(torch.uint8)
    if lead or len(raw) % WORD_BYTES or raw.data_ptr() % WORD_BYTES or raw.storage_offset() % WORD_BYTES:
        raw = F.pad(raw, (lead, -(lead + len(raw)) % WORD_BYTES)).clone()
    return raw.view(torch.int64)
