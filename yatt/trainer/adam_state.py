"""AdamW's state in megatron-core's distributed optimizer, where torch's AdamW stands in for a fused Adam."""

from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer


def create_adam_state(optimizer: Any) -> None:
    """Give every parameter zero state, which Adam creates only in its first step: a checkpoint fills it.

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
