"""The gradient an optimizer step is given, whole and under Hugging Face's names, whatever the layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from safetensors.torch import save_file

from yatt.trainer.model import Policy
from yatt.weights.convert import export_weights


def write_first_gradient(policy: Policy, train: Callable[[], object], target: Path) -> None:
    """Call `train` and write to `target` what its first optimizer step sees, before clipping. Collective."""
    step, seen = policy.optimizer.step, []

    def recording_step() -> Any:
        if not seen:
            seen.append(whole_gradient(policy))
        return step()

    policy.optimizer.step = recording_step
    train()
    policy.optimizer.step = step
    if dist.get_rank() == 0:
        save_file(seen[0], target)


def whole_gradient(policy: Policy) -> dict[str, torch.Tensor]:
    """Every rank's part of the reduced gradient put together. Collective."""
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    for chunk in policy.chunks:
        for buffer in chunk.buffers:
            for bucket in buffer.buckets:
                shard = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    parameters = [parameter for model in policy.models for parameter in model.parameters()]
    values = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.main_grad.clone()
    tensors = export_weights(policy.models, policy.shape, policy.groups)
    gradient = {name: tensor.contiguous().clone() for name, tensor in tensors}
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value
    return gradient
