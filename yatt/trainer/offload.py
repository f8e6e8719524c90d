"""Frees device memory between phases without replacing a tensor object.

Works on storages: copies each to a host buffer that is allocated once (pinned on CUDA) and kept, then
resizes the storage to 0. Every view of it (parameters in their flat buffer, gradients, optimizer shards)
stays valid and has its content again after `onload`. The same code frees memory on CPU, so that a test
without GPU covers it.

Source: verl's Megatron workers resize the flat buffers. Every storage is treated alike here, because
swapping `p.data` would break aliases.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from yatt.trainer.model import Policy


@dataclass(slots=True)
class _Held:
    """One storage, its size, its host copy (None: it comes back as zeros), and whether it is offloaded."""

    storage: torch.UntypedStorage
    size_bytes: int
    host: Tensor | None
    is_away: bool = False


class HostSwap:
    """Moves the storages of these tensors to the host and back.

    Args:
        kept: tensors whose content must come back.
        dropped: tensors that may come back as zeros (gradients).
    """

    def __init__(self, kept: list[Tensor], dropped: list[Tensor]) -> None:
        self._held: dict[int, _Held] = {}
        for tensors, is_kept in ((kept, True), (dropped, False)):
            for tensor in tensors:
                self._add(tensor.untyped_storage(), is_kept)

    def _add(self, storage: torch.UntypedStorage, is_kept: bool) -> None:
        size, is_cuda = storage.size(), storage.device.type == "cuda"
        if size == 0 or storage._cdata in self._held:
            return
        host = torch.empty(size, dtype=torch.uint8, pin_memory=is_cuda) if is_kept else None
        self._held[storage._cdata] = _Held(storage, size, host)

    @torch.no_grad()
    def offload(self) -> None:
        """Copies to the host and frees; a second call does nothing."""
        for held in self._held.values():
            if held.is_away:
                continue
            if held.host is not None:
                held.host.copy_(_bytes_of(held.storage))
            held.storage.resize_(0)
            held.is_away = True
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        else:
            _give_back_freed_memory()

    @torch.no_grad()
    def onload(self) -> None:
        """Allocates and copies back; a second call does nothing."""
        for held in self._held.values():
            if not held.is_away:
                continue
            held.storage.resize_(held.size_bytes)
            flat = _bytes_of(held.storage)
            if held.host is None:
                flat.zero_()
            else:
                flat.copy_(held.host)
            held.is_away = False

    @property
    def device_bytes(self) -> int:
        """Bytes that these storages now hold on the device."""
        return sum(held.storage.size() for held in self._held.values())


def swap_of(policy: Policy, reference: list[nn.Module]) -> HostSwap:
    """Collects all tensors that the trainer keeps between iterations."""
    kept = [tensor for model in (*policy.chunks, *reference) for tensor in _module_tensors(model)]
    dropped: list[Tensor] = []
    for chunk in policy.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            if buffer.param_data is not None:
                kept.append(buffer.param_data)
            dropped.append(buffer.grad_data)
    return HostSwap(kept + _optimizer_tensors(policy.optimizer), dropped)


def _module_tensors(module: nn.Module) -> list[Tensor]:
    # A megatron DDP's own `buffers` attribute hides nn.Module.buffers(); its inner module has the tensors.
    inner = getattr(module, "module", module)
    return [parameter.data for parameter in inner.parameters()] + list(inner.buffers())


def _optimizer_tensors(optimizer: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            tensors += [parameter.data for parameter in group["params"]]
        for state in part.optimizer.state.values():
            tensors += [value for value in state.values() if torch.is_tensor(value) and value.dim() > 0]
    return tensors


def _give_back_freed_memory() -> None:
    """Returns freed heap memory to the system, so that the process's memory shows what it uses. glibc keeps
    about 700 MiB of activations with 5 M parameters; a C library without `malloc_trim` keeps none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
