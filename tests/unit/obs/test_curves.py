"""The curves of a report."""

from yatt.obs.metrics import CHANGED_INPUTS, STEP
from yatt.obs.page.curves import REWARD, reward_chart, small_charts


def test_efficiency_is_drawn_where_it_is_known() -> None:
    rows = [{STEP: step, "perf/throughput": 100.0 + step} for step in (1, 2)]
    assert [title for title, _ in small_charts(rows)] == ["Tokens per second and GPU"]
    on_gpus = {
        "perf/mfu/actor": 0.4,
        "perf/max_memory_allocated_gb": 60.5,
        "perf/max_memory_reserved_gb": 71.0,
    }
    charts = dict(small_charts([row | on_gpus for row in rows]))
    assert [*charts] == [
        "Tokens per second and GPU",
        "Utilization of GPUs that train (MFU)",
        "Device memory of trainer ranks (GB)",
    ]
    memory = charts["Device memory of trainer ranks (GB)"]
    assert "allocated" in memory and "reserved" in memory


def test_changed_inputs_are_a_line_between_two_iterations() -> None:
    rows = [{STEP: step, REWARD: 0.5} for step in range(4)]
    assert "inputs are others" not in reward_chart(rows)
    rows[2][CHANGED_INPUTS] = 2
    drawn = reward_chart(rows)
    assert drawn.count('class="change"') == 1
    assert "<title>from iteration 2 on: 2 inputs are others (see Timeline)</title>" in drawn
