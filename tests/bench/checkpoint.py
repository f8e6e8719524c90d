"""Host memory and time of saving and restoring a checkpoint: two data-parallel ranks, a folder as the store.

`python -m tests.bench.checkpoint FOLDER RANK` is one rank; it writes FOLDER/rank-RANK.json.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANKS = 2
MOST_EXTRA = 1.2
SIZES = {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 96, "vocab_size": 16000, "tie_word_embeddings": False,
}  # fmt: skip
"""52 M parameters: 14 bytes each in bfloat16 with main copies and moments, 365 MB a rank."""


def run() -> dict:
    """Both ranks; gives the result for the page."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = measure(Path(folder))
    rows = [
        [f"rank {index}", f"{rank['range_bytes'] / 1e6:.0f} MB", *(_cell(rank, part) for part in PARTS)]
        for index, rank in enumerate(ranks)
    ]
    worst = max(rank["save_peak_bytes"] / rank["range_bytes"] for rank in ranks)
    target = {
        "what": "peak extra host memory of a save / the rank's own range", "target": f"<= {MOST_EXTRA}",
        "value": f"{worst:.2f}", "met": worst <= MOST_EXTRA,
    }  # fmt: skip
    return {
        "title": "Saving and restoring a checkpoint",
        "how": "A random Qwen3 of 52 M parameters in bfloat16, DP 2 over gloo, into a folder. Each rank "
        "writes its own range of the optimizer in pieces. Memory: the rise of the process's peak (VmHWM).",
        "head": ["rank", "own range", "save", "restore"],
        "rows": rows,
        "targets": [target],
    }


PARTS = ("save", "restore")


def _cell(rank: dict, part: str) -> str:
    return f"{rank[f'{part}_s']:.2f} s, +{rank[f'{part}_peak_bytes'] / 1e6:.0f} MB"


def measure(folder: Path) -> list[dict]:
    """Runs the ranks; gives what each measured."""
    from tests.integration.trainer.conftest import child_environment

    commands = [
        [sys.executable, "-m", "tests.bench.checkpoint", str(folder), str(rank)] for rank in range(RANKS)
    ]
    processes = [subprocess.Popen(command, env=child_environment()) for command in commands]
    try:
        codes = [process.wait(300) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}")
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def peak_bytes() -> int:
    """Largest resident size of this process since the peak was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) << 10


def reset_peak() -> int:
    """Forget the peak; gives the resident size now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def rank_main(folder: Path, rank: int) -> None:
    """One rank: builds, saves, restores, measures."""
    import msgspec
    import torch
    import torch.distributed as dist
    import transformers

    from tests.integration.trainer.program import make_config
    from yatt.checkpoint.manifest import Manifest
    from yatt.checkpoint.store import FolderStore
    from yatt.records.message import ShardsSaved
    from yatt.trainer.device import prepare_process
    from yatt.trainer.model import build_policy, join_model_parallel
    from yatt.trainer.snapshot import restore, save_shards
    from yatt.weights.shape import shape_of

    torch.set_num_threads(1)
    config = make_config("unused", {"dtype": "bfloat16"})
    device = prepare_process(config, 0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    join_model_parallel(config.trainer, 0)
    shape = shape_of(transformers.Qwen3Config(**SIZES))
    policy = build_policy(config, shape, device, None, lambda: None)
    for part in policy.optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            state["exp_avg"].fill_(0.5), state["exp_avg_sq"].fill_(0.25)
    store = FolderStore(folder / "store")
    before, began_s = reset_peak(), time.monotonic()
    saved = save_shards(policy, store, "global_step_1/1-bench", lambda: None)
    notes = {"save_s": time.monotonic() - began_s, "save_peak_bytes": peak_bytes() - before}
    notes["range_bytes"] = sum(file.size_bytes for file in saved.files)
    store.write(f"reports/{rank}", msgspec.msgpack.encode(saved))
    dist.barrier()
    reports = [msgspec.msgpack.decode(store.read(f"reports/{r}"), type=ShardsSaved) for r in range(RANKS)]
    manifest = Manifest(
        iteration=1, attempt=1, config_hash="", files=tuple(file for r in reports for file in r.files),
        common=msgspec.Raw(reports[0].common), nodes=(),
    )  # fmt: skip
    before, began_s = reset_peak(), time.monotonic()
    restore(policy, store, manifest, lambda: None)
    notes |= {"restore_s": time.monotonic() - began_s, "restore_peak_bytes": peak_bytes() - before}
    (folder / f"rank-{rank}.json").write_text(json.dumps(notes))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]), int(sys.argv[2]))
