"""In place of CUDA's kernel for streams: the same function, slow, on any device."""

import torch
from torch import Tensor

from yatt.trainer.attention import varlen
from yatt.trainer.attention.varlen import VarlenBounds, masked_attention


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, max_q: int, max_k: int, *,
    scale: float, window_size: tuple[int, int], enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """As `torch.nn.attention.varlen.varlen_attn`, with its requirements."""
    assert window_size[0] >= -1 and window_size[1] == 0
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert (max_q, max_k) == (queries.diff().max().item(), keys.diff().max().item())
    assert (queries[-1], keys[-1]) == (len(query), len(key))
    calls.append(len(query))
    bounds = VarlenBounds(queries=queries, keys=keys, longest=(max_q, max_k), source_K=None)
    return masked_attention(query, key, value, bounds, scale, window_size[0] + 1)


calls: list[int] = []
"""The number of queries of each call."""


def fails(*_: object, **__: object) -> Tensor:
    """As a machine whose kernel cannot run."""
    raise RuntimeError("no kernel")


def use(*, is_used: bool, is_there: bool = True) -> None:
    """Makes this process compute attention by it, or sequence by sequence."""
    varlen.DEVICES, varlen.DTYPES = (("cpu",) if is_used else ()), (torch.float32,)
    varlen.varlen_attn = varlen_attn if is_there else fails
    varlen._is_right_on_all.cache_clear()
    calls.clear()
