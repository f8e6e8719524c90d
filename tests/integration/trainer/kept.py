"""Bytes that a forward pass keeps for the backward pass."""

from collections.abc import Callable

import torch

from yatt.trainer.model import Policy


def kept_bytes(policy: Policy, train: Callable[[], object]) -> int:
    """Calls `train`; gives the bytes that its first micro-batch has kept when its backward pass begins."""
    known = {tensor.untyped_storage()._cdata for model in policy.models for tensor in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}
    sizes: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not sizes and storage._cdata not in known:
            storages[storage._cdata] = storage
        return tensor

    def take(tensor: torch.Tensor) -> torch.Tensor:
        if not sizes:
            sizes.append(sum(storage.size() for storage in storages.values()))
            storages.clear()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, take):
        train()
    return sizes[0]
