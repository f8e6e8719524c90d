"""Which tensors of its models a rank keeps between iterations, and their host copy."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from yatt.adapters.node_local.host_segment import CRITIC, CRITIC_STATE, STATE, WEIGHTS
from yatt.trainer.mcore.model import Policy
from yatt.trainer.mcore.optimizer_state import inner_optimizers, kept_tensors
from yatt.trainer.state.host_copy import HostCopy, KeptTensors
from yatt.weights.convert import router_biases
from yatt.weights.registered_memory import MemoryRegistrar


def host_copy_of(policy: Policy, reference: list[nn.Module], stem: Path, attempt: int) -> HostCopy:
    """The host copy of the policy and a reference model.

    Raises:
        ConfigError: the memory filesystem has not enough room.
    """
    frozen = [_inner(model) for model in reference]
    constant = [t for model in frozen for t in (*(p.data for p in model.parameters()), *model.buffers())]
    host = HostCopy(stem, attempt)
    host.add(_kept_of(policy, (WEIGHTS, STATE), constant))
    _register(host, (WEIGHTS, STATE))
    return host


def add_critic(host: HostCopy, critic: Policy, *, is_apart: bool) -> None:
    """Adds a critic.

    Args:
        is_apart: it and the policy take turns on the device.

    Raises:
        ConfigError: the memory filesystem has not enough room.
    """
    host.add(_kept_of(critic, (CRITIC, CRITIC_STATE)), is_apart=is_apart)
    _register(host, (CRITIC, CRITIC_STATE))


def _register(host: HostCopy, areas: tuple[str, str]) -> None:
    if torch.cuda.is_available():
        host.register_segments(MemoryRegistrar(), areas)


def _kept_of(policy: Policy, areas: tuple[str, str], constant: list[Tensor] | None = None) -> KeptTensors:
    """A trained model's weights and gradients, the state of its optimizer, and buffers, of which some may be
    weights too.

    Args:
        areas: of weights and state. In float32 the main copies are the parameters, so they come first.
    """
    weights, dropped, private = list[Tensor](), list[Tensor](), list[Tensor]()
    for chunk in policy.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            if buffer.param_data is not None:
                weights.append(buffer.param_data)
            dropped.append(buffer.grad_data)
        inner = _inner(chunk)
        biases = [router.expert_bias for router in router_biases(inner)]
        weights += [*(parameter.data for parameter in inner.parameters()), *biases]
        private += list(inner.buffers())  # those that are weights too are known
    kept = dict(zip(areas, (weights, _optimizer_tensors(policy.optimizer)), strict=True))
    return KeptTensors(areas=kept, private=private, constant=constant or (), dropped=dropped)


def _inner(module: nn.Module) -> nn.Module:
    # A megatron DDP's own `buffers` attribute hides nn.Module.buffers(); its inner module has the tensors.
    inner: nn.Module = getattr(module, "module", module)
    return inner


def _optimizer_tensors(optimizer: Any) -> list[Tensor]:
    """The tensors of a parameter one after the other, so that a part of a step is one run of bytes."""
    return [
        tensor
        for inner in inner_optimizers(optimizer)
        for group in inner.optimizer.param_groups
        for main in group["params"]
        for tensor in kept_tensors(inner, main)
    ]
