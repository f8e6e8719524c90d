"""Bytes that a forward pass keeps for the backward pass, and that the host copy's tensors hold meanwhile."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from yatt.trainer.mcore.model import Policy
from yatt.trainer.mcore.optimizer_state import inner_optimizers


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
    """Calls `train`; gives the bytes on the device at each micro-batch and in each part of an optimizer step.

    Of a part that is away most of the time, also those of the place through which it goes.
    """
    found: dict[str, list[int]] = {"micro_batch": [], "part": [], "place": []}
    host, tick = worker._ready.host, worker._tick
    adams = [inner.optimizer for inner in inner_optimizers(worker._policy.optimizer)]
    steps = [adam.step for adam in adams]

    def measured_tick() -> None:
        found["micro_batch"].append(host.device_bytes)
        tick()

    def measured_step(number: int) -> Any:
        found["part"].append(host.device_bytes)
        known = {held.storage._cdata for held in host._held.values()}
        state = (each for values in adams[number].state.values() for each in values.values())
        storages = {t.untyped_storage()._cdata: t.untyped_storage().size() for t in state if t.dim() > 0}
        found["place"].append(sum(size for at, size in storages.items() if at not in known))
        return steps[number]()

    worker._tick = measured_tick
    for number, adam in enumerate(adams):
        adam.step = functools.partial(measured_step, number)
    train()
    worker._tick = tick
    for adam, step in zip(adams, steps, strict=True):
        adam.step = step
    return found
