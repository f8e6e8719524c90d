"""Bytes that a forward pass keeps for the backward pass, and that the host copy's tensors hold meanwhile."""

from collections.abc import Callable
from typing import Any

import torch

from yatt.trainer.mcore.model import Policy


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


def device_bytes(worker: Any, train: Callable[[], object]) -> dict[str, list[int]]:
    """Calls `train`; gives the bytes on the device at each micro-batch, and at each optimizer step."""
    found: dict[str, list[int]] = {"micro_batch": [], "step": []}
    optimizer, host, tick = worker._policy.optimizer, worker._ready.host, worker._tick
    step = optimizer.step

    def measured_tick() -> None:
        found["micro_batch"].append(host.device_bytes)
        tick()

    def measured_step() -> Any:
        found["step"].append(host.device_bytes)
        return step()

    worker._tick, optimizer.step = measured_tick, measured_step
    train()
    worker._tick, optimizer.step = tick, step
    return found
