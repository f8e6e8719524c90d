"""A profiler's trace of one optimizer step of a trainer rank, and where its time went.

    python -m tests.gpu.trace [--toy] [--shapes qwen3-1.7b] [--out FOLDER]

FOLDER/step.json opens in chrome://tracing or Perfetto.
"""

import tempfile
from pathlib import Path

from tests.gpu.rank import Rank
from tests.gpu.shapes import SHAPES, arguments, make_model, show

NUM_SHOWN = 25


def main() -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    given = arguments(__doc__.split("\n")[0])
    is_cuda = torch.cuda.is_available()
    lengths = [16] * 4 if given.toy else [2048] * 8
    with tempfile.TemporaryDirectory() as folder:
        shape = SHAPES[given.shapes[0]]
        model = make_model(shape, Path(folder) / "model")
        rank = Rank(
            model, "bfloat16" if is_cuda else "float32", max_tokens_per_micro_batch=sum(lengths),
            train_batch_size=1, mini_batch_size=1,
        )  # fmt: skip
        rank.train(lengths, shape.vocab)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
        with profile(activities=activities) as profiler:
            rank.train(lengths, shape.vocab)
            if is_cuda:
                torch.cuda.synchronize()
        key = "self_device_time_total" if is_cuda else "self_cpu_time_total"
        found = sorted(profiler.key_averages(), key=lambda event: -getattr(event, key))[:NUM_SHOWN]
        rows = [{"name": each.key, "ms": getattr(each, key) / 1e3, "calls": each.count} for each in found]
        assert rows[0]["ms"] > 0
        if given.out is not None:
            given.out.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(given.out / "step.json"))
        show("trace", rows, given.out)


if __name__ == "__main__":
    main()
