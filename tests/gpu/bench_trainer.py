"""Tokens a second, MFU and peak memory of one trainer rank, beside a plain loop; the head whole against
chunked; attention calls.

    python -m tests.gpu.bench_trainer [--toy] [--only CASE ...] --out FOLDER

`plain` is transformers' model with torch's fused AdamW on bfloat16 weights, over the same tokens.
"""

import time

from tests.gpu.cases import Benchmark, Case, Place, Row
from tests.gpu.shapes import SHAPES, peak_tflops

STEPS, WARM = 3, 1
WHOLE = 1 << 30
"""Rows of a chunk of the head that is never reached: one chunk."""
PLAIN_CHUNK = 4096
"""Rows of the plain loop's head at once: all rows would not fit beside the model."""


def cases(is_toy: bool) -> list[Case]:
    """Tokens of a step, recomputation, the head whole and in chunks; then larger models."""
    if is_toy:
        steps = [
            ("toy", 16, 4, "none", "chunked"),
            ("toy", 16, 4, "full", "whole"),
            ("toy", 16, 4, "", "plain"),
        ]
        streams = [[7, 3, 16]]
    else:
        steps = [
            ("qwen3-1.7b", 2048, 8, "none", "chunked"), ("qwen3-1.7b", 2048, 8, "", "plain"),
            ("qwen3-1.7b", 2048, 8, "full", "chunked"), ("qwen3-1.7b", 2048, 8, "none", "whole"),
            ("qwen3-1.7b", 16384, 1, "none", "chunked"), ("qwen3-1.7b", 512, 32, "none", "chunked"),
            ("qwen3-8b, 8 layers", 2048, 8, "full", "chunked"), ("qwen3-8b, 8 layers", 2048, 8, "", "plain"),
            ("qwen3-4b", 2048, 8, "full", "chunked"),
        ]  # fmt: skip
        streams = [[512] * 64, [2048] * 16, [16384] * 2, list(range(100, 8100, 400))]
    found = []
    for shape, length, samples, recompute, head in steps:
        name = " ".join(x for x in (shape, f"{samples}x{length}", recompute, head) if x)
        settings = {"length": length, "samples": samples, "recompute": recompute, "head": head}
        kind = "plain" if head == "plain" else "step"
        found.append(Case(name, {"kind": kind, "shape": shape, **settings}, shape))
    for lengths in streams:
        settings = {"kind": "attention", "shape": steps[0][0], "lengths": lengths}
        found.append(Case(f"attention {len(lengths)} from {lengths[0]}", settings))
    return found


def measure(settings: Row, place: Place) -> Row:
    """Measures one case."""
    return {"step": step, "plain": plain, "attention": attention}[settings["kind"]](settings, place)


def step(settings: Row, place: Place) -> Row:
    """Median of some steps of a trainer rank."""
    import torch

    from tests.gpu.rank import Rank
    from yatt.trainer.forward import logprobs

    shape, lengths = SHAPES[settings["shape"]], [settings["length"]] * settings["samples"]
    if settings["head"] == "whole":
        logprobs.MIN_CHUNK = logprobs.MAX_CHUNK = WHOLE
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    rank = Rank(
        place.model(settings["shape"]), dtype, recompute=settings["recompute"],
        max_tokens_per_micro_batch=sum(lengths), train_batch_size=1, mini_batch_size=1,
    )  # fmt: skip
    norms: list[float] = []
    row = _speed(lambda: norms.append(rank.train(lengths, shape.vocab)["actor/grad_norm"]), shape, lengths)
    return {**row, "grad_norm": norms[-1]}


def plain(settings: Row, place: Place) -> Row:
    """Median of some steps of the plain loop: forward, cross entropy in chunks, backward, AdamW."""
    import torch
    import transformers

    is_cuda, shape = torch.cuda.is_available(), SHAPES[settings["shape"]]
    device, dtype = ("cuda", torch.bfloat16) if is_cuda else ("cpu", torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        place.model(settings["shape"]), dtype=dtype, attn_implementation="sdpa"
    )
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=is_cuda)
    ids = torch.randint(3, shape.vocab, (settings["samples"], settings["length"]), device=device)

    def one_step() -> None:
        for micro in ids.split(max(1, PLAIN_CHUNK // settings["length"])):
            _plain_backward(model, micro, ids.numel())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return _speed(one_step, shape, [settings["length"]] * settings["samples"])


def _plain_backward(model, micro, num_tokens: int) -> None:
    import torch.nn.functional as F

    hidden = model.model(micro).last_hidden_state[:, :-1].flatten(0, 1)
    detached = hidden.detach().requires_grad_()
    for part, target in zip(
        detached.split(PLAIN_CHUNK), micro[:, 1:].flatten().split(PLAIN_CHUNK), strict=True
    ):
        (F.cross_entropy(model.lm_head(part).float(), target, reduction="sum") / num_tokens).backward()
    hidden.backward(detached.grad)


def _speed(one_step, shape, lengths: list[int]) -> Row:
    """Median seconds of a step, and what follows from it."""
    import torch

    seconds = []
    for _ in range(WARM + STEPS):
        _synchronize()
        began_s = time.perf_counter()
        one_step()
        _synchronize()
        seconds.append(time.perf_counter() - began_s)
    step_s = sorted(seconds[WARM:])[STEPS // 2]
    tflops, peak = shape.flops(lengths) / step_s / 1e12, peak_tflops()
    memory = {}
    if torch.cuda.is_available():
        memory = {
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
            "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        }
    return {
        "step_s": round(step_s, 4), "tokens_per_s": sum(lengths) / step_s, "tflops": round(tflops, 2),
        "mfu": round(tflops / peak, 4) if peak else None, **memory,
    }  # fmt: skip


def attention(settings: Row, place: Place) -> Row:
    """Forward and backward of one layer's attention: our call for each run of lengths, and one for all."""
    import torch
    import torch.nn.functional as F

    shape, lengths = SHAPES[settings["shape"]], settings["lengths"]
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
        from yatt.trainer.attention.varlen import varlen_attn

        ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        return varlen_attn(*qkv, ends, ends, max(lengths), max(lengths), window_size=(-1, 0), enable_gqa=True)

    row, outputs = {}, {}
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


def summary(rows: dict[str, Row]) -> Row:
    """Seconds of a step over those of the plain loop, for each shape that has both."""
    plain_s = {row["shape"]: row["step_s"] for row in rows.values() if row.get("kind") == "plain"}
    return {
        f"{name} over plain": round(row["step_s"] / plain_s[row["shape"]], 3)
        for name, row in rows.items()
        if row.get("kind") == "step" and row["shape"] in plain_s
    }


if __name__ == "__main__":
    Benchmark("trainer", __doc__, cases, measure, summary).main()
