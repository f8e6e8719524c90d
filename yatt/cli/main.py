"""The `yatt` command. Every subcommand imports what it needs when it runs, so that help is instant."""

import argparse
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from yatt import __version__
from yatt.adapters.patience import is_passing
from yatt.cli.ckpt import add_ckpt, add_convert
from yatt.cli.plan import add_plan
from yatt.cli.simulate import add_simulate
from yatt.errors import EXIT_FAILED, EXIT_USER_MISTAKE, ConfigError, YattError
from yatt.printable import printable_lines

if TYPE_CHECKING:
    from yatt.config.schema import RunConfig
    from yatt.config.site import SiteConfig

EXIT_INTERRUPTED = 130


def main() -> int:
    """Runs the command. Prints an expected error as one message and returns its exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, as in `yatt ... >&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open until exit
    try:
        return _carried_out(_parsed())
    finally:
        _let_go_of_output()


def _let_go_of_output() -> None:
    """Flushes stdout, or discards it: the interpreter flushes at exit and must not fail then."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _carried_out(arguments: argparse.Namespace) -> int:
    try:
        action: Callable[[argparse.Namespace], int] = arguments.action
        code = action(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except YattError as error:
        sys.stderr.write(f"yatt: {printable_lines(str(error))}\n")
        is_ours = is_passing(error) and not _is_full(error.__cause__)
        return EXIT_FAILED if is_ours else error.exit_code
    except OSError as error:
        if (
            error.errno == errno.EPIPE
        ):  # the reader of our output has closed it; BrokenPipeError is ESHUTDOWN too
            return EXIT_FAILED if arguments.action in (_run, _resume) else 0
        where = f"{error.filename}: " if error.filename else ""
        where = printable_lines(where)
        sys.stderr.write(
            f"yatt: {where}{error.strerror or error}. Free space or fix it, then run the command again.\n"
        )
        return EXIT_USER_MISTAKE if _is_full(error) or not is_passing(error) else EXIT_FAILED


def _is_full(error: BaseException | None) -> bool:
    """Whether a disk or quota is full, which the user has to fix."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _parsed() -> argparse.Namespace:
    """Parses the arguments. Also accepts overlays and settings after options, which argparse does not."""
    parser = _parser()
    arguments, rest = parser.parse_known_args()
    if any(word.startswith("-") for word in rest) or (rest and "more" not in arguments):
        parser.error(f"unrecognized arguments: {' '.join(rest)}; see yatt COMMAND --help")
    if rest:
        arguments.more = [*arguments.more, *rest]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="yatt", description="Reinforcement learning of language models with generative reward models."
    )
    parser.add_argument("--version", action="version", version=f"yatt {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    run = commands.add_parser("run", help="train on this machine; run it again to resume")
    run.add_argument("config", type=Path, help="run file (YAML)")
    run.add_argument("more", nargs="*", help="overlay files (*.yaml) and section.key=value")
    run.set_defaults(action=_run)
    _add_take_over(run)
    _add_slurm(commands)
    add_ckpt(commands)
    add_convert(commands)
    _add_looking(commands)
    add_plan(commands)
    add_simulate(commands)
    cleaning = commands.add_parser("clean", help="remove files that your killed runs left on this machine")
    cleaning.add_argument(
        "folders", type=Path, nargs="*", help="node-local folders (default: /tmp, /dev/shm)"
    )
    cleaning.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    cleaning.set_defaults(action=_clean)
    sft = commands.add_parser("sft", help="supervised fine-tuning: create or warm up a model")
    sft.add_argument("config", type=Path, help="SFT file (YAML)")
    sft.add_argument("more", nargs="*", help="overlay files (*.yaml) and key=value")
    sft.set_defaults(action=_sft)
    diagnose = commands.add_parser("diagnose", help="check whether a run will work on this cluster")
    diagnose.add_argument("config", type=Path, nargs="?", help="run file, to check its requirements as well")
    diagnose.add_argument("more", nargs="*", help="overlay files (*.yaml) and section.key=value")
    diagnose.add_argument("--site", type=Path, required=True, help="site file (YAML)")
    _add_set(diagnose)
    diagnose.add_argument("--json", action="store_true", help="print one JSON object")
    diagnose.add_argument("--nodes", type=int, default=0, help="run a short test job on this many nodes")
    diagnose.set_defaults(action=_diagnose)
    return parser


def _add_looking(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the commands that only read a run folder."""
    for name, action, text in (
        ("status", _status, "show the state of a run"),
        ("watch", _watch, "follow a run on the terminal"),
        ("report", _report, "write one self-contained HTML page about a run"),
        ("logs", _logs, "print the logs of a run's processes"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("run", type=Path, help="run folder")
        command.set_defaults(action=action)
        if name == "status":
            command.add_argument("--json", action="store_true", help="print one JSON object")
        if name == "report":
            command.add_argument("--out", type=Path, help="output file (default: RUN/report.html)")
        if name == "logs":
            command.add_argument("--role", default="", help="only processes whose name begins with ROLE")
            command.add_argument("-f", "--follow", action="store_true", help="follow the logs")
            command.add_argument(
                "-n", "--lines", type=int, default=20, help="last lines of each log (default: 20)"
            )


def _add_join(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    join = commands.add_parser("join", help="submit nodes in place of engine nodes that a run has lost")
    join.add_argument("run", type=Path, help="run folder")
    join.add_argument("--nodes", type=int, default=1, help="number of nodes (default: 1)")
    _add_set(join)
    join.add_argument("--dry-run", action="store_true", help="print what would be submitted; submit nothing")
    join.set_defaults(action=_join)


def _add_slurm(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the commands that work with Slurm jobs."""
    submit = commands.add_parser("submit", help="train as a Slurm job that requeues itself")
    submit.add_argument("config", type=Path, help="run file (YAML)")
    submit.add_argument("more", nargs="*", help="overlay files (*.yaml) and section.key=value")
    submit.add_argument("--site", type=Path, required=True, help="site file (YAML)")
    _add_set(submit)
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
    cancel.add_argument("run", type=Path, help="run folder")
    cancel.add_argument("--now", action="store_true", help="do not save a checkpoint first")
    cancel.set_defaults(action=_cancel)
    attach = commands.add_parser("attach", help="open a shell on a node of a run, inside its job")
    attach.add_argument("run", type=Path, help="run folder")
    attach.add_argument("node", type=int, nargs="?", default=0, help="node of the run (0: the leader's)")
    attach.add_argument("--do", nargs=argparse.REMAINDER, default=[], help="run a command, not a shell")
    attach.set_defaults(action=_attach)
    listing = commands.add_parser("list", help="list your submitted runs")
    listing.add_argument("folders", type=Path, nargs="*", help="run folders, or parents of run folders")
    listing.set_defaults(action=_list)


def _add_resume(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    resume = commands.add_parser("resume", help="resume a run from its folder")
    resume.add_argument("run", type=Path, help="run folder")
    resume.add_argument(
        "more", nargs="*", metavar="KEY=VALUE", help="change a key that does not affect what is trained"
    )
    resume.add_argument("--site", type=Path, help="site file (default: the one of the last submission)")
    _add_set(resume)
    resume.add_argument("--nodes", type=int, default=0, help="number of nodes (default: as in the run file)")
    resume.add_argument("--trainer-nodes", type=int, default=0, help="number of trainer nodes")
    resume.add_argument(
        "--dry-run", action="store_true", help="print what would be submitted; submit nothing"
    )
    _add_after(resume)
    _add_take_over(resume)
    resume.set_defaults(action=_resume)


def _add_after(command: argparse.ArgumentParser) -> None:
    command.add_argument("--after", default="", metavar="JOB|RUN", help="start after this job has ended")


def _add_set(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a site file key; repeatable"
    )


def _add_take_over(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--take-over", action="store_true", help="if the run is active, let it save and stop first"
    )


def _run(arguments: argparse.Namespace) -> int:
    from yatt.config.load import load_command
    from yatt.launch.start import start_run

    return start_run(load_command(arguments.config, arguments.more), take_over=arguments.take_over)


def _resume(arguments: argparse.Namespace) -> int:
    from yatt.config.site import load_site, with_settings
    from yatt.launch.plan import Resized, read_plan
    from yatt.launch.start import resume_run
    from yatt.paths import RunPaths

    resized, paths = Resized(arguments.nodes, arguments.trainer_nodes), RunPaths(arguments.run)
    if not arguments.site and not paths.plan.exists():
        if arguments.set or arguments.after or arguments.dry_run:
            raise ConfigError(f"{paths.root} has no job: --set, --after and --dry-run also need --site FILE.")
        return resume_run(arguments.run, resized, changes=arguments.more, take_over=arguments.take_over)
    from yatt.launch.resume import Resuming, resume_submitted  # submitit takes a while to import

    site = load_site(arguments.site) if arguments.site else read_plan(paths).site
    site = with_settings(site, arguments.set)
    how = Resuming(changes=tuple(arguments.more), take_over=arguments.take_over, after=_after(arguments))
    return resume_submitted(arguments.run, site, resized, how, dry_run=arguments.dry_run)


def _submit(arguments: argparse.Namespace) -> int:
    from yatt.config.load import load_command
    from yatt.config.site import load_site, with_settings
    from yatt.launch.sweep import each, members, of_sweep

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
        for member in members(arguments.sweep)
    }
    return each(list(runs), lambda member: _submit_one(arguments, runs[member], site, after))


def _submit_one(arguments: argparse.Namespace, config: "RunConfig", site: "SiteConfig", after: str) -> int:
    from yatt.launch.submit import prepare_run, submit_run

    if arguments.prepare:
        return prepare_run(config, site)
    return submit_run(config, site, dry_run=arguments.dry_run, take_over=arguments.take_over, after=after)


def _after(arguments: argparse.Namespace) -> str:
    from yatt.adapters.slurm import Slurm
    from yatt.launch.jobs import job_to_wait_for

    return job_to_wait_for(arguments.after, Slurm())


def _attach(arguments: argparse.Namespace) -> int:
    from yatt.cli.look import open_view
    from yatt.launch.attach import attach

    return attach(open_view(arguments.run).paths, arguments.node, arguments.do)


def _join(arguments: argparse.Namespace) -> int:
    from yatt.launch.join_submit import submit_join

    return submit_join(arguments.run, arguments.set, arguments.nodes, dry_run=arguments.dry_run)


def _cancel(arguments: argparse.Namespace) -> int:
    from yatt.adapters.slurm import Slurm
    from yatt.cli.look import open_view
    from yatt.launch.cancel import cancel

    sys.stdout.write(cancel(open_view(arguments.run).paths, Slurm(), now=arguments.now) + "\n")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from yatt.cli.listing import print_runs

    return print_runs(arguments.folders)


def _status(arguments: argparse.Namespace) -> int:
    from yatt.cli.look import status

    return status(arguments.run, as_json=arguments.json)


def _watch(arguments: argparse.Namespace) -> int:
    from yatt.cli.look import watch

    return watch(arguments.run)


def _logs(arguments: argparse.Namespace) -> int:
    from yatt.cli.look import logs

    return logs(arguments.run, role=arguments.role, follow=arguments.follow, lines=arguments.lines)


def _report(arguments: argparse.Namespace) -> int:
    from yatt.cli.look import report

    path = report(arguments.run, arguments.out)
    sys.stdout.write(f"{path}\n")
    return 0


def _clean(arguments: argparse.Namespace) -> int:
    from yatt.cli.clean import clean

    return clean(arguments.folders, dry_run=arguments.dry_run)


def _sft(arguments: argparse.Namespace) -> int:
    from yatt.launch.sft import run_sft

    return run_sft(arguments.config, arguments.more)


def _diagnose(arguments: argparse.Namespace) -> int:
    from yatt.config.load import load_command
    from yatt.config.site import load_site, with_settings
    from yatt.launch.diagnose.report import diagnose

    config = load_command(arguments.config, arguments.more) if arguments.config else None
    site = with_settings(load_site(arguments.site), arguments.set)
    return diagnose(site, config, as_json=arguments.json, try_num=arguments.nodes)


if __name__ == "__main__":
    sys.exit(main())
