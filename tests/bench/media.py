"""Prompts with images: what a controller holds and sends, by reference and with their bytes.

python -m tests.bench.media FOLDER references|bytes     (one arm, in a process of its own)
"""

import gc
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from tests.bench.memory import resident_bytes
from tests.tiny_models import make_seeing_scripted_model
from yatt.adapters.inputs.dataset import RowFiles
from yatt.adapters.inputs.tokenizer import Tokenizer
from yatt.config.load import load_run_config
from yatt.config.schema import RunConfig
from yatt.control.rollouts.groups.data_shard import DataShard
from yatt.control.rollouts.groups.groups import PromptGroup
from yatt.media.fetch import MediaSources
from yatt.media.kept import KeptFiles
from yatt.records import message as m
from yatt.records.codec import decode_body, decode_frame, encode_frame
from yatt.records.episode import MediaRef
from yatt.records.media import MediaItem

GRID = (1, 16, 16)
PROMPTS, SAMPLES, IMAGE_BYTES = 256, 8, 4 << 20
REFERENCES, BYTES = "references", "bytes"
END = b"end"

ENGINE = """
import sys, zmq
from dataclasses import replace
from pathlib import Path
from yatt.config.load import load_run_config
from yatt.engine.protocol import rollout_options
from yatt.engine.scripted import ScriptedEngine
from yatt.records.codec import decode_body, decode_frame
folder = Path(sys.argv[1])
config = load_run_config([folder / "run.yaml"], [])
engine = ScriptedEngine(replace(rollout_options(config, "cpu"), media_folder=str(folder / "kept")))
engine.start()
context = zmq.Context()
pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
pull.connect(sys.argv[2]); push.connect(sys.argv[3])
done, images = 0, 0
while (frames := pull.recv_multipart())[0] != b"end":
    sample = decode_body(decode_frame(frames[0]))
    engine.add(sample)
    done += len(engine.abort())
    images += len(sample.media) or len(frames) - 1
push.send_string(f"{done} {images}")
"""
"""An engine in a process of its own; by reference it maps the prepared file of every image."""


def prepare(folder: Path) -> None:
    """Images that do not compress, prompts that name them, and a run file."""
    images = folder / "images"
    images.mkdir()
    files, patches = KeptFiles(folder / "kept", 1 << 30), np.zeros((math.prod(GRID), 768), np.uint8)
    lines = []
    for number in range(PROMPTS):
        data = os.urandom(IMAGE_BYTES)
        (images / f"{number}.png").write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        picture = {"path": f"{number}.png", "sha256": digest, "width": 256, "height": 256}
        lines.append(json.dumps({"prompt": f"<image>{number}+1=", "images": [picture]}))
        with files.order(number), files.claimed_file(number, digest):
            files.keep_file(number, digest, GRID, patches)
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    settings = {
        "run": {"dir": str(folder / "run")},
        "data": {
            "train_files": [str(folder / "train.jsonl")], "media_root": str(images),
            "media_store": str(folder / "store"), "ground_truth_key": "", "max_prompt_tokens": 128,
        },
        "model": {"path": make_seeing_scripted_model(folder / "model")},
        "rollout": {"engine": "scripted", "n": SAMPLES},
        "optimizer": {"lr": 1e-3}, "rewards": [{"name": "exact", "path": "builtin:exact"}],
        "trainer": {"total_iterations": 1, "train_batch_size": PROMPTS, "mini_batch_size": PROMPTS},
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(settings))


def requests_of(group: PromptGroup, *, by_reference: bool) -> list[m.SampleRequest]:
    return [
        m.SampleRequest(
            request_id=f"{group.number}/{sample.index}/0", prompt_ids=group.prompt, seed=sample.index,
            temperature=1.0, top_p=1.0, top_k=-1, max_tokens=16, group=f"{group.number}",
            media=tuple(msgspec.structs.replace(each, prepared=each.ref.sha256) for each in group.media)
            if by_reference else (),
        )
        for sample in group.samples
    ]  # fmt: skip


