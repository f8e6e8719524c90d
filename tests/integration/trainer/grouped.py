"""Experts computed by grouped products: whether these are used, and how experts lie in memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from yatt.trainer.mcore import grouped_experts
from yatt.trainer.mcore.grouped_experts import GroupedExperts
from yatt.trainer.mcore.grouped_product import grouped_product, stacked_matrices as put_together
from yatt.trainer.mcore.model import Policy

calls: list[int] = []
"""The number of matrices of each grouped product."""


def counted_product(rows: Tensor, ends: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    calls.append(len(matrices))
    return grouped_product(rows, ends, matrices)


def use(*, is_used: bool) -> None:
    """Makes this process compute experts by grouped products, or one by one."""
    grouped_experts.DEVICES = ("cpu",) if is_used else ("cuda",)
    grouped_experts.DTYPES = (torch.float32, torch.bfloat16)
    grouped_experts.grouped_product = counted_product
    calls.clear()


def together(policy: Policy) -> list[bool]:
    """Of each layer with experts and each of their two layers: whether all matrices are one view."""
    modules = [m for model in policy.models for m in model.modules() if isinstance(m, GroupedExperts)]
    kinds = [
        [getattr(expert, name).weight for expert in module.local_experts]
        for module in modules
        for name in ("linear_fc1", "linear_fc2")
    ]
    return [put_together(weights).data_ptr() == weights[0].data_ptr() for weights in kinds]
