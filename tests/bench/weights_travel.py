"""Weights between controllers: how fast, what more engine nodes cost, and whether event loops stay awake.

Each node's controller is a process, ``python -m tests.bench.weights_travel ROLE RUN_FOLDER ...``. See
tests/bench/cluster.py for what is real: here all but the weights' content.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tests.bench import cluster
from tests.tiny_models import make_scripted_model
from yatt.adapters.files.files import make_private, read_or_none, write_atomically
from yatt.adapters.net.curve import make_keys
from yatt.adapters.node_local.host_segment import SegmentWriter, Stamp, segment_path, weight_plan_path
from yatt.config.load import load_run_config, resolved_text
from yatt.control.gpus.weights import fill, former_weights
from yatt.control.gpus.weights.uploads import host_stem
from yatt.paths import RunPaths
from yatt.records import cluster as c, message as m
from yatt.uploader.upload import Throttle

SIZE_BYTES, LIMITED_BYTES = 1 << 30, 96 << 20
REPEATS, LIMITED_REPEATS = 5, 3
LINK_BYTES_PER_S = 50e6
"""What each node may send, in the comparison of numbers of nodes: little, so that two cores do not count."""

CHANGED_SHARE = 0.016
"""Weights around 0.02, Adam steps of 1e-6: bfloat16 numbers are 6e-5 apart there, so one in 60 changes."""

ENGINE_NODES = 4
BLOCK_BYTES = 1 << 20
MOST_LATE_S = 0.5
LOOK_S = 0.01


def prepare(root: Path, shm: Path, engine_nodes: int, *, sends_changes: bool) -> None:
    """A run folder for one trainer node and some rollout nodes."""
    paths = RunPaths(root)
    model = make_scripted_model(root / "model")
    data = root / "prompts.jsonl"
    data.write_text(json.dumps({"prompt": "1+1="}) + "\n")
    settings = {
        "run.dir": root, "data.train_files": f"[{data}]", "model.path": model,
        "launch.nodes": 1 + engine_nodes, "launch.scratch_dir": root / "s", "launch.shm_dir": shm,
        "optimizer.lr": "1.0e-3",
        "rewards": "[{name: exact, path: 'builtin:exact'}]", "rollout.engine": "scripted",
        "placement.mode": "disaggregated", "placement.trainer_nodes": 1, "trainer.total_iterations": 1,
        "trainer.train_batch_size": 1, "trainer.mini_batch_size": 1, "data.ground_truth_key": "''",
        "placement.send_changes": str(sends_changes).lower(),
    }  # fmt: skip
    empty = root / "empty.yaml"
    empty.write_text("{}\n")
    config = load_run_config([empty], [f"{key}={value}" for key, value in settings.items()])
    paths.config.write_text(resolved_text(config))
    make_keys(paths.keys)
    paths.attempt(cluster.ATTEMPT).mkdir(parents=True)


class Lateness:
    """How late the event loop ever came back to a task that wants to run every 10 ms."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._task = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(LOOK_S)
            self.worst_s = max(self.worst_s, time.monotonic() - before_s - LOOK_S)

    def end(self) -> float:
        self._task.cancel()
        return self.worst_s


def limit_link(bytes_per_s: float) -> None:
    """Makes this process send no faster; 0: no limit."""
    throttle = Throttle(bytes_per_s)
    for kind in (former_weights.OwnWeights, former_weights.PassedOnWeights):

        def block(self: Any, begin: int, end: int, original: Any = kind.block) -> memoryview:
            sent = original(self, begin, end)
            throttle.wait(len(sent))
            return sent

        kind.block = block  # type: ignore[method-assign]


async def give(root: Path, size_bytes: int, nodes: int, repeats: int, share: float) -> None:
    """The owner: publishes, answers until SIGTERM, writes how late its loop was.

    Args:
        share: of the 16-bit words that each version changes.
    """
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with cluster.nodes(root, range(1)) as (owner,):
        make_private(owner.node.weights_root)
        stem = host_stem(owner.node, 0)
        segment = SegmentWriter(segment_path(stem, "weights"), size_bytes)
        block = os.urandom(1 << 20)
        for begin in range(0, size_bytes, len(block)):
            segment.data[begin : begin + len(block)] = block
        weight_plan_path(stem).write_bytes(b"")
        words, chance = np.frombuffer(segment.data, np.uint16), np.random.default_rng(0)
        lateness = Lateness()
        for version in range(1, repeats + 1):
            words[chance.integers(0, len(words), int(share * len(words)))] += 1
            segment.complete(Stamp(cluster.ATTEMPT, version))
            write_atomically(root / f"ready-{version}", b"1")
            await _all_of(root, "done-{}-" + str(version), nodes)
        await stop.wait()
        write_atomically(root / "late-0", f"{lateness.end()}".encode())


