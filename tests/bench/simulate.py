"""`yatt simulate` at several sizes: seconds of CPU, and the share of the system against the whole of it."""

import contextlib
import io
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from yatt.cli.main import main

SIZES = ((64, 32), (1024, 32), (16384, 32), (16384, 128))
"""GPUs, and groups of a batch for each 64 of them."""
MOST_S, MOST_APART = 60.0, 0.03
RUN: dict[str, Any] = {
    "run": {"dir": "runs/simulated"},
    "launch": {"nodes": 8, "gpus_per_node": 8},
    "data": {"train_files": ["train.jsonl"]},
    "model": {"path": "policy"},
    "rollout": {"n": 8, "max_response_tokens": 8192, "max_num_seqs": 128, "tp_size": 8},
    "genrms": [{"name": "judge", "model": "judge", "template": "{prompt}{completion}?",
                "verdict": {"pattern": "([0-9])"}, "tp_size": 8, "max_num_seqs": 128}],
    "placement": {"mode": "partial", "genrm_gpu_sets": 2},
    "optimizer": {"lr": 1.0e-6},
    "trainer": {"total_iterations": 100, "train_batch_size": 32, "mini_batch_size": 32,
                "max_tokens_per_micro_batch": 16384},
}  # fmt: skip
FIGURES = (
    "--lengths", "1500,0.8", "--speed", "rollout=0.00333,0.00021", "--speed", "genrm:judge=0.0091,0.00057",
    "--verdict-tokens", "judge=825", "--switch-s", "15", "--train-s", "120",
)  # fmt: skip


def simulated(file: Path, *words: str) -> tuple[str, float]:
    """What the command prints, and its seconds of CPU."""
    out, before_s = io.StringIO(), time.process_time()
    sys.argv = ["yatt", "simulate", str(file), *FIGURES, *words]
    with contextlib.redirect_stdout(out):
        code = main()
    assert code == 0, code
    return out.getvalue(), time.process_time() - before_s


def row(file: Path, gpus: int, groups: int) -> tuple[list[str], float, float]:
    """The table's cells, seconds of CPU, and how far the share is from the whole; 0 if all was simulated."""
    page = file.with_suffix(".html")
    size = (f"trainer.train_batch_size={groups}", "--gpus", str(gpus))
    said, cpu_s = simulated(file, *size, "--html", str(page))
    found = json.loads(simulated(file, *size, "--json", "--iterations", "3")[0])
    times = re.search(r"takes ([\d,.]+) s by this part and ([\d,.]+) s if", said)
    part_s, whole_s = (float(each.replace(",", "")) for each in times.groups()) if times else (1.0, 1.0)
    share = "all" if found["share"] == 1 else f"1/{found['share']}"
    compared = f"{part_s:g} s, {whole_s:g} s" if times else ""
    completions = groups * 8 * gpus // 64
    cells = [f"{gpus:,}", f"{completions:,}", str(len(found["results"])), share, compared, f"{cpu_s:.0f} s"]
    return cells, cpu_s, abs(part_s / whole_s - 1)


def run() -> dict[str, Any]:
    """Simulates every size."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(yaml.safe_dump(RUN))
        rows = [row(file, *size) for size in SIZES]
    longest_s, apart = max(each[1] for each in rows), max(each[2] for each in rows)
    return {
        "title": "yatt simulate: from 64 to 16,384 GPUs",
        "how": "The command in one process, with a page; slabs of 8 GPUs, lengths of mean 1,500. Where "
        "a share of the system is simulated, one batch of it is compared with the same batch on all slabs, "
        "up to 80,000 completions.",
        "head": ["GPUs", "completions", "settings", "simulated", "one batch: share, whole", "CPU seconds"],
        "rows": [each[0] for each in rows],
        "targets": [
            {"what": "the longest of them", "target": f"<= {MOST_S:.0f} s", "value": f"{longest_s:.0f} s",
             "met": longest_s <= MOST_S},
            {"what": "share against the whole", "target": f"<= {MOST_APART:.0%}", "value": f"{apart:.1%}",
             "met": apart <= MOST_APART},
        ],
    }  # fmt: skip
