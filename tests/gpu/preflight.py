"""Facts of this machine, its driver and libraries that runs rely on. Needs no vLLM.

    python -m tests.gpu.preflight [--toy] [--only FACT ...] --out FOLDER

A fact that fails says what a run here would meet. Facts of a GPU are left out where there is none.
"""

import inspect
import logging
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.gpu.cases import Benchmark, Case, Place, Row
from yatt.engine.environment import choose_device

GIB = 1 << 30
PACKAGES = (
    "torch", "triton", "transformers", "megatron-core", "vllm", "flashinfer-python", "transformer-engine",
    "trl", "msgspec", "pyzmq", "nvidia-ml-py", "cryptography",
)  # fmt: skip
VARIABLES = ("CUDA", "NCCL", "NVIDIA", "PYTORCH", "TORCH", "VLLM")
HEAD_SIZES = (64, 128, 192, 256)
FREED_LIMIT_S = 20.0
CONTEXT = "import sys, torch; torch.zeros(1, device='cuda'); print('on', flush=True); sys.stdin.read()"


def cases(is_toy: bool) -> list[Case]:
    """The facts, those of a GPU only where there is one."""
    seconds = 3.0 if is_toy else 15.0
    found = [Case("machine", {"fact": "machine"}), Case("kernels", {"fact": "kernels"})]
    found.append(Case("store", {"fact": "store", "seconds": seconds}))
    found.append(Case("host memory", {"fact": "host_memory", "size": (1 << 26) if is_toy else 4 * GIB}))
    if choose_device("auto") == "cuda":
        found += [Case(name, {"fact": name}) for name in ("nvml", "context", "speeds")]
    return found


def measure(settings: Row, place: Place) -> Row:
    """Finds out one fact."""
    facts = {
        "machine": machine, "kernels": kernels, "store": store, "host_memory": host_memory, "nvml": nvml,
        "context": context, "speeds": speeds,
    }  # fmt: skip
    return facts[settings["fact"]](settings, place)


def machine(_: Row, place: Place) -> Row:
    """Versions, limits and room."""
    versions: Row = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    shm, disk = shutil.disk_usage("/dev/shm"), shutil.disk_usage(place.work)
    return {
        "python": sys.version.split()[0], "kernel": platform.release(), "cpus": os.cpu_count(),
        "packages": versions, "shm_gib": [shm.free / GIB, shm.total / GIB], "disk_free_gib": disk.free / GIB,
        "memory": Path("/proc/meminfo").read_text().splitlines()[:3],
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK),
        "tools": {name: shutil.which(name) for name in ("gcc", "nvcc", "ninja", "nvidia-smi")},
        "variables": {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)},
        "card": _said(["nvidia-smi"]) if shutil.which("nvidia-smi") else "",
    }  # fmt: skip