async def take(root: Path, index: int, nodes: int, repeats: int) -> None:
    """An engine node: fetches again and again, when all are ready; writes the seconds, without the first."""
    async with cluster.nodes(root, range(index, index + 1)) as (taker,):
        for other in range(nodes):
            if other != index:
                taker.dial(other, await cluster.address_of(root, other))
        make_private(taker.node.weights_root)
        lateness, taken_s = Lateness(), []
        for version in range(1, repeats + 1):
            order = c.TakeWeights(policy_version=version, probe=(), probe_logprobs=(), rounding=0.0, sums={})
            write_atomically(root / f"at-{index}-{version}", b"1")
            await _all_of(root, "at-{}-" + str(version), nodes)
            await _all_of(root, f"ready-{version}", 2)
            began_s = time.monotonic()
            answer = await taker.controller.handle("node0", order)
            taken_s.append(time.monotonic() - began_s)
            assert isinstance(answer, m.Done), answer
            write_atomically(root / f"done-{index}-{version}", b"1")
        write_atomically(root / f"late-{index}", f"{lateness.end()}".encode())
        write_atomically(root / f"taken-{index}", json.dumps(taken_s[1:]).encode())
        await _all_of(root, "taken-{}", nodes)


async def _all_of(root: Path, name: str, nodes: int) -> None:
    """Waits for the files of all engine nodes."""
    while any(read_or_none(root / name.format(other)) is None for other in range(1, nodes)):
        await asyncio.sleep(0.005)


def measure(
    engine_nodes: int, size_bytes: int, repeats: int, link: float, share: float = 0.0
) -> tuple[float, float]:
    """Median of the slowest node's seconds, and the latest that any event loop came back.

    Args:
        share: of the weights that each version changes, if only changes are sent; 0: all are sent.
    """
    repeats += 1  # the first version is sent whole, into new memory
    with tempfile.TemporaryDirectory(prefix="yatt-") as folder, contextlib.ExitStack() as stack:
        root, nodes = Path(folder), 1 + engine_nodes
        shm = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="yatt-", dir="/dev/shm")))
        prepare(root, shm, engine_nodes, sends_changes=share > 0)
        begun = [_begin("give", folder, size_bytes, nodes, repeats, share, link)]
        begun += [_begin("take", folder, index, nodes, repeats, link) for index in range(1, nodes)]
        try:
            codes = [process.wait(timeout=300) for process in begun[1:]]
        finally:
            for process in begun:
                process.terminate()
                process.wait(timeout=60)
        assert not any(codes), codes
        rounds = zip(
            *(json.loads((root / f"taken-{index}").read_text()) for index in range(1, nodes)), strict=True
        )
        late_s = max(float((root / f"late-{index}").read_text()) for index in range(nodes))
        return statistics.median(map(max, rounds)), late_s


def _begin(*arguments: object) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "tests.bench.weights_travel", *map(str, arguments)])


def plain_s() -> float:
    """Seconds of one TCP stream of the same bytes with the same cipher, from one process to another."""
    key = AESGCM.generate_key(256)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = _begin("plain", listener.getsockname()[1], key.hex())
        connection, _ = listener.accept()
        target, sealed = bytearray(SIZE_BYTES), bytearray(BLOCK_BYTES + 16)
        target[:] = bytes(1) * SIZE_BYTES  # memory that is there
        cipher, place, out = AESGCM(key), memoryview(target), memoryview(sealed)
        with connection:
            connection.recv(1)
            began_s = time.monotonic()
            for at in range(0, SIZE_BYTES, BLOCK_BYTES):
                got = 0
                while got < len(out):
                    got += connection.recv_into(out[got:])
                cipher.decrypt_into(at.to_bytes(12, "big"), out, b"", place[at : at + BLOCK_BYTES])
            seconds = time.monotonic() - began_s
        sender.wait(timeout=60)
    return seconds


