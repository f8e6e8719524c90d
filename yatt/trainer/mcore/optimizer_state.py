"""Kinds of optimizer in megatron-core's distributed one, and the tensors that each keeps per parameter."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers of which a chained one consists; or the optimizer itself."""
    parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return parts


def moments_of(optimizer: Any) -> tuple[str, ...]:
    """Names of the tensors that are kept per parameter, each of its shape, in float32."""
    inner = inner_optimizers(optimizer)[0].optimizer
    if not isinstance(inner, torch.optim.SGD):
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if inner.defaults["momentum"] else ()


def replace_by_sgd(optimizer: Any, momentum: float) -> None:
    """Replaces Adam by SGD, before it has any state. megatron-core refuses to build its distributed optimizer
    with another kind than Adam, because its checkpoints know only Adam's state; ours are made elsewhere."""
    for part in inner_optimizers(optimizer):
        adam = part.optimizer
        of_adam = adam.defaults.keys() - {"lr", "weight_decay"}
        groups = [{k: v for k, v in group.items() if k not in of_adam} for group in adam.param_groups]
        sgd = torch.optim.SGD([torch.empty(0)], lr=adam.defaults["lr"], momentum=momentum)
        # As megatron-core does; the constructor refuses parts of parameters, which are no leaves.
        sgd.param_groups = [{**sgd.defaults, **group} for group in groups]
        part.optimizer = sgd


def create_state(optimizer: Any, *, is_away: bool = False) -> None:
    """Creates zero state for every parameter, for a checkpoint to fill; an optimizer creates it in its first
    step. From zero that step has the same result.

    torch's AdamW keeps a `step` tensor for each parameter; a fused Adam keeps one number in its groups.

    Args:
        is_away: moments get no memory on the device; that of the host copy begins with zeros.
    """
    names = moments_of(optimizer)
    has_steps = "exp_avg" in names and not distrib_optimizer.HAVE_APEX_OR_TE
    for state, parameter in _states(optimizer):
        state.update({"step": torch.tensor(0.0)} if has_steps else {})
        for name in names:
            state[name] = torch.zeros_like(parameter.data)
            if is_away:
                state[name].untyped_storage().resize_(0)


def kept_tensors(inner: Any, main: torch.Tensor) -> list[torch.Tensor]:
    """A main copy, and what one of the inner optimizers keeps for it, of its shape."""
    state = inner.optimizer.state[main].values()
    return [main, *(value for value in state if torch.is_tensor(value) and value.dim() > 0)]


def _states(optimizer: Any) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Each parameter's state that is not there yet."""
    for part in inner_optimizers(optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                if not part.optimizer.state[parameter]:
                    yield part.optimizer.state[parameter], parameter
