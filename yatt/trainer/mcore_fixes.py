"""Cures for megatron-core's distributed optimizer where torch's AdamW stands in for a fused Adam.

Seen in 0.16.1 and still in 0.19.2, on GPU too, wherever neither Transformer Engine nor Apex is
installed. AdamW keeps a `step` tensor a parameter, and loading a checkpoint gets it wrong twice:
setting a parameter's state raises KeyError('step'), and after loading all parameters share one
`step` tensor, so each update advances it once a parameter and weights drift. `test_mcore_fixes`
fails once upstream no longer needs this file.
"""

from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer
from torch import Tensor


def install() -> None:
    """Patch `DistributedOptimizer` once; does nothing where a fused Adam is installed."""
    optimizer_class = distrib_optimizer.DistributedOptimizer
    if distrib_optimizer.HAVE_APEX_OR_TE or hasattr(optimizer_class, "set_states_without_step"):
        return
    set_states = optimizer_class._set_main_param_and_optimizer_states
    load_state_dict = optimizer_class.load_state_dict

    def set_states_with_step(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        group, index = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
        with torch.no_grad():
            set_states(self, model_param, {**tensors, **{k: v for k, v in state.items() if k == "step"}})

    def load_with_own_steps(self: Any, state_dict: dict[str, Any]) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    optimizer_class.set_states_without_step = set_states
    optimizer_class._set_main_param_and_optimizer_states = set_states_with_step
    optimizer_class.load_state_dict = load_with_own_steps


def create_adam_state(optimizer: Any) -> None:
    """Give every parameter AdamW's zero state, which torch creates only in the first step.

    `sharded_state_dict` of a fresh optimizer asserts without it. A fused Adam needs nothing.
    """
    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                if not part.optimizer.state[parameter]:
                    part.optimizer.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter.data),
                        "exp_avg_sq": torch.zeros_like(parameter.data),
                    }
