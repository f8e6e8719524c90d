"""Initial AdamW state in megatron-core's distributed optimizer, for torch's AdamW or a fused Adam."""

from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer


def create_adam_state(optimizer: Any) -> None:
    """Creates zero state for every parameter, for a checkpoint to fill; Adam creates it in its first step.

    torch's AdamW keeps a `step` tensor for each parameter; a fused Adam keeps one number in its groups.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                if part.optimizer.state[parameter]:
                    continue
                moments = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
                step = {} if distrib_optimizer.HAVE_APEX_OR_TE else {"step": torch.tensor(0.0)}
                part.optimizer.state[parameter] = {**step, **moments}
