"""A controller process: ``python -m yatt.control --run FOLDER --attempt E --node K``."""

import argparse
import asyncio
import logging
import os
import signal
import sys
import traceback
from functools import partial
from pathlib import Path

from yatt import clock
from yatt.adapters.files.files import share_with
from yatt.adapters.files.patience import ended_by, with_retries
from yatt.adapters.machine.descriptors import raise_soft_limit
from yatt.adapters.machine.nvml import cpus_by_device, visible_devices
from yatt.adapters.net.curve import roomy_context
from yatt.adapters.processes.log_thread import logging_by_a_thread
from yatt.adapters.processes.orphans import adopt_orphans
from yatt.adapters.processes.stack_dump import answer_stack_requests
from yatt.adapters.run_folder.ledger import STARTED, Attempt, inputs_of, record_of_attempt
from yatt.adapters.run_folder.staged import on_node
from yatt.adapters.slurm.requeue import Requeue
from yatt.config.check import node_gpus
from yatt.config.load import config_hash, load_attempt, samples_hash
from yatt.config.schema import RunConfig
from yatt.control.gpus.processes import scratch
from yatt.control.gpus.processes.open_files import check_own_descriptors
from yatt.control.leader.coordinator import program_of
from yatt.control.node import Node
from yatt.control.session import Session
from yatt.core.attempts.trainer_environment import contrary_variables
from yatt.core.gpus.placement import placement_of
from yatt.errors import EXIT_FAILED, EXIT_FINISHED, ConfigError, WorkerFailed, YattError
from yatt.paths import RunPaths

_LOG = logging.getLogger(__name__)


def main() -> int:
    """Runs one controller until its attempt ends; returns the attempt's exit code."""
    parser = argparse.ArgumentParser(prog="yatt.control")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--slurm",
        choices=("", "auto", "requeue", "chain"),
        default="",
        metavar="HOW",
        help="stand in for a lost leader at Slurm; how the job is started anew, as in the site file",
    )
    parser.add_argument(
        "--life", type=int, default=1, help="which process of this node's controller in the attempt it is"
    )
    parser.add_argument("--absent", type=_indexes, default=frozenset(), help="nodes that take no part: 3,4")
    arguments = parser.parse_args()
    name = f"node{arguments.node}"
    answer_stack_requests(arguments.run, name, arguments.attempt)
    with logging_by_a_thread():
        return _outcome(arguments, name)


def _outcome(arguments: argparse.Namespace, name: str) -> int:
    try:
        node, limit = _node(arguments), raise_soft_limit()
        check_own_descriptors(node, limit)
        return _attempt(node)
    except (YattError, OSError) as error:
        return ended_by(error, name)
    except Exception:  # noqa: BLE001 (a process's main: recorded, and the process ends)
        sys.stderr.write(f"{clock.wall_iso()} ERROR {name}: a defect:\n{traceback.format_exc()}")
        return EXIT_FAILED


def _indexes(text: str) -> frozenset[int]:
    return frozenset(int(word) for word in text.split(",") if word)


def _node(arguments: argparse.Namespace) -> Node:
    paths = RunPaths(arguments.run)
    own = with_retries(partial(load_attempt, paths, arguments.attempt))
    config = with_retries(partial(on_node, own, paths, arguments.attempt, arguments.node))
    share_with(config.run.share)
    devices: tuple[str, ...] = ()
    cpus: tuple[frozenset[int], ...] = ()
    count = node_gpus(config)[arguments.node]
    device = arguments.device if count else "cpu"
    if device == "cuda":
        devices = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), count)
        cpus = cpus_by_device(devices) if config.launch.bind_workers else ()
    started = partial(record_of_attempt, paths, arguments.attempt, STARTED)
    how = arguments.slurm
    requeue = Requeue.of_this_start(paths, arguments.attempt, how) if how else None
    node = Node(
        config=config,
        paths=paths,
        placement=placement_of(config),
        attempt=arguments.attempt,
        index=arguments.node,
        host=arguments.host,
        device=device,
        devices=devices,
        cpus=cpus,
        absent=arguments.absent,
        life=arguments.life,
        requeue=requeue,
        config_hash=config_hash(own),
        samples_hash=samples_hash(own),
        inputs=inputs_of(Attempt(arguments.attempt, with_retries(started))),
    )
    if node.device == "cuda" and node.is_trainer_node and config.trains:
        _check_variables(config)
    if cause := program_of(node).cause_without(node.absent):
        listed = ",".join(map(str, sorted(node.absent)))
        raise WorkerFailed(f"this attempt cannot begin with --absent {listed}: {cause}")
    return node


def _check_variables(config: RunConfig) -> None:
    """Warns of variables of this process that slow trainer ranks.

    Raises:
        ConfigError: one breaks a guarantee of the run.
    """
    for each in contrary_variables(config, os.environ):
        if each.is_refused:
            raise ConfigError(f"the environment variable {each.name} {each.says}")
        _LOG.warning("the environment variable %s %s", each.name, each.says)


def _attempt(node: Node) -> int:
    adopt_orphans()
    try:
        scratch.create(node)
        code = asyncio.run(_run(node))
        if code == EXIT_FINISHED:
            scratch.remove_checkpoint_files(node)
        return code
    finally:
        scratch.remove(node)


async def _run(node: Node) -> int:
    session = Session(node, roomy_context(len(node.present)))
    loop, stop_requests = asyncio.get_running_loop(), session.stop_requests
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_requests.signal, signal.Signals(number).name)
    loop.add_signal_handler(signal.SIGUSR2, stop_requests.signal_by_hand)
    loop.add_signal_handler(signal.SIGUSR1, session.give_up)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1, signal.SIGUSR2))  # the step has blocked them
    return await session.run()


if __name__ == "__main__":
    sys.exit(main())
