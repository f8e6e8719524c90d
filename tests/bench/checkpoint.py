"""What a save costs training: the host copy against memcpy, torch's own asynchronous saves, and a plain copy.

`python -m tests.bench.checkpoint FOLDER MEMORY S3 RANK` is one rank; it writes FOLDER/rank-RANK.json.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tests.conftest import BUCKET, S3_KEYS, s3_server
from tests.runs import environment, popen

RANKS, ROUNDS = 2, 3
MOST_EXTRA_BYTES = 256 << 20
"""Most memory of a save beside the host copy, for each rank."""
SIZES = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 20000, "tie_word_embeddings": False,
}  # fmt: skip
"""87 M parameters: 14 bytes each in bfloat16 with main copies and moments, 1.2 GB for both ranks."""
FEWER = {"num_hidden_layers": 1, "vocab_size": 18000}
"""Where only memory is measured: 48 M parameters, of which a rank saves more than `MOST_EXTRA_BYTES`."""

ARMS = {
    "memcpy": "memcpy of the same bytes",
    "offload": "offload (the copy, then free) without a save",
    "extra": "a save: what it adds to the offload",
    "copy": "a save where trainers never sleep: the copy",
    "dcp_thread": "torch DCP async_save, thread: until it returns",
    "dcp_process": "torch DCP async_save, process: until it returns",
    "dcp_s3": "torch DCP async_save to S3, thread: until it returns",
    "mcore": "megatron-core's own asynchronous save: until it returns",
    "aside": "slow sink: bytes not uploaded yet are copied aside before the next offload",
    "dcp_slow": "slow sink: torch DCP waits for the save before",
    "upload": "the upload to a folder, 4 files at once, with fsync",
    "plain": "fsspec copies the same files, 4 at once, with fsync",
    "upload_s3": "the upload to an S3 server, 4 files at once",
    "plain_s3": "s3fs copies the same files, 4 at once",
}
ONLY_MEMORY = "memory"
"""In place of an S3 endpoint: one save to the folder, of which only memory is measured."""

OTHERS = ("dcp_thread", "dcp_process", "dcp_s3", "mcore")
SLOW_BYTES_PER_S = 50e6
"""The slow sink takes so many bytes a second from each rank."""


def run() -> dict:
    """Both ranks; gives the result for the page."""
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        s3_server(Path(folder) / "s3.log") as endpoint,
    ):
        ranks = measure(Path(folder), Path(memory), endpoint)
    total = sum(rank["bytes"] for rank in ranks)
    worst = {arm: max(rank[arm] for rank in ranks) for arm in ARMS}
    memcpy_s = worst["memcpy"]
    rows = [[says, f"{worst[arm]:.3f} s", f"{worst[arm] / memcpy_s:.2f}"] for arm, says in ARMS.items()]
    extra, best = worst["extra"], min(worst[arm] for arm in OTHERS)
    extra_bytes = max(rank["save_peak_bytes"] for rank in ranks)
    return {
        "title": "What a save costs training",
        "how": f"A random Qwen3 of 87 M parameters in bfloat16, DP 2 over gloo, {total / 1e9:.2f} GB of "
        "weights, main copies and moments in all. Seconds of the slower rank, medians of three rounds, "
        "both ranks at once on two cores. The host copy is in memory already when engines wake; the upload "
        "runs while engines hold the GPUs. DCP and megatron-core save the same tensors to the same disk, DCP "
        "also to the same S3 server (moto, on the same two cores). The slow sink takes "
        f"{SLOW_BYTES_PER_S / 1e6:.0f} MB/s of each rank. On CPU megatron-core copies nothing but forks: the "
        "copy is made page by page, by faults, when training changes the tensors.",
        "head": ["what", "seconds", "/ memcpy"],
        "rows": rows,
        "targets": [
            _target("stall of a save beyond the offload / memcpy", "<= 0.1",
                    max(0.0, extra) / memcpy_s, extra <= 0.1 * memcpy_s),
            _target("stall beyond the offload / best of the others", "<= 0.25", max(0.0, extra) / best,
                    extra <= 0.25 * best),
            _target("stall where trainers never sleep / memcpy", "<= 1.3", worst["copy"] / worst["memcpy"],
                    worst["copy"] <= 1.3 * worst["memcpy"]),
            _target("stall where trainers never sleep / best of the others", "<= 1", worst["copy"] / best,
                    worst["copy"] <= best),
            _target("memory of a save beside the host copy, MiB a rank", "<= 256", extra_bytes / 2**20,
                    extra_bytes <= MOST_EXTRA_BYTES),
            _target("speed of the upload / fsspec copy", ">= 0.9", worst["plain"] / worst["upload"],
                    worst["plain"] >= 0.9 * worst["upload"]),
            _target("speed of the upload to S3 / s3fs", ">= 0.9", worst["plain_s3"] / worst["upload_s3"],
                    worst["plain_s3"] >= 0.9 * worst["upload_s3"]),
        ],
    }  # fmt: skip


def _target(what: str, target: str, value: float, met: bool) -> dict:
    return {"what": what, "target": target, "value": f"{value:.2f}", "met": met}


def measure(folder: Path, memory: Path, endpoint: str) -> list[dict]:
    """Runs the ranks; gives what each measured. They are forked where only memory is."""
    from tests.integration.trainer.conftest import child_environment

    command = [sys.executable, "-P", "-m", "tests.bench.checkpoint", str(folder), str(memory), endpoint]
    if endpoint == ONLY_MEMORY:
        begin, variables = popen, environment()
    else:
        begin, variables = subprocess.Popen, child_environment() | S3_KEYS | {"AWS_ENDPOINT_URL": endpoint}
    processes = [begin([*command, str(rank)], env=variables) for rank in range(RANKS)]
    try:
        codes = [process.wait(600) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}")
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def build(folder: Path, sizes: dict[str, Any], rank: int) -> Any:
    """A policy with optimizer state, in one of two data-parallel ranks."""
    import torch
    import torch.distributed as dist
    import transformers

    from tests.integration.trainer.program import make_config
    from yatt.models.model import model_of
    from yatt.trainer.device import prepare_process
    from yatt.trainer.mcore.model import build_policy, join_model_parallel

    torch.set_num_threads(1)
    config = make_config("unused", {"dtype": "bfloat16"})
    device = prepare_process(config, 0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    join_model_parallel(config.trainer, 0)
    policy = build_policy(config, model_of(transformers.Qwen3Config(**sizes)), device, None, lambda: None)
    for part in policy.optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            state["exp_avg"].fill_(0.5), state["exp_avg_sq"].fill_(0.25)
    return policy


class Peak(threading.Thread):
    """Samples this process's private memory; `rise` is the largest increase since the start. Shared memory is
    not in it: the host copy is mapped by its writer and its reader."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over, self._first, self._most = threading.Event(), private_bytes(), 0

    def run(self) -> None:
        """Samples until `rise`."""
        while not self._over.wait(0.005):
            self._most = max(self._most, private_bytes() - self._first)

    def rise(self) -> int:
        """Ends the sampling; gives bytes."""
        self._over.set()
        self.join()
        return self._most  # the same at each later call


