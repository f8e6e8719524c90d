"""What the update of an iteration took: operations, and device memory."""

from collections.abc import Sequence

import torch

from yatt.config.schema import RunConfig
from yatt.core.efficiency import peak_flops_per_s
from yatt.models.flops import forward_flops, training_flops
from yatt.records.message import SampleFact
from yatt.records.usage import RankUsage
from yatt.trainer.model import Policy


def forget_peaks(device: torch.device) -> None:
    """Begins a new measurement of the largest device memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def update_usage(config: RunConfig, policy: Policy, facts: Sequence[SampleFact]) -> RankUsage:
    """Measures the update of a batch, after it. The last token of a sample is only a label."""
    passes = [(fact.num_tokens - 1, fact.num_completion_tokens) for fact in facts]
    flops = config.trainer.ppo_epochs * training_flops(forward_flops(policy.shape), passes)
    if policy.device.type != "cuda":
        return RankUsage(flops=flops)
    return RankUsage(
        flops=flops,
        peak_flops_per_s=peak_flops_per_s(torch.cuda.get_device_name(policy.device), config.model.dtype),
        max_allocated_bytes=torch.cuda.max_memory_allocated(policy.device),
        max_reserved_bytes=torch.cuda.max_memory_reserved(policy.device),
    )
