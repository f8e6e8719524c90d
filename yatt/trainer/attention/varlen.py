"""Causal attention of a stream of packed sequences in one kernel: CUDA's, by `torch.nn.attention.varlen`.

Under context parallelism this rank has chunks r and 2n-1-r of 2n of each sequence. Each of them is a sequence
of its own for the kernel, whose keys are those of all chunks up to it: so no mask and no scores are needed.

Suffixes: S tokens of the stream on this rank, K keys, H heads, D head size.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

_LOG = logging.getLogger(__name__)

DEVICES, DTYPES = ("cuda",), (torch.bfloat16, torch.float16)
"""Where there is a kernel."""

CAPABILITY = (8, 0)
"""The first GPUs that have it: Ampere."""

MOST_HEAD_SIZE = 256
SMALL_WINDOW = 6
"""Shorter than the sequences with which a kernel is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenBounds:
    """What the kernel is told about a stream.

    Args:
        queries, keys: int32 [N + 1], the bounds of the sequences among queries and keys.
        longest: most queries and most keys of a sequence.
        source_K: int64, each key's index among the keys of all context-parallel ranks, in the order of the
            ranks; None without context parallelism.
    """

    queries: Tensor
    keys: Tensor
    longest: tuple[int, int]
    source_K: Tensor | None


def varlen_bounds(lengths: Sequence[int], cp_size: int, cp_rank: int, device: torch.device) -> VarlenBounds:
    """Bounds of a stream.

    Args:
        lengths: tokens of each sequence on this rank: even numbers, if `cp_size` is not 1.
    """
    if cp_size == 1:
        bounds = _bounds(lengths, device)
        return VarlenBounds(queries=bounds, keys=bounds, longest=(max(lengths),) * 2, source_K=None)
    held = (cp_rank, 2 * cp_size - 1 - cp_rank)
    halves = [length // 2 for length in lengths]
    starts, total = np.cumsum([0, *lengths[:-1]]), sum(lengths)
    sources = [
        np.arange(half) + _at(chunk, cp_size, total, int(start), half)
        for start, half in zip(starts, halves, strict=True)
        for last in held
        for chunk in range(last + 1)
    ]
    num_keys = [(last + 1) * half for half in halves for last in held]
    return VarlenBounds(
        queries=_bounds([half for half in halves for _ in held], device),
        keys=_bounds(num_keys, device),
        longest=(max(halves), max(num_keys)),
        source_K=torch.from_numpy(np.concatenate(sources)).to(device),
    )


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: VarlenBounds, scale: float, window: int = 0
) -> Tensor:
    """Causal attention within each sequence, with gradients.

    Args:
        query: [S, H, D]; a sequence's queries are those of its last keys.
        key, value: [K, H', D] and [K, H', D'], as `bounds` has them; H' divides H, D' is at most D.
        window: positions that a token attends to, itself included; 0: all. The kernel counts those before.

    Returns:
        [S, H, D'].
    """
    narrow = value.size(-1)
    if narrow < query.size(-1):  # latent attention; the kernel has one size for all three
        value = F.pad(value, (0, query.size(-1) - narrow))
    attended: Tensor = varlen_attn(
        query,
        key,
        value,
        bounds.queries,
        bounds.keys,
        *bounds.longest,
        scale=scale,
        window_size=(window - 1, 0),
        enable_gqa=query.size(1) != key.size(1),
    )
    return attended[..., :narrow]


def varlen_attn(*tensors: Any, **settings: Any) -> Any:
    """torch's function, imported when it is used: the module brings torch's compiler, which takes a rank on
    CPU a second to start.

    Raises:
        ImportError: an old torch, which does not have it.
    """
    from torch.nn.attention.varlen import varlen_attn as kernel

    if not _has_grouped_switch(kernel):
        settings.pop("enable_gqa", None)
    return kernel(*tensors, **settings)


@functools.cache
def _has_grouped_switch(kernel: Callable[..., Any]) -> bool:
    """Whether grouped heads must be switched on. torch 2.11's function always takes fewer heads of keys and
    has no such argument; `varlen_is_right` tests it with grouped heads."""
    return "enable_gqa" in inspect.signature(kernel).parameters


