"""An evaluation as a job: its run folder lies beside the folder of the result."""

import sys
from dataclasses import replace
from pathlib import Path

from yatt.adapters.run_folder.ledger import run_is_finished
from yatt.config.schema import RunConfig
from yatt.config.site import SiteConfig
from yatt.core.figures.evaluation import EvalRequest
from yatt.errors import ConfigError
from yatt.evaluation.evaluate import open_evaluation
from yatt.launch.commands.submit import plan_job, queue_job
from yatt.launch.folder.folder import check_folder
from yatt.launch.folder.occupied import make_way
from yatt.launch.resolve.completed import config_of_run
from yatt.launch.resolve.resolved import Resolved
from yatt.paths import RunPaths
from yatt.printable import printable


def with_run_folder(config: RunConfig, out: Path) -> RunConfig:
    """Returns the config of an evaluation with its run folder, which may be there: then it goes on.

    Raises:
        ConfigError: the folder is another run's.
    """
    paths = RunPaths(out.with_name(f"{out.name}.run"))
    run, data = replace(config.run, dir=str(paths.root)), config.data
    if paths.config.is_file():
        known = config_of_run(paths)
        run = replace(run, id=known.run.id)
        data = replace(data, template_time=known.data.template_time)
    return replace(config, run=run, data=data)


def submit_evaluation(config: RunConfig, site: SiteConfig, request: EvalRequest) -> None:
    """Submits the evaluation, or its next job.

    Raises:
        ConfigError: the site file or the cluster does not fit, or it is over; nothing was queued.
    """
    paths = check_folder(config)
    if paths.config.is_file() and run_is_finished(paths):
        gone = f"{paths.root} is finished, but its result is not in {request.out} any more"
        raise ConfigError(f"{gone}: remove {paths.root} to evaluate again, or write another --out.")
    make_way(paths, take_over=False)
    plan = plan_job(Resolved(config=config, site=site))
    is_new = not paths.root.exists()
    queue_job(open_evaluation(config, request, starts_now=False), config, plan, is_new=is_new)
    sys.stdout.write(printable(f"the result will be in {request.out}") + "\n")