def arm(folder: Path, kind: str) -> None:
    """Opens a batch and sends its requests to an engine; prints the figures as JSON."""
    config = load_run_config([folder / "run.yaml"], [])
    context = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    endpoints = [f"ipc://{folder}/{kind}-{way}" for way in ("to", "from")]
    push.set_hwm(16)
    push.bind(endpoints[0])
    pull.bind(endpoints[1])
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, str(folder), *endpoints])
    shard = DataShard(
        config, RowFiles(config.data.train_files, config.data, folder), Tokenizer(config.model.path)
    )
    shard.open(0)
    gc.collect()
    before = resident_bytes()
    began_s = time.monotonic()
    sent_bytes = 0
    groups, contents = opened(shard, config, kind)
    for group in groups:
        for number, request in enumerate(requests_of(group, by_reference=kind == REFERENCES)):
            frames = [encode_frame(1, 1, 0, request)]
            frames += contents.get(group.number, []) if number == 0 else []  # each image travels once
            assert decode_body(decode_frame(frames[0])) == request
            sent_bytes += sum(map(len, frames))
            push.send_multipart(frames)
    push.send(END)
    done, images = map(int, pull.recv_string().split())
    took_s = time.monotonic() - began_s
    assert engine.wait() == 0
    assert done == PROMPTS * SAMPLES and images in (PROMPTS, PROMPTS * SAMPLES)
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"memory": peak - before, "sent": sent_bytes, "took_s": took_s}))


def opened(
    shard: DataShard, config: RunConfig, kind: str
) -> tuple[list[PromptGroup], dict[int, list[bytes]]]:
    """The batch's prompt groups; and the bytes of their images, which a single controller holds."""
    groups = [group for group, _ in map(shard.open, range(PROMPTS)) if group is not None]
    if kind == REFERENCES:
        return groups, {}
    sources = MediaSources(config.data.media_root, config.data.media_store, {}, config.media.timeout_s)

    def content(ref: MediaRef) -> bytes:
        with sources.opened_source(MediaItem(ref.path, ref.sha256)) as source:
            return source.content(ref.sha256)

    return groups, {group.number: [content(each.ref) for each in group.media] for group in groups}


def measure() -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="yatt-") as folder:
        prepare(Path(folder))
        seen = {}
        for kind in (REFERENCES, BYTES):
            argv = [sys.executable, "-m", "tests.bench.media", folder, kind]
            seen[kind] = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
        return seen


def run() -> dict[str, Any]:
    seen = measure()
    mine, theirs = seen[REFERENCES], seen[BYTES]
    names = {REFERENCES: "a controller: references", BYTES: "a single controller: bytes in the batch"}
    share = mine["memory"] / theirs["memory"]
    return {
        "title": "Prompts with images",
        "how": f"{PROMPTS} prompts x {SAMPLES} samples, an image of {IMAGE_BYTES >> 20} MiB each. The "
        "controller's own code opens the batch and encodes the requests; an engine in a process of its own "
        "takes them over a socket. By reference, the engine maps the file that its node has prepared. The "
        "other arm does what a single controller does that has the images in its batch: it reads them and "
        "sends each once. With several nodes a controller opens only its share of the prompts. Memory: rise "
        "of the process's peak.",
        "head": ["what holds the batch", "memory", "bytes sent", "per prompt", "time"],
        "rows": [
            [names[kind], f"{one['memory'] / 2**20:,.1f} MiB", f"{one['sent'] / 2**20:,.2f} MiB",
             f"{one['sent'] / PROMPTS / 1024:,.1f} KiB", f"{one['took_s']:.2f} s"]
            for kind, one in seen.items()
        ],
        "targets": [
            {"what": "memory by reference / with bytes", "target": "<= 0.02", "value": f"{share:.4f}",
             "met": share <= 0.02},
            {"what": "bytes sent per prompt by reference", "target": "<= 8 KiB",
             "value": f"{mine['sent'] / PROMPTS / 1024:.1f} KiB", "met": mine["sent"] / PROMPTS <= 8192},
        ],
    }  # fmt: skip


if __name__ == "__main__":
    arm(Path(sys.argv[1]), sys.argv[2])
