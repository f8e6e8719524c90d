"""The main function of an engine's process: reads its plan, imports the library, serves its controller."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from yatt.adapters.files.patience import is_passing, with_retries
from yatt.adapters.net.worker_link import Heartbeat, WorkerLink
from yatt.adapters.processes.log_lines import log_to_stderr
from yatt.adapters.processes.process import leave_notice_to_controller
from yatt.adapters.processes.stack_dump import answer_stack_requests
from yatt.adapters.processes.worker_arguments import WorkerArguments
from yatt.adapters.run_folder.staged import load_on_node
from yatt.config.schema import RunConfig
from yatt.engine.build import import_library
from yatt.engine.environment import prepare_environment, prepare_rank
from yatt.engine.protocol import RanksLost
from yatt.engine.worker import EnginePlan, EngineWorker, failed_order
from yatt.errors import EXIT_FAILED, EXIT_FINISHED, StaleAttempt
from yatt.paths import RunPaths
from yatt.records import message as m

_LOG = logging.getLogger(__name__)


def main(arguments: WorkerArguments, make_plan: Callable[[RunConfig], EnginePlan]) -> int:
    """Runs an engine's process; returns its exit code."""
    leave_notice_to_controller()
    answer_stack_requests(arguments.run, arguments.worker, arguments.attempt)
    log_to_stderr()
    link = WorkerLink(arguments.endpoint, worker=arguments.worker, attempt=arguments.attempt)
    try:
        where = RunPaths(Path(arguments.run)), arguments.attempt, arguments.node
        config = with_retries(partial(load_on_node, *where))
        plan = with_retries(partial(make_plan, config))
        plan = replace(plan, options=replace(plan.options, media_folder=arguments.media))
        prepare_environment(device=plan.options.device, threads=config.launch.threads_per_worker)
        if arguments.num_ranks > 1:
            plan = _plan_of_rank(arguments, config, plan)
        import_library(plan.kind)
    except Exception as error:  # noqa: BLE001 - a process's main: reports to the controller and ends
        _LOG.exception("cannot start")
        link.send(failed_order(m.Stop(), error))
        link.close()
        return EXIT_FAILED if is_passing(error) else getattr(error, "exit_code", EXIT_FAILED)
    worker = worker_class(arguments)(link, plan)
    heartbeat = Heartbeat(
        arguments.endpoint,
        worker=arguments.worker,
        attempt=arguments.attempt,
        renew_s=config.lease.renew_s,
        beat=worker.beat,
    )
    heartbeat.start()
    link.send(m.Hello(worker=arguments.worker, pid=os.getpid()))
    try:
        worker.serve(arguments.controller)
    except StaleAttempt as error:
        _LOG.warning("this attempt is over: %s", error)
        return error.exit_code
    except RanksLost as error:
        _LOG.warning("%s; this process ends, and is started again", error)
        return EXIT_FAILED
    finally:
        heartbeat.stop()
        link.close()
    return EXIT_FINISHED


def worker_class(arguments: WorkerArguments) -> type[EngineWorker]:
    """Returns the class that serves: ranks above 0 of an engine of several processes follow rank 0."""
    if not arguments.rank:
        return EngineWorker
    from yatt.engine.spanning.following import FollowingWorker

    return FollowingWorker


def _plan_of_rank(arguments: WorkerArguments, config: RunConfig, plan: EnginePlan) -> EnginePlan:
    """Returns the plan with which this process works as one rank of an engine."""
    from yatt.engine.spanning.joining import EnginePlace, joined_ranks

    prepare_rank(arguments.rank, arguments.num_ranks)
    place = EnginePlace(
        paths=RunPaths(Path(arguments.run)),
        attempt=arguments.attempt,
        worker=arguments.worker,
        engine=arguments.engine,
        rank=arguments.rank,
        num_ranks=arguments.num_ranks,
        host=arguments.host,
        meeting_s=config.launch.start_timeout_s,
        timeout_s=config.launch.phase_timeout_s,
        device=plan.options.device,
    )
    options = replace(plan.options, num_ranks=arguments.num_ranks)
    return replace(plan, options=options, join=partial(joined_ranks, place))
