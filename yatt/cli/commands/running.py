"""The commands that start, resume, stop and list runs."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from yatt.errors import ConfigError

if TYPE_CHECKING:
    from yatt.config.schema import RunConfig
    from yatt.config.site import SiteConfig

    Parsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_running(commands: "Parsers") -> None:
    """Adds the commands."""
    run = commands.add_parser("run", help="train on this machine; run it again to resume")
    run.add_argument("config", type=Path, help="run file (YAML)")
    run.add_argument("more", nargs="*", default=[], help="overlay files (*.yaml) and section.key=value")
    run.set_defaults(action=_run, trains=True)
    _add_take_over(run)
    _add_slurm(commands)


def _add_slurm(commands: "Parsers") -> None:
    """Adds the commands that work with Slurm jobs."""
    submit = commands.add_parser("submit", help="train as a Slurm job that requeues itself")
    submit.add_argument("config", type=Path, help="run file (YAML)")
    submit.add_argument("more", nargs="*", default=[], help="overlay files (*.yaml) and section.key=value")
    submit.add_argument("--site", type=Path, required=True, help="site file (YAML)")
    add_set(submit)
    submit.add_argument(
        "--dry-run", action="store_true", help="print what would be submitted; submit nothing"
    )
    _add_after(submit)
    submit.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=A,B,C",
        help="submit one run per value; repeatable",
    )
    submit.add_argument(
        "--prepare", action="store_true", help="create the run folder only, for slurm/*.sbatch"
    )
    _add_take_over(submit)
    submit.set_defaults(action=_submit)
    _add_resume(commands)
    _add_join(commands)
    cancel = commands.add_parser("cancel", help="save a checkpoint and stop a run")
    cancel.add_argument("run", type=Path, help="run folder, run file, name or id")
    cancel.add_argument("--now", action="store_true", help="do not save a checkpoint first")
    cancel.set_defaults(action=_cancel)
    attach = commands.add_parser("attach", help="open a shell on a node of a run, inside its job")
    attach.add_argument("run", type=Path, help="run folder, run file, name or id")
    attach.add_argument("node", type=int, nargs="?", default=0, help="node of the run (0: the leader's)")
    attach.add_argument("--do", nargs=argparse.REMAINDER, default=[], help="run a command, not a shell")
    attach.set_defaults(action=_attach)
    listing = commands.add_parser("list", help="list your newest runs")
    listing.add_argument(
        "folders", type=Path, nargs="*", default=[], help="run folders, or parents of run folders"
    )
    listing.add_argument("--all", action="store_true", help="without folders: all your runs")
    listing.set_defaults(action=_list)


def _add_resume(commands: "Parsers") -> None:
    resume = commands.add_parser("resume", help="resume a run from its folder")
    resume.add_argument("run", type=Path, help="run folder, run file, name or id")
    resume.add_argument(
        "more",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="change a key that does not affect what is trained",
    )
    resume.add_argument("--site", type=Path, help="site file (default: the one of the last submission)")
    add_set(resume)
    resume.add_argument("--nodes", type=int, default=0, help="number of nodes (default: as in the run file)")
    resume.add_argument("--trainer-nodes", type=int, default=0, help="number of trainer nodes")
    resume.add_argument(
        "--dry-run", action="store_true", help="print what would be submitted; submit nothing"
    )
    _add_after(resume)
    _add_take_over(resume)
    resume.set_defaults(action=_resume, trains=True)


def _add_join(commands: "Parsers") -> None:
    join = commands.add_parser("join", help="submit nodes in place of engine nodes that a run has lost")
    join.add_argument("run", type=Path, help="run folder, run file, name or id")
    join.add_argument("--nodes", type=int, default=1, help="number of nodes (default: 1)")
    add_set(join)
    join.add_argument("--dry-run", action="store_true", help="print what would be submitted; submit nothing")
    join.set_defaults(action=_join)


def _add_after(command: argparse.ArgumentParser) -> None:
    command.add_argument("--after", default="", metavar="JOB|RUN", help="start after this job has ended")


def add_set(command: argparse.ArgumentParser) -> None:
    """Adds `--set`."""
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a site file key; repeatable"
    )


def _add_take_over(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--take-over", action="store_true", help="if the run is active, let it save and stop first"
    )


def _run(arguments: argparse.Namespace) -> int:
    from yatt.config.load import load_command
    from yatt.launch.commands.start import start_run

    return start_run(load_command(arguments.config, arguments.more), take_over=arguments.take_over)


def _resume(arguments: argparse.Namespace) -> int:
    from yatt.config.site import load_site, with_settings
    from yatt.launch.commands.start import resume_run
    from yatt.launch.resolve.plan import Resized, read_job_plan
    from yatt.paths import RunPaths

    resized, paths = Resized(arguments.nodes, arguments.trainer_nodes), RunPaths(arguments.run)
    if not arguments.site and not paths.plan.exists():
        if arguments.set or arguments.after or arguments.dry_run:
            raise ConfigError(f"{paths.root} has no job: --set, --after and --dry-run also need --site FILE.")
        return resume_run(arguments.run, resized, changes=arguments.more, take_over=arguments.take_over)
    from yatt.launch.commands.resume import Resuming, resume_submitted  # submitit takes a while to import

    site = load_site(arguments.site) if arguments.site else read_job_plan(paths).site
    site = with_settings(site, arguments.set)
    how = Resuming(changes=tuple(arguments.more), take_over=arguments.take_over, after=_after(arguments))
    return resume_submitted(arguments.run, site, resized, how, dry_run=arguments.dry_run)


def _submit(arguments: argparse.Namespace) -> int:
    from yatt.config.load import load_command
    from yatt.config.site import load_site, with_settings
    from yatt.launch.commands.sweep import of_sweep, submit_each, sweep_members

    site = with_settings(load_site(arguments.site), arguments.set)
    if arguments.prepare and arguments.after:
        raise ConfigError(
            "--prepare submits nothing: leave --after out, use sbatch --dependency=afterany:JOB."
        )
    after = _after(arguments)
    if not arguments.sweep:
        return _submit_one(arguments, load_command(arguments.config, arguments.more), site, after)
    runs = {  # every run file is read before the first is submitted
        member: of_sweep(load_command(arguments.config, [*arguments.more, *member.settings]), member)
        for member in sweep_members(arguments.sweep)
    }
    return submit_each(list(runs), lambda member: _submit_one(arguments, runs[member], site, after))


def _submit_one(arguments: argparse.Namespace, config: "RunConfig", site: "SiteConfig", after: str) -> int:
    from yatt.launch.commands.submit import prepare_run, submit_run

    if arguments.prepare:
        return prepare_run(config, site)
    return submit_run(config, site, dry_run=arguments.dry_run, take_over=arguments.take_over, after=after)


def _after(arguments: argparse.Namespace) -> str:
    from yatt.adapters.slurm.slurm import Slurm
    from yatt.launch.folder.jobs import job_to_wait_for

    return job_to_wait_for(arguments.after, Slurm())


def _attach(arguments: argparse.Namespace) -> int:
    from yatt.cli.commands.look import open_view
    from yatt.launch.commands.attach import attach_to_job

    return attach_to_job(open_view(arguments.run).paths, arguments.node, arguments.do)


def _join(arguments: argparse.Namespace) -> int:
    from yatt.launch.commands.join_submit import submit_join

    return submit_join(arguments.run, arguments.set, arguments.nodes, dry_run=arguments.dry_run)


def _cancel(arguments: argparse.Namespace) -> int:
    from yatt.adapters.slurm.slurm import Slurm
    from yatt.cli.commands.look import open_view
    from yatt.launch.folder.cancel import cancel_run

    sys.stdout.write(cancel_run(open_view(arguments.run).paths, Slurm(), now=arguments.now) + "\n")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from yatt.cli.listing import print_runs

    return print_runs(arguments.folders, is_all=arguments.all)
