"""Gradients and optimizer state, whole and under Hugging Face's names, whatever the layout."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from safetensors.torch import save_file

from yatt.trainer.mcore.model import Policy
from yatt.weights.convert import export_weights, pick_tensors


class _Seen(Exception):
    """The first gradient is there, and nothing else is wanted of the iteration."""


def write_first_gradient(
    policy: Policy, train: Callable[[], Any], target: Path, *, goes_on: bool = True
) -> Any:
    """Call `train`, return its result and write to `target` what its first optimizer step sees, before
    clipping. Collective.

    Args:
        goes_on: else the iteration ends before that step, without a result; the policy is of no use then.
    """
    step, seen = policy.optimizer.step, []

    def recording_step() -> Any:
        if not seen:
            seen.append(whole_gradient(policy))
        if not goes_on:
            raise _Seen
        return step()

    policy.optimizer.step, answer = recording_step, None
    with contextlib.suppress(_Seen):
        answer = train()
    policy.optimizer.step = step
    if dist.get_rank() == 0:
        save_file(seen[0], target)
    return answer


def write_state(policy: Policy, target: Path, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Write main copies, moments and the step, if there is one, that every parameter's state says.
    Collective.

    Args:
        view: from a tensor to its content, which may be on the host.
    """
    found = {}
    for kind in ("main", *next(iter(owned_ranges(policy)))[2]):
        for chunk in policy.chunks:
            chunk.zero_grad_buffer()
        for parameter, main, state, place in owned_ranges(policy):
            value = main.detach() if kind == "main" else state[kind]
            parameter.main_grad.view(-1)[place.start : place.end] = view(value)
        found |= {f"{kind}.{name}": tensor for name, tensor in whole_gradient(policy).items()}
    found["lr"] = torch.tensor([group["lr"] for group in policy.optimizer.param_groups]).unique()
    found["num_steps"] = torch.tensor([policy.scheduler.num_steps])
    if dist.get_rank() == 0:
        save_file(found, target)


def owned_ranges(policy: Policy) -> Iterator[tuple[Any, torch.Tensor, dict[str, torch.Tensor], Any]]:
    """Each parameter of which this rank updates a part: itself, its main copy, its state, its flat range."""
    for part in policy.optimizer.chained_optimizers:
        for group_range, group in zip(part.opt_group_ranges, part.optimizer.param_groups, strict=True):
            for parameter, main in zip(group_range["params"], group["params"], strict=True):
                place = part._get_model_param_range_map(parameter)["param"]
                yield parameter, main, part.optimizer.state[main], place


def whole_gradient(policy: Policy) -> dict[str, torch.Tensor]:
    """Every rank's part of the reduced gradient put together. Collective."""
    everyone = mpu.get_data_parallel_group(with_context_parallel=True)
    of_experts = mpu.get_expert_data_parallel_group()
    for chunk in policy.chunks:
        kinds = ((chunk.buffers, everyone), (chunk.expert_parallel_buffers, of_experts))
        buckets = [(each, group) for buffers, group in kinds for buffer in buffers for each in buffer.buckets]
        for bucket, group in buckets:
            shard = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    parameters = [parameter for model in policy.models for parameter in model.parameters()]
    values = [parameter.data for parameter in parameters]
    for parameter in parameters:
        is_trained = parameter.requires_grad
        parameter.data = parameter.main_grad.clone() if is_trained else torch.zeros_like(parameter)
    gradient = {
        name: tensor.contiguous().clone()
        for row, full in export_weights(policy.models, policy.rows, policy.groups)
        for name, tensor in zip(row.hf_names, pick_tensors(row, full), strict=True)
    }
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value
    return gradient
