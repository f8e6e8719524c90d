"""Sums over the context-parallel ranks, which hold parts of the same samples."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor


def sum_over_context_parallel(values_S: Tensor) -> Tensor:
    """The sum of a tensor [S] over these ranks, differentiable. Collective over them.

    The loss of a run is the sum of the losses of its ranks. So the gradient of a sum that all of them use is
    the sum of their gradients.
    """
    if mpu.get_context_parallel_world_size() == 1:
        return values_S
    return _Sum.apply(values_S)  # type: ignore[no-any-return,no-untyped-call]  # torch has no types for it


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, values_S: Tensor) -> Tensor:
        return _summed(values_S)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        return _summed(gradients[0])


def _summed(values_S: Tensor) -> Tensor:
    total_S = values_S.detach().clone()
    dist.all_reduce(total_S, group=mpu.get_context_parallel_group())
    return total_S
