"""Entry point of a trainer rank: sends Hello, executes orders until Stop, answers each one.

    python -m yatt.trainer --run RUN --attempt E --worker NAME --endpoint ipc://... --local-rank L --node N

An order that fails is answered with Failed, and the process continues; the controller decides whether to
end it.
"""

import argparse
import logging
import os
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from yatt.adapters.files.patience import is_passing, with_retries
from yatt.adapters.machine.collector import without_collections
from yatt.adapters.net.worker_link import Heartbeat, WorkerLink
from yatt.adapters.processes.log_lines import log_to_stderr
from yatt.adapters.processes.process import leave_notice_to_controller
from yatt.adapters.processes.stack_dump import answer_stack_requests
from yatt.adapters.run_folder.staged import load_on_node
from yatt.checkpoint.commit.run_store import open_run_store
from yatt.checkpoint.store.patient import PatientStore
from yatt.checkpoint.store.store import Store
from yatt.config.schema import RunConfig
from yatt.errors import EXIT_FAILED, EXIT_USER_MISTAKE, ConfigError, YattError, error_line
from yatt.paths import RunPaths
from yatt.records import message as m

if TYPE_CHECKING:
    from yatt.trainer.scripted.rank import ScriptedRank
    from yatt.trainer.worker import TrainerRank

WAIT_S = 1.0
Handle = Callable[[m.Message], m.Message]
_LOG = logging.getLogger(__name__)


def main() -> None:
    """Runs one trainer rank."""
    leave_notice_to_controller()
    arguments = _arguments()
    answer_stack_requests(arguments.run, arguments.worker, arguments.attempt)
    log_to_stderr()
    run = Path(arguments.run)
    config = with_retries(partial(load_on_node, RunPaths(run), arguments.attempt, arguments.node))
    opened = with_retries(partial(open_run_store, config, run))
    link = WorkerLink(arguments.endpoint, worker=arguments.worker, attempt=arguments.attempt)

    def tick() -> None:
        link.work += 1

    def say(error: str) -> None:
        link.waits_for = error

    def beat() -> m.Renew:
        return m.Renew(token=link.lease.held, turns=link.turns, work=link.work, waits_for=link.waits_for)

    limit_s = config.launch.phase_timeout_s
    store = PatientStore(opened, limit_s=limit_s, tick=tick, say=say)
    rank = _rank(config, arguments.local_rank, store, tick, say)
    heartbeat = Heartbeat(
        arguments.endpoint,
        worker=arguments.worker,
        attempt=arguments.attempt,
        renew_s=config.lease.renew_s,
        beat=beat,
    )
    heartbeat.start()
    link.send(m.Hello(worker=arguments.worker, pid=os.getpid()))
    try:
        serve(link, rank.handle)
    finally:
        heartbeat.stop()
        rank.leave()
        link.close()


def _rank(
    config: RunConfig, local_rank: int, store: Store, tick: Callable[[], None], say: Callable[[str], None]
) -> "ScriptedRank | TrainerRank":
    """Returns the rank that executes orders. Heavy imports come after the arguments are checked; Hello
    reports that they are done."""
    if config.model.trainer == "scripted":
        from yatt.trainer.scripted.rank import ScriptedRank

        return ScriptedRank(config, store, tick=tick, say=say)
    with without_collections():
        from yatt.trainer.device import prepare_process

        device = prepare_process(config, local_rank)
        from yatt.trainer.worker import TrainerRank
    return TrainerRank(config, device, store, tick=tick, say=say)


def serve(link: WorkerLink, handle: Handle) -> None:
    """Executes and answers orders until Stop."""
    while True:
        order = link.receive(WAIT_S)
        if order is None:
            continue
        if isinstance(order.body, m.Stop):
            link.send(m.Done(), order.seq)
            return
        began_s = time.monotonic()
        answer = link.carry_out(order, handle, failed_rank_order)
        _LOG.info("%s took %.3f s", type(order.body).__name__, time.monotonic() - began_s)
        if answer is not None:
            link.send(answer, order.seq)


def failed_rank_order(_: m.Message, error: Exception) -> m.Message:
    """The answer to an order that raised this error."""
    is_users = isinstance(error, ConfigError) and not is_passing(error)
    return m.Failed(
        error=str(error) if isinstance(error, YattError) else error_line(error),
        trace="".join(traceback.format_exception(error)),
        exit_code=EXIT_USER_MISTAKE if is_users else EXIT_FAILED,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m yatt.trainer", description=__doc__)
    for name in ("run", "worker", "endpoint"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("attempt", "local-rank", "node"):
        parser.add_argument(f"--{name}", required=True, type=int)
    return parser.parse_args()