def plain(port: int, key: bytes) -> None:
    """The sender of `plain_s`."""
    data, out = memoryview(os.urandom(BLOCK_BYTES) * (SIZE_BYTES // BLOCK_BYTES)), bytearray(BLOCK_BYTES + 16)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        cipher = AESGCM(key)
        connection.sendall(b"1")
        for at in range(0, SIZE_BYTES, BLOCK_BYTES):
            cipher.encrypt_into(at.to_bytes(12, "big"), data[at : at + BLOCK_BYTES], b"", out)
            connection.sendall(out)


def run() -> dict[str, Any]:
    size_mb = SIZE_BYTES / 1e6
    stream_s = statistics.median(plain_s() for _ in range(REPEATS))
    fetch_s, late_s = measure(1, SIZE_BYTES, REPEATS, 0)
    stream_s = statistics.median([stream_s, *(plain_s() for _ in range(REPEATS))])
    changes_s, _ = measure(1, SIZE_BYTES, REPEATS, 0, CHANGED_SHARE)
    few_s, _ = measure(ENGINE_NODES, LIMITED_BYTES, LIMITED_REPEATS, LINK_BYTES_PER_S, CHANGED_SHARE)
    alone_s, _ = measure(1, LIMITED_BYTES, LIMITED_REPEATS, LINK_BYTES_PER_S)
    many_s, _ = measure(ENGINE_NODES, LIMITED_BYTES, LIMITED_REPEATS, LINK_BYTES_PER_S)
    limited_mb = LIMITED_BYTES / 1e6
    rows = [
        [
            "one TCP stream, AES-256-GCM, no controllers",
            f"{stream_s:.2f} s",
            f"{size_mb / stream_s:.0f} MB/s",
        ],
        ["fetch between two controllers", f"{fetch_s:.2f} s", f"{size_mb / fetch_s:.0f} MB/s"],
        [
            f"fetch of a version that changed {CHANGED_SHARE:.1%} of the weights",
            f"{changes_s:.2f} s",
            f"{size_mb / changes_s:.0f} MB/s",
        ],
        ["links of 50 MB/s: one engine node", f"{alone_s:.2f} s", f"{limited_mb / alone_s:.0f} MB/s"],
        [
            f"links of 50 MB/s: {ENGINE_NODES} engine nodes",
            f"{many_s:.2f} s",
            f"{limited_mb / many_s:.0f} MB/s",
        ],
        [
            f"the same, of a version that changed {CHANGED_SHARE:.1%} of the weights",
            f"{few_s:.2f} s",
            f"{limited_mb / few_s:.0f} MB/s",
        ],
    ]
    return {
        "title": "Weights between controllers",
        "how": f"A segment of {SIZE_BYTES >> 20} MiB from a trainer node's memory filesystem to that of an "
        "engine node: real controllers in processes, sealed with AES-256-GCM over TCP on the loopback, in "
        f"{fill.STREAMS} streams. Medians of {REPEATS} fetches after a first one. Then "
        f"{LIMITED_BYTES >> 20} MiB where each node may send 50 MB/s, the seconds of the slowest node. "
        "Lateness is of a task that wants "
        "to run every 10 ms.",
        "head": ["what", "time", "rate"],
        "rows": rows,
        "targets": [
            {"what": "fetch / one TCP stream with the same cipher", "target": ">= 0.8",
             "value": f"{stream_s / fetch_s:.2f}", "met": stream_s >= 0.8 * fetch_s},
            {"what": f"{ENGINE_NODES} engine nodes / one, limited links", "target": "<= 1.3",
             "value": f"{many_s / alone_s:.2f}", "met": many_s <= 1.3 * alone_s},
            {"what": f"{ENGINE_NODES} engine nodes, limited links: changes of {CHANGED_SHARE:.1%} / all",
             "target": "<= 0.2", "value": f"{few_s / many_s:.2f}", "met": few_s <= 0.2 * many_s},
            {"what": "latest an event loop came back", "target": f"<= {MOST_LATE_S:g} s",
             "value": f"{late_s:.3f} s", "met": late_s <= MOST_LATE_S},
        ],
    }  # fmt: skip


def main(role: str, *arguments: str) -> None:
    """One process of the benchmark."""
    if role == "plain":
        return plain(int(arguments[0]), bytes.fromhex(arguments[1]))
    limit_link(float(arguments[-1]))
    root = Path(arguments[0])
    if role == "give":
        return asyncio.run(give(root, *map(int, arguments[1:4]), float(arguments[4])))
    return asyncio.run(take(root, *map(int, arguments[1:4])))


if __name__ == "__main__":
    main(*sys.argv[1:])
