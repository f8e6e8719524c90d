"""The batch script and the tasks of a test job (`yatt.launch.diagnose.trial`).

The batch script starts one task per node, as for a run. A task reports its node's resources, listens on a
port, connects to every other task, as controllers do, and takes part in the test of the shared folder.
"""

import argparse
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from yatt.adapters.files.files import read_or_none, write_atomically
from yatt.adapters.files.shared_folder import Member
from yatt.config.site import SiteConfig, step_environment
from yatt.errors import ConfigError
from yatt.launch.folder.installed_versions import Installed, versions_here
from yatt.launch.node.allocation import allocation_of
from yatt.launch.node.network import listening_place, own_address
from yatt.launch.node.node_check import NodeCheck
from yatt.launch.node.staging import fault_of
from yatt.launch.node.steps import python_of, srun_line
from yatt.launch.resolve.plan import Component

MEET_S, CONNECT_S = 60.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The report of one node."""

    node: str
    python: str
    gpus: int
    """Number of GPUs visible to the task: by nvidia-smi if available, else by CUDA_VISIBLE_DEVICES."""

    cpus: int
    """Number of CPUs that the task may use."""

    granted: int
    """CPUs of the job on the node, at most the machine's; 0 if Slurm does not report them."""

    address: str
    """Address of the node; empty if there is none, see `problem`."""

    unreached: tuple[str, ...]
    """Addresses of nodes whose port did not answer."""

    missing_commands: tuple[str, ...]
    locked_memory_bytes: int
    """Memory that may be locked, which InfiniBand needs; -1: unlimited."""

    problem: str = ""
    unfit: str = ""
    """Reason why a run would leave this node out; empty if it would not."""

    stage: str = ""
    """Reason why models and data would not be copied to this node; empty if they would, or are not to be."""

    versions: Installed | None = None
    shm_bytes: int = 0
    """Size of the memory filesystem; 0: not known."""


class TrialOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The test to run. `folders`: the scratch and the shared-memory folder."""

    site: SiteConfig
    component: Component
    folders: tuple[str, str]


def main() -> int:
    """Entry point: ``batch MEETING`` in the batch script, ``task MEETING ...`` in its step."""
    parser = argparse.ArgumentParser(prog="yatt.launch.diagnose.probe")
    parser.add_argument("what", choices=("batch", "task"))
    parser.add_argument("meeting", type=Path)
    parser.add_argument("--granted", type=int, default=0)
    arguments = parser.parse_args()
    return _batch(arguments.meeting) if arguments.what == "batch" else _task(arguments)


def _batch(meeting: Path) -> int:
    order = _order(meeting)
    parts, site = (order.component,), order.site
    allocation = allocation_of(os.environ, parts)
    argv = [
        *srun_line(parts, 0, site, allocation),
        python_of(site),
        "-P",
        "-m",
        "yatt.launch.diagnose.probe",
        "task",
        str(meeting),
        "--granted",
        f"{allocation.cpus.get(order.component.name, 0)}",
    ]
    return subprocess.run(argv, env=step_environment(site, os.environ), check=False).returncode


def _order(meeting: Path) -> TrialOrder:
    return msgspec.json.decode((meeting / "order.json").read_bytes(), type=TrialOrder)


def _task(arguments: argparse.Namespace) -> int:
    index, count = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    facts = _facts(arguments, index, count)
    write_atomically(arguments.meeting / f"facts-{index}", msgspec.json.encode(facts))
    report = Member(arguments.meeting / "fs", index=index, count=count, node=facts.node).measure()
    if report is not None:
        write_atomically(arguments.meeting / "report", msgspec.json.encode(report))
    return 0


def _facts(arguments: argparse.Namespace, index: int, count: int) -> NodeFacts:
    address, problem, order = "", "", _order(arguments.meeting)
    try:
        address = own_address(order.site, os.environ)
    except (ConfigError, OSError) as error:
        problem = str(error)
    return NodeFacts(
        node=os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        python=platform.python_version(),
        gpus=_gpus(),
        cpus=len(os.sched_getaffinity(0)),
        granted=min(arguments.granted, os.cpu_count() or arguments.granted),
        address=address,
        unreached=_unreached(arguments.meeting, address, index, count),
        missing_commands=tuple(name for name in ("scontrol", "srun") if shutil.which(name) is None),
        locked_memory_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        problem=problem,
        unfit=_unfit(order),
        versions=versions_here(),
        shm_bytes=_size_of(Path(order.folders[1])),
        stage=fault_of(order.site.stage, step_environment(order.site, os.environ)),
    )


def _unfit(order: TrialOrder) -> str:
    scratch, shm = map(Path, order.folders)
    check = NodeCheck(order.site, (scratch, shm), "auto", order.component.gpus_per_node, os.environ)
    found = check.run()
    return found.why if found else ""


def _size_of(folder: Path) -> int:
    """Bytes of the folder's filesystem; 0 if there is none."""
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return 0


def _gpus() -> int:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return len([gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu])
    answer = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False, timeout=30)
    return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())


def _unreached(meeting: Path, address: str, index: int, count: int) -> tuple[str, ...]:
    """Returns the nodes whose port does not answer. Nothing accepts: the kernel completes the connections."""
    with listening_place(address or "127.0.0.1", count + 8) as server:
        port = server.getsockname()[1]
        write_atomically(meeting / f"port-{index}", f"{address} {port}".encode())
        ports = [_awaited(meeting / f"port-{other}") for other in range(count)]
        unreached = tuple(
            text.split(" ")[0] or f"task {other}" for other, text in enumerate(ports) if not _answers(text)
        )
        write_atomically(meeting / f"tried-{index}", b"1")
        for other in range(count):
            _awaited(meeting / f"tried-{other}")
    return unreached


def _answers(place: str) -> bool:
    host, _, port = place.partition(" ")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return bool(host)


def _awaited(path: Path) -> str:
    """Waits for the file; returns its content, or '' after a minute, which counts as unreached."""
    until_s = time.monotonic() + MEET_S
    while (data := read_or_none(path)) is None:
        if time.monotonic() > until_s:
            return ""
        time.sleep(0.05)
    return data.decode()


if __name__ == "__main__":
    sys.exit(main())
