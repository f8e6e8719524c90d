"""Tokens a second, MFU and peak memory of one trainer rank; the head whole against chunked; attention calls.

    python -m tests.gpu.bench_trainer [--toy] [--shapes qwen3-1.7b qwen3-4b] [--out FOLDER]

Each case has a process of its own: what one leaves in the allocator is not the next one's peak.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.gpu.shapes import SHAPES, arguments, make_model, peak_tflops, show

STEPS, WARM = 3, 1
WHOLE = 1 << 30
"""Rows of a chunk of the head that is never reached: one chunk."""


def step(model: Path, shape_name: str, case: dict) -> dict:
    """Median of some steps, in this process."""
    import torch

    from tests.gpu.rank import Rank
    from yatt.trainer import logprobs

    shape, lengths = SHAPES[shape_name], [case["length"]] * case["samples"]
    if case["head"] == "whole":
        logprobs.MIN_CHUNK = logprobs.MAX_CHUNK = WHOLE
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    rank = Rank(
        model, dtype, recompute=case["recompute"], max_tokens_per_micro_batch=sum(lengths),
        train_batch_size=1, mini_batch_size=1,
    )  # fmt: skip
    seconds = []
    for _ in range(WARM + STEPS):
        _synchronize()
        began_s = time.perf_counter()
        metrics = rank.train(lengths, shape.vocab)
        _synchronize()
        seconds.append(time.perf_counter() - began_s)
    best_s = sorted(seconds[WARM:])[STEPS // 2]
    tflops = shape.flops(lengths) / best_s / 1e12
    row = {**case, "shape": shape_name, "step_s": round(best_s, 4), "tokens_per_s": sum(lengths) / best_s}
    row["tflops"], row["mfu"] = round(tflops, 2), round(tflops / peak_tflops(), 4) if peak_tflops() else None
    row["peak_gib"] = (
        round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else None
    )
    row["grad_norm"] = metrics["actor/grad_norm"]
    return row


def attention(shape_name: str, lengths: list[int]) -> dict:
    """Forward and backward of one layer's attention: our call for each run of lengths, and one for all."""
    import torch
    import torch.nn.functional as F

    shape = SHAPES[shape_name]
    is_cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if is_cuda else ("cpu", torch.float32)
    total = sum(lengths)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    qkv = [
        torch.randn(total, n, shape.head_dim, device=device, dtype=dtype, requires_grad=True) for n in heads
    ]

    def by_length() -> torch.Tensor:
        pieces = zip(*(x.split(lengths) for x in qkv), strict=True)
        out = [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in piece), is_causal=True, enable_gqa=True
            )
            for piece in pieces
        ]
        return torch.cat([x[0].transpose(0, 1) for x in out])

    def in_one_call() -> torch.Tensor:
        from yatt.trainer.varlen import varlen_attn

        ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        return varlen_attn(*qkv, ends, ends, max(lengths), max(lengths), window_size=(-1, 0), enable_gqa=True)

    row = {"shape": shape_name, "lengths": lengths if len(lengths) < 9 else f"{len(lengths)} of {lengths[0]}"}
    outputs = {}
    for name, call in (("by_length", by_length), ("in_one_call", in_one_call)):
        if name == "in_one_call" and not is_cuda:
            row["in_one_call_s"] = None  # flash attention: CUDA only
            continue
        row[f"{name}_s"], outputs[name] = _timed(call, qkv)
    if is_cuda:
        pairs = zip(outputs["by_length"], outputs["in_one_call"], strict=True)
        row["most_different"] = max((a - b).abs().max().item() for a, b in pairs)
    return row


def _timed(call, inputs) -> tuple[float, list]:
    import torch

    seconds = []
    for _ in range(5):
        for x in inputs:
            x.grad = None
        _synchronize()
        began_s = time.perf_counter()
        out = call()
        out.float().square().sum().backward()
        _synchronize()
        seconds.append(time.perf_counter() - began_s)
    kept = [out.detach().float(), *(x.grad.detach().float() for x in inputs)]
    assert all(torch.isfinite(x).all() for x in kept)
    return round(sorted(seconds)[2], 6), kept


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def cases(*, toy: bool) -> list[dict]:
    """Tokens of a step; recomputation on and off; the head whole and in chunks."""
    sizes = [(16, 4)] if toy else [(1024, 4), (2048, 8), (2048, 16), (16384, 1)]
    return [
        {"length": length, "samples": samples, "recompute": recompute, "head": head}
        for length, samples in sizes
        for recompute in ("none", "full")
        for head in ("chunked", "whole")
    ]


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        model, shape_name, case = Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
        print(json.dumps(step(model, shape_name, case)))
        return
    given = arguments(__doc__.split("\n")[0])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in given.shapes:
            model = make_model(SHAPES[name], Path(folder) / name)
            for case in cases(toy=given.toy):
                argv = [
                    sys.executable,
                    "-m",
                    "tests.gpu.bench_trainer",
                    "--one",
                    str(model),
                    name,
                    json.dumps(case),
                ]
                done = subprocess.run(argv, capture_output=True, text=True, check=False)
                lost = {**case, "shape": name, "failed": done.stderr.strip().splitlines()[-1:]}
                rows.append(json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else lost)
                show("trainer", rows[-1:], None)
    lengths = (
        [[7, 3, 16]] if given.toy else [[512] * 64, [2048] * 16, [16384] * 2, list(range(100, 8100, 400))]
    )
    rows += [attention(given.shapes[0], each) for each in lengths]
    show("trainer", rows, given.out)
    if given.toy and any("failed" in row for row in rows):
        raise SystemExit("a case failed")


if __name__ == "__main__":
    main()
