"""The command line with which a controller starts its engine and reward processes."""

import argparse
import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerArguments:
    """The command line of a worker process, and the pid of its controller."""

    run: str
    attempt: int
    worker: str
    endpoint: str
    node: int
    genrm: str
    model: str
    engine: str
    rank: int
    num_ranks: int
    host: str
    media: str
    controller: int


def parse_arguments(description: str, argv: list[str] | None = None) -> WorkerArguments:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--run", required=True, help="run folder")
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--worker", required=True, help="this worker's name, unique per start of the worker")
    parser.add_argument("--endpoint", required=True, help="the controller's ipc:// address")
    parser.add_argument("--node", type=int, default=0)
    parser.add_argument("--genrm", default="", help="name of the GenRM among the run file's genrms")
    parser.add_argument("--model", default="", help="folder of its weights, instead of the run file's")
    parser.add_argument("--engine", default="", help="name of the engine that this process is a rank of")
    parser.add_argument("--rank", type=int, default=0, help="this process's rank in its engine")
    parser.add_argument("--num-ranks", type=int, default=1, help="number of processes of its engine")
    parser.add_argument("--host", default="", help="address in the run's network, at which ranks meet")
    parser.add_argument("--media", default="", help="folder of prepared media, in memory")
    return WorkerArguments(**vars(parser.parse_args(argv)), controller=os.getppid())
