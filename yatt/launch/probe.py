"""Tries real nodes, for `yatt diagnose --nodes N`: `try_nodes` starts one task on each, which is this module.

A task says what its node has, listens on a port and connects to every other, as controllers do, and takes
part in the trial of the shared folder. The nodes meet in that folder. Containers are not entered.
"""

import argparse
import os
import platform
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from yatt.adapters.files import make_private, publish, read_or_none
from yatt.adapters.shared_folder import Member, Report
from yatt.adapters.slurm import Slurm
from yatt.config.site import SiteConfig
from yatt.errors import ConfigError
from yatt.launch.asking import as_arguments, resources
from yatt.launch.findings.records import Demand
from yatt.launch.network import own_address

MEET_S, CONNECT_S, QUEUE_S, TRIAL_S = 60.0, 10.0, 60, 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What one node says of itself."""

    node: str
    python: str
    gpus: int
    """That the task sees: by the driver's tool where it is, else by CUDA_VISIBLE_DEVICES."""

    cpus: int
    """That the task may run on."""

    address: str
    """Empty if there is none; `problem` says why."""

    unreached: tuple[str, ...]
    """Addresses of nodes whose port did not answer."""

    unwritable: tuple[str, ...]
    """Of the scratch and the shared-memory folder."""

    missing_commands: tuple[str, ...]
    locked_memory_bytes: int
    """How much memory may be pinned, as InfiniBand needs; -1: all."""

    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of it. `problem` is srun's, if it did not run to its end."""

    facts: tuple[NodeFacts, ...]
    report: Report | None
    problem: str = ""


def try_nodes(slurm: Slurm, site: SiteConfig, demand: Demand, folder: Path, local: tuple[str, str]) -> Trial:
    """Start a task on each of `demand.nodes` nodes and collect what they say.

    Args:
        slurm: with a limit of at least `QUEUE_S + TRIAL_S` seconds a call.
        folder: an existing folder that all nodes see.
        local: scratch and shared-memory folder.
    """
    meeting = folder / f".yatt-probe-{secrets.token_hex(4)}"
    make_private(meeting)
    try:
        reply = slurm.call(*command(site, demand, meeting, local))
        count = range(demand.nodes)
        texts = [text for index in count if (text := read_or_none(meeting / f"facts-{index}"))]
        report = read_or_none(meeting / "report")
        return Trial(
            facts=tuple(msgspec.json.decode(text, type=NodeFacts) for text in texts),
            report=msgspec.json.decode(report, type=Report) if report else None,
            problem="" if reply.code == 0 else reply.says,
        )
    finally:
        shutil.rmtree(meeting, ignore_errors=True)


def command(site: SiteConfig, demand: Demand, meeting: Path, local: tuple[str, str]) -> list[str]:
    """The srun line; the site's own lines run first on each node."""
    options = resources(site, demand.component, nodes=demand.nodes, gpus_per_node=demand.gpus_per_node)
    options |= {
        "ntasks": f"{demand.nodes}",
        "immediate": f"{QUEUE_S}",
        "time": "5",
        "job-name": "yatt-diagnose",
    }
    lines = "\n".join([*site.setup, 'exec "$@"'])
    return [
        "srun", *as_arguments(options), *site.srun_args, "bash", "-c", lines, "bash",
        sys.executable, "-P", "-m", "yatt.launch.probe", str(meeting),
        "--interface", site.interface, "--folders", *local,
    ]  # fmt: skip


def main() -> int:
    """One task of the step."""
    parser = argparse.ArgumentParser(prog="yatt.launch.probe")
    parser.add_argument("meeting", type=Path)
    parser.add_argument("--interface", default="")
    parser.add_argument("--folders", nargs="*", default=[])
    arguments = parser.parse_args()
    index, count = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    facts = _facts(arguments, index, count)
    publish(arguments.meeting / f"facts-{index}", msgspec.json.encode(facts))
    report = Member(arguments.meeting / "fs", index=index, count=count, node=facts.node).measure()
    if report is not None:
        publish(arguments.meeting / "report", msgspec.json.encode(report))
    return 0


def _facts(arguments: argparse.Namespace, index: int, count: int) -> NodeFacts:
    address, problem = "", ""
    try:
        address = own_address(arguments.interface, os.environ)
    except (ConfigError, OSError) as error:
        problem = str(error)
    return NodeFacts(
        node=os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        python=platform.python_version(),
        gpus=_gpus(),
        cpus=len(os.sched_getaffinity(0)),
        address=address,
        unreached=_unreached(arguments.meeting, address, index, count),
        unwritable=tuple(folder for folder in arguments.folders if not os.access(folder, os.W_OK)),
        missing_commands=tuple(name for name in ("scontrol", "srun") if shutil.which(name) is None),
        locked_memory_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        problem=problem,
    )


def _gpus() -> int:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return len([gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu])
    answer = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False, timeout=30)
    return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())


def _unreached(meeting: Path, address: str, index: int, count: int) -> tuple[str, ...]:
    """The kernel answers a connection on behalf of whoever listens, so nobody needs to accept it."""
    with socket.create_server((address or "127.0.0.1", 0), backlog=count + 8) as server:
        port = server.getsockname()[1]
        publish(meeting / f"port-{index}", f"{address} {port}".encode())
        ports = [_awaited(meeting / f"port-{other}") for other in range(count)]
        unreached = tuple(
            text.split(" ")[0] or f"task {other}" for other, text in enumerate(ports) if not _answers(text)
        )
        publish(meeting / f"tried-{index}", b"1")
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
    """What the file says, or nothing after a minute: then that node is one that was not reached."""
    until_s = time.monotonic() + MEET_S
    while (data := read_or_none(path)) is None:
        if time.monotonic() > until_s:
            return ""
        time.sleep(0.05)
    return data.decode()


if __name__ == "__main__":
    sys.exit(main())