def _said(argv: list[str]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout


def kernels(_: Row, __: Place) -> Row:
    """Whether torch's kernels for streams and experts are right on this device, by yatt's own check."""
    import torch
    from torch.nn.attention.varlen import varlen_attn

    from yatt.trainer.attention.varlen import SMALL_WINDOW, varlen_is_right
    from yatt.trainer.mcore.grouped_product import product_is_right

    row: Row = {"torch": torch.__version__, "varlen_signature": str(inspect.signature(varlen_attn))}
    if torch.cuda.is_available():
        device = torch.device("cuda")
        row["varlen_is_right"] = {size: varlen_is_right(device, size) for size in HEAD_SIZES}
        row["windows_are_right"] = {size: varlen_is_right(device, size, SMALL_WINDOW) for size in HEAD_SIZES}
        row["product_is_right"] = product_is_right(device)
    return row


def store(settings: Row, _: Place) -> Row:
    """Open descriptors of a rank that waits: the monitor thread of NCCL calls the run's store meanwhile."""
    import torch
    import torch.distributed as dist

    from yatt.adapters.net.curve import make_keys
    from yatt.adapters.net.key_value import KeyValueClient, KeyValueServer
    from yatt.collectives.group import RunStore, collective_backend

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        keys = make_keys(Path(folder) / "keys")
        server = KeyValueServer("127.0.0.1", keys)
        client = KeyValueClient("127.0.0.1", server.port, keys)
        run_store = RunStore(client, timedelta(seconds=30))
        dist.init_process_group(collective_backend(device), store=run_store, rank=0, world_size=1)
        began_s = time.perf_counter()
        dist.all_reduce(one := torch.ones(1, device=device))
        row: Row = {"sum": float(one), "first_collective_s": time.perf_counter() - began_s}
        before = len(os.listdir("/proc/self/fd"))
        time.sleep(settings["seconds"])
        row["descriptors"] = [before, len(os.listdir("/proc/self/fd"))]
        began_s = time.perf_counter()
        dist.destroy_process_group()
        row["leave_s"] = time.perf_counter() - began_s
        client.close()
        server.close()
    if row["descriptors"][1] > before + 2:
        row["failed"] = "descriptors grow while the rank waits"
    return row


def host_memory(settings: Row, _: Place) -> Row:
    """Copies from and to a segment of a host copy, registered or not; what a refused registration leaves."""
    import torch

    from yatt.adapters.node_local.host_segment import SegmentReader, SegmentWriter
    from yatt.weights.registered_memory import MemoryRegistrar

    row: Row = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        began_s = time.perf_counter()
        path = Path(folder) / "segment"
        segment = SegmentWriter(path, settings["size"])
        row["allocate_s"] = time.perf_counter() - began_s
        if not torch.cuda.is_available():
            return row
        whole = torch.frombuffer(segment.data, dtype=torch.uint8)
        device, registrar = torch.empty_like(whole, device="cuda"), MemoryRegistrar()
        row["unregistered_gb_per_s"] = [_gb_per_s(device, whole), _gb_per_s(whole, device)]
        began_s = time.perf_counter()
        row["is_registered"] = registrar.register(whole, segment, read_only=False)
        row["register_s"] = time.perf_counter() - began_s
        row["registered_gb_per_s"] = [_gb_per_s(device, whole), _gb_per_s(whole, device)]
        logging.disable()  # a refusal that is wanted would be told as a slow path
        row["is_refused_again"] = not MemoryRegistrar().register(whole, segment, read_only=False)
        logging.disable(logging.NOTSET)
        row["kernel_after_a_refusal"] = torch.zeros(8, device="cuda").add_(1).sum().item()
        reader = SegmentReader(path)
        view = torch.frombuffer(reader.data, dtype=torch.uint8)
        row["is_registered_read_only"] = registrar.register(view, reader, read_only=True)
        row["read_only_gb_per_s"] = _gb_per_s(device, view)
    if not (row["is_registered"] and row["is_registered_read_only"]):
        row["failed"] = "host memory cannot be registered: raise the limit of locked memory"
    return row


def _gb_per_s(target, source) -> float:
    import torch

    for _ in range(2):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
    return source.numel() / 1e9 / (time.perf_counter() - began_s)


def nvml(_: Row, __: Place) -> Row:
    """Whether NVML lists this process with its bytes, and its pid is one of ours."""
    import torch

    from yatt.adapters.machine.nvml import Nvml, sees_host_pids

    device = Nvml(("0",))
    row: Row = {"sees_host_pids": sees_host_pids(), "pid": os.getpid(), "faults": str(device.faults())}
    before = device.occupancy((0,))
    held = torch.zeros(GIB, dtype=torch.uint8, device="cuda")
    after = device.occupancy((0,))
    del held
    row["used_mib"] = [before.used_bytes >> 20, after.used_bytes >> 20]
    row["processes"] = {pid: used >> 20 for pid, used in after.processes.items()}
    if row["sees_host_pids"] and os.getpid() not in after.processes:
        row["failed"] = "NVML does not list this process"
    return row


def context(_: Row, __: Place) -> Row:
    """MiB of a process that has only a CUDA context, and seconds until they are free after its end."""
    from yatt.adapters.machine.nvml import Nvml

    device = Nvml(("0",))
    before = device.occupancy((0,)).used_bytes
    argv = [sys.executable, "-c", CONTEXT]
    holder = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "on\n"
    held = device.occupancy((0,)).used_bytes - before
    holder.communicate()
    began_s = time.monotonic()
    while device.occupancy((0,)).used_bytes > before + (64 << 20):
        if time.monotonic() - began_s > FREED_LIMIT_S:
            return {"context_mib": held >> 20, "failed": f"not free {FREED_LIMIT_S:g} s after its end"}
        time.sleep(0.01)
    return {"context_mib": held >> 20, "freed_s": time.monotonic() - began_s}


def speeds(_: Row, __: Place) -> Row:
    """Ceilings of the device: a large product in bfloat16, and a copy in its memory."""
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x, y = (torch.empty(4 * GIB, dtype=torch.uint8, device="cuda") for _ in range(2))
    product_s, copy_s = _median_s(lambda: a @ b), _median_s(lambda: x.copy_(y))
    return {"product_tflops": 2 * 8192**3 / product_s / 1e12, "copy_tb_per_s": 2 * x.numel() / copy_s / 1e12}


def _median_s(call) -> float:
    import torch

    seconds = []
    for _ in range(13):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return sorted(seconds[3:])[5]


if __name__ == "__main__":
    Benchmark("preflight", __doc__, cases, measure).main()
