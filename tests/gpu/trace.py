"""A profiler's trace of one optimizer step of a trainer rank, and where its time went.

    python -m tests.gpu.trace [--toy] --out FOLDER

FOLDER/step.json opens in chrome://tracing or Perfetto.
"""

from tests.gpu.cases import Benchmark, Case, Place, Row
from tests.gpu.rank import Rank
from tests.gpu.shapes import SHAPES

NUM_SHOWN = 25


def cases(is_toy: bool) -> list[Case]:
    """One step of the trainer's benchmark."""
    shape, lengths = ("toy", [16] * 4) if is_toy else ("qwen3-1.7b", [2048] * 8)
    return [Case("step", {"shape": shape, "lengths": lengths}, shape)]


def measure(settings: Row, place: Place) -> Row:
    """Traces the second step; returns the calls that took most time."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    is_cuda, lengths = torch.cuda.is_available(), settings["lengths"]
    shape = SHAPES[settings["shape"]]
    rank = Rank(
        place.model(settings["shape"]), "bfloat16" if is_cuda else "float32",
        max_tokens_per_micro_batch=sum(lengths), train_batch_size=1, mini_batch_size=1,
    )  # fmt: skip
    rank.train(lengths, shape.vocab)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities) as profiler:
        rank.train(lengths, shape.vocab)
        if is_cuda:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(place.out / "step.json"))
    key = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    found = sorted(profiler.key_averages(), key=lambda event: -getattr(event, key))[:NUM_SHOWN]
    return {"calls": [{"name": x.key, "ms": getattr(x, key) / 1e3, "count": x.count} for x in found]}


if __name__ == "__main__":
    Benchmark("trace", __doc__, cases, measure).main()