def private_bytes() -> int:
    """Anonymous resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) << 10


def timed(work: Callable[[], object]) -> float:
    """Seconds of a call that both ranks begin at once."""
    import torch.distributed as dist

    dist.barrier()
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def stalls(host: Any) -> dict[str, float]:
    """Medians of the copies, in turn."""
    import torch

    from yatt.adapters.node_local.host_segment import AREAS

    source = [torch.ones(held.size_bytes, dtype=torch.uint8) for held in host._held.values() if held.area]
    target = [torch.ones_like(each) for each in source]
    seen: dict[str, list[float]] = {"memcpy": [], "offload": [], "extra": [], "copy": []}
    for version in range(ROUNDS + 1):  # the first round touches the memory
        memcpy_s = timed(lambda: [there.copy_(here) for there, here in zip(target, source, strict=True)])
        host.changed(3 * version)
        offload_s = timed(host.offload)
        host.onload()
        host.changed(3 * version + 1)
        copy_s = timed(partial(host.copy, AREAS))
        both_s = copy_s + timed(host.offload)
        host.onload()
        for name, seconds in (
            ("memcpy", memcpy_s), ("offload", offload_s), ("extra", both_s - offload_s), ("copy", copy_s)
        ):  # fmt: skip
            seen[name].append(seconds)
    return {name: statistics.median(values[1:]) for name, values in seen.items()}


def tensors_of(policy: Any, rank: int) -> dict[str, Any]:
    """All tensors that this rank saves, by unique names."""
    from yatt.trainer.state.snapshot import _owned

    return {
        f"r{rank}.{kind}.{index}": tensor.detach()
        for index, one in enumerate(_owned(policy))
        for kind, tensor in (("main", one.main), *one.state.items(), ("model", one.local.parameter))
    }


def dcp(policy: Any, folder: Path, rank: int) -> dict[str, float]:
    """How long torch's asynchronous saves hold the trainer; the second save of each kind."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    state, seen = tensors_of(policy, rank), {}
    for name in ("THREAD", "PROCESS", "S3"):
        for number in range(2):
            futures: list[Any] = []
            kind = AsyncCheckpointerType["PROCESS" if name == "PROCESS" else "THREAD"]
            place = f"s3://{BUCKET}/dcp" if name == "S3" else str(folder / f"{name}{number}")
            writer = FsspecWriter(place) if name == "S3" else None
            save = partial(
                checkpoint.async_save, state, checkpoint_id=place, storage_writer=writer,
                async_checkpointer_type=kind,
            )  # fmt: skip
            seen[f"dcp_{name.lower()}"] = timed(lambda save=save, futures=futures: futures.append(save()))
            futures[0].result()
    size_bytes = sum(tensor.nbytes for tensor in state.values())
    return seen | {"dcp_slow": size_bytes / SLOW_BYTES_PER_S}


