"""Prompts with pictures: what a controller holds and sends, by reference, with their bytes, or decoded."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.bench.media_arms import BYTES, REFERENCES, ROWS, TEXT
from tests.bench.media_room import CACHE_BYTES, NUM_PICTURES, most_room
from tests.tiny_models import make_seeing_scripted_model
from tests.worker_process import write_run
from yatt.control.training import PORTION_BYTES

SIZES = (64, 128, 256)
"""Numbers of prompts."""

SAMPLES, SIDE = 8, 1184
MOST_GROWTH, MOST_SHARE, MOST_ADDED, MOST_ROOM, MOST_SENT = 5 << 20, 0.02, 300, 1.1, 8192
LIMIT_S = 600

Seen = dict[str, dict[int, dict[str, Any]]]
"""Figures by arm and number of prompts."""


def prepare(folder: Path) -> None:
    """Pictures that do not compress, prompts that name them, and a run's config."""
    images = folder / "images"
    (images / "geometry" / "train").mkdir(parents=True)
    lines, draw = [], np.random.default_rng(0)
    for number in range(max(SIZES)):
        image = Image.fromarray(draw.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))
        name = f"geometry/train/{number:06}.png"
        image.save(images / name, compress_level=0)
        digest = hashlib.sha256((images / name).read_bytes()).hexdigest()
        picture = {"path": name, "sha256": digest, "width": SIDE, "height": SIDE}
        lines.append(json.dumps({"prompt": f"<image>{number}+1=", "images": [picture]}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    data = {
        "train_files": [str(folder / "train.jsonl")], "media_root": str(images), "shuffle": False,
        "media_store": str(folder / "store"), "ground_truth_key": "", "max_prompt_tokens": 128,
    }  # fmt: skip
    batch = {"train_batch_size": max(SIZES), "mini_batch_size": max(SIZES)}
    write_run(folder, {
        "data": data, "model": {"path": make_seeing_scripted_model(folder / "model")},
        "rollout": {"engine": "scripted", "n": SAMPLES}, "media": {"cache_bytes": 1 << 30},
        "trainer": batch,
    })  # fmt: skip


def measure() -> Seen:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    seen: Seen = {REFERENCES: {}, TEXT: {}, BYTES: {}, ROWS: {}}
    with tempfile.TemporaryDirectory(prefix="yatt-") as folder:
        prepare(Path(folder))
        for num_prompts in SIZES:
            for kind, found in seen.items():
                argv = [sys.executable, "-m", "tests.bench.media_arms", folder, kind, str(num_prompts)]
                done = subprocess.run(
                    argv, check=True, stdout=subprocess.PIPE, text=True, env=env, timeout=LIMIT_S
                )
                found[num_prompts] = json.loads(done.stdout.splitlines()[-1])
    return seen


def run() -> dict[str, Any]:
    seen = measure()
    room = most_room()
    mine, largest = seen[REFERENCES], max(SIZES)
    added = {kind: size / num for kind, (size, num) in mine[largest]["added"].items()}
    of_picture = sum(size for size, _ in mine[largest]["added"].values()) / largest
    return {
        "title": "Prompts with pictures",
        "how": f"Prompts x {SAMPLES} samples of 64 tokens, a PNG of {SIDE} x {SIDE} pixels each (4 MiB). By "
        "reference, one controller holds all prompts: its own code opens the batch, has the pictures "
        "prepared by a real media process, sends the requests to an engine, which maps the prepared files, "
        "takes completions and scores, and makes the orders to a trainer rank; a leader in a process of its "
        "own decides from metadata who trains on what. A single controller has the pictures in its batch: "
        "their files, each sent once; or what verl's driver has, their decoded pixel rows (256 x 1536 "
        "float32), a copy for each sample, pickled to its consumer. Memory: rise of a process's peak, after "
        "one prompt.",
        "head": ["process", *(f"{size} prompts" for size in SIZES), f"sent, {largest} prompts"],
        "rows": rows_of(seen),
        "targets": [*memory_targets(seen), *wire_targets(seen), room_target(room)],
        "notes": [
            "A controller's memory grows by its samples, which it holds as token ids, log-probs and scores "
            f"until they are trained on: without pictures by {growth_of(seen[TEXT]) / 2**20:.1f} MiB. Most "
            "of that is held: 1.7 KiB a sample, of which 0.6 are its bytes, and its metadata for the plan. "
            f"Samples are handed over in portions of {PORTION_BYTES >> 10} KiB a rank, which are in memory "
            "two and a half times. With several nodes a controller opens only its share of the prompts.",
            "Bytes that a picture adds to a message: "
            + ", ".join(f"{kind} {value:.0f}" for kind, value in added.items())
            + f". All messages of a picture, in {SAMPLES} samples: {of_picture:,.0f} bytes."
        ],
    }  # fmt: skip


def rows_of(seen: Seen) -> list[list[str]]:
    mine, largest = seen[REFERENCES], max(SIZES)
    names = {
        "controller": "a controller: references", "leader": "the leader", "engine": "its engine (scripted)",
        "media process": "the node's media process",
    }  # fmt: skip
    others = {
        TEXT: "a controller: the same prompts without pictures", BYTES: "a single controller: files",
        ROWS: f"a single controller: rows, {SAMPLES} times",
    }  # fmt: skip
    rows = [
        [title, *(mebibytes(mine[size][name]) for size in SIZES),
         mebibytes(mine[largest]["sent"]) if name == "controller" else ""]
        for name, title in names.items()
    ]  # fmt: skip
    return rows + [
        [title, *(mebibytes(seen[kind][size]["controller"]) for size in SIZES),
         mebibytes(seen[kind][largest]["sent"])]
        for kind, title in others.items()
    ]  # fmt: skip


def mebibytes(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


def target(what: str, wanted: str, value: str, *, met: bool) -> dict[str, Any]:
    return {"what": what, "target": wanted, "value": value, "met": met}


def growth_of(found: dict[int, dict[str, Any]], name: str = "controller") -> int:
    """Bytes by which a process's memory differs most from that with the fewest prompts."""
    rises = [found[size][name] for size in SIZES]
    return max(rises, key=lambda rise: abs(rise - rises[0])) - rises[0]


def memory_targets(seen: Seen) -> list[dict[str, Any]]:
    targets, mine = [], seen[REFERENCES]
    for name in ("controller", "leader"):
        growth, rises = growth_of(mine, name), [mine[size][name] for size in SIZES]
        shares = [rise / seen[ROWS][size]["controller"] for rise, size in zip(rises, SIZES, strict=True)]
        targets += [
            target(f"{name}: memory from {SIZES[0]} to {SIZES[-1]} prompts", "within +- 5 MiB",
                   f"{growth / 2**20:+.1f} MiB", met=abs(growth) <= MOST_GROWTH),
            target(f"{name}: memory / a single controller's with rows, worst size", f"<= {MOST_SHARE:.0%}",
                   f"{max(shares):.2%}", met=max(shares) <= MOST_SHARE),
        ]  # fmt: skip
    added = [mine[size]["controller"] - seen[TEXT][size]["controller"] for size in SIZES]
    more = max(added, key=abs)
    share = mine[SIZES[-1]]["controller"] / seen[BYTES][SIZES[-1]]["controller"]
    return [
        *targets,
        target("controller: memory with pictures - without, most of all sizes", "within +- 5 MiB",
               f"{more / 2**20:+.1f} MiB", met=abs(more) <= MOST_GROWTH),
        target("controller: memory / a single controller's with files", f"<= {MOST_SHARE:.0%}",
               f"{share:.2%}", met=share <= MOST_SHARE),
    ]  # fmt: skip


def wire_targets(seen: Seen) -> list[dict[str, Any]]:
    found = seen[REFERENCES][SIZES[-1]]
    added = max(size / num for size, num in found["added"].values())
    sent = found["requests"] / SIZES[-1]
    return [
        target("bytes that a picture adds to a message, the largest", f"<= {MOST_ADDED}", f"{added:.0f}",
               met=added <= MOST_ADDED),
        target("bytes of requests per prompt by reference", "<= 8 KiB", f"{sent / 1024:.1f} KiB",
               met=sent <= MOST_SENT),
    ]  # fmt: skip


def room_target(room: int) -> dict[str, Any]:
    share = room / CACHE_BYTES
    return target(
        f"prepared files of {NUM_PICTURES} pictures / media.cache_bytes", f"<= {MOST_ROOM}", f"{share:.3f}",
        met=share <= MOST_ROOM,
    )  # fmt: skip
