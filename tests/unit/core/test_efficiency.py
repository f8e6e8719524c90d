"""Metrics of efficiency from what ranks, engines and nodes report."""

import pytest

from yatt.core.figures.efficiency import (
    GB,
    engine_metrics,
    memory_metrics,
    peak_flops_per_s,
    per_token_ms,
    update_metrics_of,
)
from yatt.records.usage import NodeMemory, RankUsage, largest_usage

H100 = "NVIDIA H100 80GB HBM3"


def test_utilization_is_the_share_of_what_all_devices_can_do() -> None:
    usage = RankUsage(flops=8e15, peak_flops_per_s=peak_flops_per_s(H100, "bfloat16"))
    metrics = update_metrics_of(usage, num_tokens=6000, update_s=2.0, num_ranks=10)
    assert metrics == {
        "perf/throughput/trainer": 300.0,
        "perf/tflops_per_gpu/actor": pytest.approx(400.0),
        "perf/mfu/actor": pytest.approx(400 / 989.4),
    }


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16"),
        ("NVIDIA A100-SXM-64GB", "bfloat16"),
        ("", "bfloat16"),
        (H100, "float32"),
    ],
)
def test_an_unknown_peak_gives_no_utilization(device: str, dtype: str) -> None:
    usage = RankUsage(flops=1e12, peak_flops_per_s=peak_flops_per_s(device, dtype))
    metrics = update_metrics_of(usage, num_tokens=1, update_s=1.0, num_ranks=1)
    assert "perf/mfu/actor" not in metrics and metrics["perf/tflops_per_gpu/actor"] == 1.0


def test_a_peak_that_one_rank_does_not_know_is_not_known() -> None:
    known = RankUsage(flops=5.0, peak_flops_per_s=7.0, max_allocated_bytes=1, max_reserved_bytes=9)
    other = RankUsage(flops=5.0, max_allocated_bytes=4, max_reserved_bytes=5)
    expected = RankUsage(flops=5.0, max_allocated_bytes=4, max_reserved_bytes=9)
    assert largest_usage([known, other]) == largest_usage([other, known]) == expected
    assert largest_usage([known, known]) == known


def test_device_memory_is_reported_where_there_is_a_device() -> None:
    usage = RankUsage(flops=1.0, max_allocated_bytes=3 * GB, max_reserved_bytes=4 * GB)
    metrics = update_metrics_of(usage, num_tokens=1, update_s=1.0, num_ranks=1)
    assert metrics["perf/max_memory_allocated_gb"] == 3.0
    assert metrics["perf/max_memory_reserved_gb"] == 4.0


def test_engines_tokens_count_for_the_gpus_and_time_that_they_held() -> None:
    tokens = {"rollout": 1200, "genrm:judge": 30, "genrm:idle": 0, "genrm:gone": 5}
    gpu_s = {"rollout": 60.0, "genrm:judge": 10.0, "genrm:idle": 10.0}
    assert engine_metrics(tokens, gpu_s) == {
        "perf/throughput/rollout": 20.0,
        "perf/throughput/genrm:judge": 3.0,
        "perf/throughput/genrm:idle": 0.0,
    }


def test_host_memory_is_that_of_the_fullest_node() -> None:
    nodes = [
        NodeMemory(used_bytes=5 * GB, resident_bytes={"trainer": 3 * GB}, peak_bytes={"trainer": 2 * GB}),
        NodeMemory(used_bytes=4 * GB, resident_bytes={"trainer": 4 * GB, "rollout": GB}),
        NodeMemory(),
    ]
    assert memory_metrics(nodes) == {
        "perf/cpu_memory_used_gb": 5.0,
        "perf/host_memory_gb/trainer": 4.0,
        "perf/host_memory_gb/rollout": 1.0,
        "perf/max_host_memory_gb/trainer": 2.0,
    }


def test_time_per_token_counts_sampled_tokens_for_gen_and_all_tokens_for_the_trainer():
    timing_s = {"gen": 2.0, "ref": 1.0, "update_actor": 3.0, "reward": 9.0}
    found = per_token_ms(timing_s, num_sampled=500, num_tokens=1000)
    assert found == {
        f"timing_per_token_ms/{k}": v for k, v in {"gen": 4.0, "ref": 1.0, "update_actor": 3.0}.items()
    }
    without = per_token_ms(timing_s, num_sampled=0, num_tokens=1000)
    assert without.keys() == found.keys() - {"timing_per_token_ms/gen"}