def mcore(policy: Any, folder: Path, rank: int) -> dict[str, float]:
    """The same for megatron-core's own asynchronous save."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    state = {
        name: ShardedTensor.from_rank_offsets(name, tensor)
        for name, tensor in tensors_of(policy, rank).items()
    }
    queue = AsyncCallsQueue(persistent=False)  # its other kind needs a CUDA device

    def save(place: Path) -> None:
        request = dist_checkpointing.save(
            state, str(place), ("torch_dist", 1), async_sharded_save=True, validate_access_integrity=False
        )
        queue.schedule_async_request(request)

    seconds = 0.0
    for number in range(2):
        (place := folder / f"mcore{number}").mkdir(exist_ok=True)
        seconds = timed(partial(save, place))
        queue.maybe_finalize_async_calls(blocking=True)
    return {"mcore": seconds}


def upload(policy: Any, host: Any, store_folder: Path, stem: Path, endpoint: str) -> dict[str, float]:
    """Uploads the host copy, then copies the files it became with fsspec, as many at once."""
    import fsspec
    import msgspec

    from yatt.adapters.node_local.host_segment import AREAS, plan_path
    from yatt.checkpoint.store.store import FolderStore, open_store
    from yatt.trainer.state.snapshot import save_plan

    plan_path(stem).write_bytes(msgspec.msgpack.encode(plan := save_plan(policy, host)))
    peak = Peak()
    peak.start()
    host.changed(1000)
    host.copy(AREAS)
    seen: dict[str, list[float]] = {"upload": [], "plain": [], "upload_s3": [], "plain_s3": []}
    own, url, options = FolderStore(store_folder), f"s3://{BUCKET}/ours", {"endpoint_url": endpoint}
    for number in range(ROUNDS):
        seen["upload"].append(timed(job_of(own, f"r{number}", stem).run))
        save_peak_bytes = peak.rise()  # of the first save
        if endpoint == ONLY_MEMORY:
            break
        names = sorted((store_folder / f"r{number}").glob(f"rank-{plan.rank:05d}*"))
        plain = store_folder / f"plain{number}"
        plain.mkdir(exist_ok=True)
        seen["plain"].append(timed(partial(copy_files, fsspec.filesystem("file"), names, str(plain))))
        s3, s3_driver = open_store(url, options), fsspec.filesystem("s3", **options)
        seen["upload_s3"].append(timed(job_of(s3, "files", stem).run))
        seen["plain_s3"].append(timed(partial(copy_files, s3_driver, names, f"{url}/plain")))
    medians = {name: statistics.median(values) for name, values in seen.items() if values}
    return medians | {"range_bytes": plan.size_bytes, "save_peak_bytes": save_peak_bytes}


def job_of(store: Any, prefix: str, stem: Path, bytes_per_s: float = 0.0) -> Any:
    """An upload of the host copy of `upload`."""
    from yatt.adapters.node_local.host_segment import Stamp
    from yatt.uploader.upload import Throttle, UploadJob

    throttle, stamp = Throttle(bytes_per_s), Stamp(1, 1000)
    return UploadJob(store, prefix, [stem], stamp, throttle=throttle, tick=lambda: None)


def copy_files(driver: Any, names: list[Path], folder: str) -> None:
    """Copies files as fsspec does, as many at once as an upload; local ones with fsync."""
    from yatt.uploader.upload import THREADS

    def copy(name: Path) -> None:
        target = f"{folder}/{name.name}"
        driver.put_file(str(name), target)
        if Path(target).exists():
            with open(target, "rb") as file:
                os.fsync(file.fileno())

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(copy, names))


def slow(store_folder: Path, stem: Path) -> dict[str, float]:
    """What a next offload waits for while an upload is in flight: all bytes are copied aside."""
    from yatt.adapters.node_local.host_segment import AREAS
    from yatt.checkpoint.store.store import FolderStore

    job = job_of(FolderStore(store_folder), "slow", stem, SLOW_BYTES_PER_S)
    running = threading.Thread(target=_quietly, args=(job.run,))
    running.start()
    time.sleep(0.2)
    seconds = timed(partial(job.detach, AREAS))
    job.cancel()
    running.join()
    job.close()
    return {"aside": seconds}


def _quietly(work: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):  # it is cancelled
        work()


def rank_main(folder: Path, memory: Path, endpoint: str, rank: int) -> None:
    """One rank: builds, measures each arm."""
    import torch.distributed as dist

    from yatt.trainer.state.model_tensors import host_copy_of

    sizes = SIZES | (FEWER if endpoint == ONLY_MEMORY else {})
    policy, stem = build(folder, sizes, rank), memory / f"rank-{rank:05d}"
    host = host_copy_of(policy, [], stem, 1)
    allocated = sum(path.stat().st_blocks * 512 for path in memory.glob(f"{stem.name}.*"))
    areas = sum(held.size_bytes for held in host._held.values() if held.area)
    notes = {
        "bytes": host.host_bytes,
        "host_bytes": allocated,
        "state_bytes": areas,
        **(stalls(host) if endpoint != ONLY_MEMORY else {}),
        **upload(policy, host, folder / "store", stem, endpoint),
    }
    if endpoint != ONLY_MEMORY:
        notes |= slow(folder / "slow", stem) | mcore(policy, folder, rank)
        notes |= dcp(policy, folder / "dcp", rank)
    (folder / f"rank-{rank}.json").write_text(json.dumps(notes))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
