"""The experts of a layer as two products for all of them, instead of two for each.

The parameters stay separate, with megatron-core's names. Its data parallelism lays them out in one buffer, at
equal distances, so that one view has all of them. Where grouped products are not faster, experts are computed
one by one, as in megatron-core.

Suffixes: T tokens in the order of their experts, E experts, H hidden size, F columns of an expert.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from yatt.trainer.mcore.grouped_product import grouped_product, product_is_right

DEVICES, DTYPES = ("cuda",), (torch.bfloat16,)
"""Where a grouped product is faster; elsewhere torch computes it one by one itself."""

CAPABILITY = (9, 0)
"""The first GPUs for which torch has a kernel: Hopper."""


class ExpertList(nn.ModuleList):
    """Modules that are numbered upwards and list their parameters downwards: megatron's buffers have
    parameters in reverse, so that experts are upwards in memory."""

    def __init__(self, experts: Sequence[nn.Module]) -> None:
        super().__init__(experts)
        self._modules = dict(reversed(self._modules.items()))

    def __iter__(self) -> Iterator[nn.Module]:
        """Yields them upwards."""
        return (self[index] for index in range(len(self)))


class GroupedExperts(SequentialMLP):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's experts without bias, with grouped products where these are faster."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.local_experts: Any = ExpertList(list(self.local_experts))

    def forward(self, hidden_TH: Tensor, tokens_per_expert: Tensor, probs_T: Tensor) -> Any:
        """Maps tokens, sorted by their expert, to the experts' outputs times the router's weights.

        Returns:
            [T, H] and None, because there is no bias.
        """
        into, out = (
            [getattr(expert, name).weight for expert in self.local_experts]
            for name in ("linear_fc1", "linear_fc2")
        )
        if len(into) == 1 or not _suits(hidden_TH, out[0]):
            return super().forward(hidden_TH, tokens_per_expert, probs_T)
        ends_E = tokens_per_expert.to(hidden_TH.device).cumsum(0, dtype=torch.int32)
        gate_TF, up_TF = grouped_product(hidden_TH, ends_E, into).chunk(2, -1)
        weighted_TF = (F.silu(gate_TF) * up_TF * probs_T.unsqueeze(-1)).to(hidden_TH.dtype)
        return grouped_product(weighted_TF, ends_E, out), None


def _suits(hidden: Tensor, matrix: Tensor) -> bool:
    """Whether grouped products are faster, and possible: they need tokens, and strides of whole 16 bytes."""
    if hidden.device.type not in DEVICES or hidden.dtype not in DTYPES or not hidden.numel():
        return False
    if any(size * hidden.element_size() % 16 for size in matrix.shape):
        return False
    if hidden.is_cuda and torch.cuda.get_device_capability(hidden.device) < CAPABILITY:
        return False
    return product_is_right(hidden.device)
