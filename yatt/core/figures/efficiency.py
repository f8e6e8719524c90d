"""Metrics of efficiency: operations and tokens per second of each role, and memory.

A GPU is a slot on machines without GPUs. A GB is 2**30 bytes, as in verl's metrics of these names.
"""

from collections.abc import Mapping, Sequence

from yatt.core.gpus.placement import TRAINER
from yatt.records.usage import NodeMemory, RankUsage

PEAK_FLOPS_PER_S = {
    "NVIDIA A40": 149.7e12,
    "NVIDIA L40S": 362.05e12,
    **dict.fromkeys(
        (
            "NVIDIA A100-PCIE-40GB",
            "NVIDIA A100 80GB PCIe",
            "NVIDIA A100-SXM4-40GB",
            "NVIDIA A100-SXM4-80GB",
            "NVIDIA A800-SXM4-80GB",
            "NVIDIA A800 80GB PCIe",
        ),
        312e12,
    ),
    "NVIDIA H100 PCIe": 756e12,
    **dict.fromkeys(("NVIDIA H100 NVL", "NVIDIA H200 NVL"), 835.5e12),
    **dict.fromkeys(
        (
            "NVIDIA H100 80GB HBM3",
            "NVIDIA H800",
            "NVIDIA H200",
            "NVIDIA GH200 480GB",
            "NVIDIA GH200 144G HBM3e",
        ),
        989.4e12,
    ),
    "NVIDIA H20": 148e12,
    "NVIDIA B200": 2250e12,
}
"""Dense bfloat16 operations per second with float32 sums, by the driver's name of the device.

Source: NVIDIA's data sheets. Where they only have the rate with sparsity, half of it. Other names, and parts
of a device (MIG), are not in the table: their utilization is not known.
"""

GB = 1 << 30


def peak_flops_per_s(device_name: str, dtype: str) -> float:
    """Returns the most operations per second of a device; 0 if that is not known, or for other types."""
    return PEAK_FLOPS_PER_S.get(device_name, 0.0) if dtype == "bfloat16" else 0.0


def update_metrics_of(
    usage: RankUsage, *, num_tokens: int, update_s: float, num_ranks: int
) -> dict[str, float]:
    """Metrics of the update of the policy.

    Args:
        usage: the largest of all ranks.
        num_tokens: of the batch, prompts included.
        update_s: seconds of all optimizer steps on the slowest rank.
    """
    rank_s = update_s * num_ranks
    if rank_s <= 0:
        return {}
    metrics = {
        f"perf/throughput/{TRAINER}": num_tokens / rank_s,
        "perf/tflops_per_gpu/actor": usage.flops / rank_s / 1e12,
    }
    if usage.peak_flops_per_s:
        metrics["perf/mfu/actor"] = usage.flops / rank_s / usage.peak_flops_per_s
    if usage.max_reserved_bytes:
        metrics["perf/max_memory_allocated_gb"] = usage.max_allocated_bytes / GB
        metrics["perf/max_memory_reserved_gb"] = usage.max_reserved_bytes / GB
    return metrics


def per_token_ms(timing_s: Mapping[str, float], *, num_sampled: int, num_tokens: int) -> dict[str, float]:
    """Milliseconds per token of the parts of an iteration, with verl's names.

    Args:
        timing_s: seconds by part.
        num_sampled: tokens that the policy sampled; `gen` counts only these.
        num_tokens: of the batch, prompts included.
    """
    numbers = {
        "gen": num_sampled,
        **dict.fromkeys(
            ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"), num_tokens
        ),
    }
    return {
        f"timing_per_token_ms/{name}": timing_s[name] * 1000 / number
        for name, number in numbers.items()
        if name in timing_s and number
    }


def engine_metrics(tokens: Mapping[str, int], gpu_s: Mapping[str, float]) -> dict[str, float]:
    """Tokens per second and GPU of each engine role, for the time in which it held GPUs.

    Args:
        tokens: that its engines sampled for the batch, those of dropped completions included.
        gpu_s: seconds times GPUs that it held while the batch was sampled and scored.
    """
    return {
        f"perf/throughput/{role}": num / gpu_s[role] for role, num in tokens.items() if gpu_s.get(role, 0) > 0
    }


def memory_metrics(nodes: Sequence[NodeMemory]) -> dict[str, float]:
    """Host memory: the largest value of all nodes."""
    metrics: dict[str, float] = {}

    def put(name: str, size_bytes: int) -> None:
        if size_bytes:
            metrics[name] = max(metrics.get(name, 0.0), size_bytes / GB)

    for node in nodes:
        put("perf/cpu_memory_used_gb", node.used_bytes)
        for role, size_bytes in node.resident_bytes.items():
            put(f"perf/host_memory_gb/{role}", size_bytes)
        for role, size_bytes in node.peak_bytes.items():
            put(f"perf/max_host_memory_gb/{role}", size_bytes)
    return metrics
