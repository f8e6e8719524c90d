"""From the trainer's memory to an engine that has loaded: publication and load against memcpy, on one node.

`python -m tests.bench.publication give FOLDER` is the trainer, `... take FOLDER KIND` an engine.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gpu.rank import Rank
from tests.tiny_models import make_tokenizer
from yatt.engine.build import build_engine, import_library
from yatt.engine.environment import prepare_environment
from yatt.engine.protocol import EngineOptions

ROUNDS = 5
SIZES = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 14, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 50_000, "tie_word_embeddings": False,
}  # fmt: skip
"""267 M parameters, 535 MB in bfloat16."""


def run() -> dict[str, Any]:
    """All processes, one after the other; gives the result for the page."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        _make_model(folder / "model")
        given = _child("give", folder)
        taken = {kind: _child("take", folder, kind) for kind in ("transformers", "vllm")}
    plain = taken["transformers"]
    memcpy_s = statistics.median([given["memcpy"], plain["memcpy"]])
    whole_s = given["copy"] + given["sums"] + plain["load"]
    rows = [
        [what, f"{seconds * 1000:.0f} ms", f"{memcpy_s / seconds:.2f}"]
        for what, seconds in (
            ("memcpy of the same bytes", memcpy_s),
            ("trainer: the copy to the host", given["copy"]),
            ("trainer: checksums of a sixteenth", given["sums"]),
            ("engine without packing (transformers): load and check", plain["load"]),
            ("engine: comparison of a sixteenth", plain["compare"]),
            ("vLLM on CPU: load, with the packing for its kernels", taken["vllm"]["load"]),
            ("trainer's memory to engine, without packing", whole_s),
        )
    ]
    return {
        "title": "Publication of weights on one node",
        "how": f"A random Qwen3 of {given['bytes'] / 1e6:.0f} MB in bfloat16, one trainer rank, one engine, "
        f"one thread each, medians of {ROUNDS}. The engine reads the trainer's host copy itself.",
        "head": ["what", "time", "speed / memcpy"],
        "rows": rows,
        "targets": [
            {"what": "trainer's memory to engine / memcpy", "target": ">= 0.5",
             "value": f"{memcpy_s / whole_s:.2f}", "met": memcpy_s >= 0.5 * whole_s},
        ],
    }  # fmt: skip


def _child(*arguments: object) -> dict[str, Any]:
    from tests.integration.trainer.conftest import child_environment

    command = [sys.executable, "-m", "tests.bench.publication", *map(str, arguments)]
    done = subprocess.run(command, env=child_environment(), stdout=subprocess.PIPE, timeout=600, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _make_model(folder: Path) -> None:
    import torch
    import transformers

    make_tokenizer(folder)
    torch.set_default_dtype(torch.bfloat16)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)


def median_s(work: Callable[[int], object], first: int = 0) -> float:
    """Median of seconds; a first round is not counted."""
    seconds = []
    for number in range(first, first + ROUNDS + 1):
        began_s = time.perf_counter()
        work(number)
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds[1:])


def memcpy_s(size_bytes: int) -> float:
    import torch

    source = torch.ones(size_bytes, dtype=torch.uint8)
    target = torch.ones_like(source)
    return median_s(lambda _: target.copy_(source))


def give(folder: Path) -> dict[str, Any]:
    """The trainer: its times; it leaves version 100 for the engines."""
    rank = Rank(folder / "model", "bfloat16", stem=folder / "rank-00000")
    weights, host = rank.worker._ready.weights, rank.worker._ready.host

    def copy(version: int) -> None:
        host.changed(version)
        host.copy(("weights",))

    copied_s = median_s(copy, 1)
    sums_s = median_s(lambda version: weights.publish(version, lambda: None), 20)
    rank.publish(folder / "v100", [[3, 4, 5]], 100)
    size_bytes = weights.size_bytes
    return {"copy": copied_s, "sums": sums_s, "memcpy": memcpy_s(size_bytes), "bytes": size_bytes}


def take(folder: Path, kind: str) -> dict[str, Any]:
    """An engine."""
    prepare_environment(device="cpu", threads=1)
    import_library(kind)  # type: ignore[arg-type]
    options = EngineOptions(
        model=str(folder / "model"), dtype="bfloat16", device="cpu", eos_ids=(2,), max_model_tokens=128,
        kv_cache_bytes=64 << 20, weights_are_replaced=True,
    )  # fmt: skip
    engine = build_engine(kind, options)  # type: ignore[arg-type]
    engine.start()
    loaded_s = median_s(lambda _: engine.load_weights(100, str(folder / "v100")))
    compared_s = median_s(lambda _: engine.compare_weights(100, str(folder / "v100")))
    engine.close()
    return {"load": loaded_s, "compare": compared_s, "memcpy": memcpy_s(535_000_000)}


if __name__ == "__main__":
    result = give(Path(sys.argv[2])) if sys.argv[1] == "give" else take(Path(sys.argv[2]), sys.argv[3])
    print(json.dumps(result))
