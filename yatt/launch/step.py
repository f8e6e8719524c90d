"""What srun starts on every node: finds out who it is, then runs that node's controller to its end.

It opens the controller's log itself (Slurm's own names for logs are wrong in steps of heterogeneous jobs),
notes where it runs and how the controller ended, and passes signals on. A run folder that fails for a while
is waited for.
"""

import argparse
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from yatt import clock
from yatt.adapters.files import append_line, make_within, publish, sealed
from yatt.adapters.orphans import adopt_orphans, end_orphans
from yatt.adapters.patience import ended_by, exit_code_of, patiently
from yatt.adapters.process import spawn
from yatt.adapters.succession import Succession
from yatt.config.load import load_attempt
from yatt.config.site import SiteConfig
from yatt.control import scratch
from yatt.errors import EXIT_USER_MISTAKE, ConfigError, YattError
from yatt.launch.batch_death import BatchDeath
from yatt.launch.device import device_of
from yatt.launch.network import own_address
from yatt.launch.plan import read_plan
from yatt.launch.steps import BLIND
from yatt.paths import RunPaths

T = TypeVar("T")
PATIENCE_S = 600.0
"""How long each step in the run folder may wait; as long as the launcher waits for the plan."""

ORPHANS_S = 3.0
"""How long it may take to end what the workers of a killed controller have started."""

_WITNESSES = (0, 1)
"""Nodes whose step looks into the end of the launcher: on the first it may be the memory's next victim."""


def main() -> int:
    """Run one controller; its exit code is this one's."""
    try:
        return _run()
    except (YattError, OSError) as error:
        return ended_by(error, "yatt")


def _run() -> int:
    parser = argparse.ArgumentParser(prog="yatt.launch.step")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--indexes", required=True, help="the run's nodes of this step, by task")
    parser.add_argument("--absent", default="")
    arguments = parser.parse_args()
    paths = RunPaths(arguments.run)
    node = int(arguments.indexes.split(",")[int(os.environ["SLURM_PROCID"])])
    if not _waited_for(paths.config.exists):
        name = os.environ.get("SLURMD_NODENAME", f"node{node}")
        sys.stderr.write(f"yatt: {name} {BLIND} {paths.root}; take one that all nodes share.\n")
        return EXIT_USER_MISTAKE
    log = paths.log(arguments.epoch, f"node{node}")
    try:
        argv = _waited_for(partial(_controller, paths, arguments.epoch, node, arguments.absent))
    except ConfigError as error:
        code = exit_code_of(error)
        _waited_for(partial(make_within, paths.root, log.parent))
        _waited_for(partial(log.write_text, f"node{node}: {error}\n"))
        _note(paths, arguments.epoch, node, {"ended": code})
        return code
    owns_orphans = adopt_orphans()
    environment = _waited_for(partial(_environment, paths))
    death = _batch_death(paths, arguments.epoch, log) if node in _WITNESSES else None
    controller = _waited_for(partial(spawn, argv, env=environment, log=log))

    def received(number: int, _frame: object) -> None:
        controller.send_signal(number)
        if number == signal.SIGTERM and death is not None:
            death.look_into()

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, received)
    _note(paths, arguments.epoch, node, {"pid": controller.pid})
    code = controller.wait()
    end_orphans((), ORPHANS_S, only_marked=not owns_orphans)  # a controller that was killed could not
    _waited_for(partial(scratch.tidy, paths, arguments.epoch, node))
    _note(paths, arguments.epoch, node, {"pid": controller.pid, "ended": code})
    if death is not None:
        death.wait()
    return code if code >= 0 else 128 - code


def _controller(paths: RunPaths, epoch: int, node: int, absent: str) -> list[str]:
    config = load_attempt(paths, epoch)
    site = read_plan(paths).site
    host = own_address(site.interface, os.environ)
    argv = [sys.executable, "-P", "-m", "yatt.control", "--run", str(paths.root), "--epoch", str(epoch)]
    argv += ["--node", str(node), "--host", host, "--device", device_of(config.launch.device)]
    return [*argv, "--slurm", site.requeue, *(("--absent", absent) if absent else ())]


def _batch_death(paths: RunPaths, epoch: int, log: Path) -> BatchDeath | None:
    mode = _waited_for(partial(read_plan, paths)).site.requeue
    succession = Succession.of_this_start(paths, epoch, mode)

    def say(text: str) -> None:  # srun, which would print it, may have been killed as well
        with contextlib.suppress(OSError):
            append_line(log, f"{clock.wall_iso()} yatt: {text}")

    return BatchDeath(succession, say) if succession.can_ask() else None


def _environment(paths: RunPaths) -> dict[str, str]:
    site: SiteConfig = read_plan(paths).site
    named = {"GLOO_SOCKET_IFNAME": site.interface, "NCCL_SOCKET_IFNAME": site.interface}
    return {**(named if site.interface else {}), **os.environ, **{k: str(v) for k, v in site.env.items()}}


def _note(paths: RunPaths, epoch: int, node: int, content: dict[str, Any]) -> None:
    """A note that cannot be written costs no controller: the launcher hears of its end by srun."""
    path = paths.seat(epoch, node)
    where = {"slurm_node": os.environ.get("SLURMD_NODENAME", ""), "host": socket.gethostname()}

    def write() -> None:
        make_within(paths.root, path.parent)
        publish(path, sealed({**where, **content}, epoch))

    try:
        _waited_for(write)
    except (YattError, OSError) as error:
        sys.stderr.write(f"yatt: node{node}: {path} is not written: {error}\n")


def _waited_for(work: Callable[[], T]) -> T:
    return patiently(work, limit_s=PATIENCE_S)


if __name__ == "__main__":
    sys.exit(main())