def suits_varlen(
    query: Tensor, value: Tensor, group: dist.ProcessGroup | None = None, *, window: int = 0
) -> bool:
    """Whether the kernel takes these, and is right on this device.

    Args:
        group: ranks that gather keys together, and all ask the same; all of them or none use the kernel.
        window: as for `varlen_attention`.
    """
    if query.device.type not in DEVICES or query.dtype not in DTYPES or not query.numel():
        return False
    if value.size(-1) > query.size(-1) or query.size(-1) > MOST_HEAD_SIZE or query.size(-1) % 8:
        return False
    is_alone = group is None or group.size() == 1
    has_window = window > 0
    return _is_right_on_all(query.device, query.size(-1), has_window, None if is_alone else group)


@functools.cache
def _is_right_on_all(
    device: torch.device, head_size: int, has_window: bool, group: dist.ProcessGroup | None
) -> bool:
    """Asked once: a kernel that fails must not end a run."""
    has_it = device.type != "cuda" or torch.cuda.get_device_capability(device) >= CAPABILITY
    is_right = has_it and varlen_is_right(device, head_size, SMALL_WINDOW if has_window else 0)
    if group is None:
        return is_right
    on_all = torch.tensor(int(is_right), device=device)
    dist.all_reduce(on_all, dist.ReduceOp.MIN, group=group)
    return bool(on_all.item())


def varlen_is_right(device: torch.device, head_size: int, window: int = 0) -> bool:
    """Whether a small stream, with fewer heads of keys and more keys than queries, has the attention and the
    gradients of SDPA with a mask. There is a kernel for each head size."""
    generator = torch.Generator().manual_seed(0)
    num_queries, num_keys = [5, 16, 3], [9, 16, 40]
    shapes = [(num, heads, head_size) for num, heads in ((24, 4), (65, 2), (65, 2), (24, 4))]
    query, key, value, weights = (
        torch.randn(shape, generator=generator).to(device, torch.bfloat16).requires_grad_()
        for shape in shapes
    )
    bounds = VarlenBounds(
        queries=_bounds(num_queries, device), keys=_bounds(num_keys, device), longest=(16, 40), source_K=None
    )
    try:
        with torch.enable_grad():
            ours, theirs = (
                attention(query, key, value, bounds, head_size**-0.5, window)
                for attention in (varlen_attention, masked_attention)
            )
        got, expected = (
            [each, *torch.autograd.grad(each, [query, key, value], weights)] for each in (ours, theirs)
        )
        torch.testing.assert_close(got, expected, rtol=5e-2, atol=5e-2)
    except (RuntimeError, AttributeError, AssertionError, TypeError, ImportError) as error:
        _LOG.warning("attention runs sequence by sequence: torch's varlen_attn on %s: %s", device, error)
        return False
    return True


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: VarlenBounds, scale: float, window: int = 0
) -> Tensor:
    """The same as `varlen_attention`, sequence by sequence with masks: what the kernel is compared with."""
    of_queries, of_keys = (bound.diff().tolist() for bound in (bounds.queries, bounds.keys))
    pairs = ((query, of_queries), (key, of_keys), (value, of_keys))
    split = zip(*(torch.split(x, sizes) for x, sizes in pairs), strict=True)
    found = []
    for queries, keys, values in split:
        rest = len(keys) - len(queries)
        is_seen = torch.ones(len(queries), len(keys), dtype=torch.bool, device=query.device).tril(rest)
        is_seen = is_seen.triu(rest - window + 1) if window else is_seen
        q, k, v = (x.transpose(0, 1)[None] for x in (queries, keys, values))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=is_seen, scale=scale, enable_gqa=True)
        found.append(attended[0].transpose(0, 1))
    return torch.cat(found)


def _at(chunk: int, cp_size: int, total: int, start: int, half: int) -> int:
    """Index of a sequence's chunk among the keys of all ranks, each of which has `total`."""
    is_first = chunk < cp_size
    rank = chunk if is_first else 2 * cp_size - 1 - chunk
    return rank * total + start + (0 if is_first else half)


def _bounds(sizes: Sequence[int], device: torch.device) -> Tensor:
    bounds = np.cumsum([0, *sizes], dtype=np.int32)
    return torch.from_numpy(bounds).to(device)
