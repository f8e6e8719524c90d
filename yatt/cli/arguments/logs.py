"""Arguments of `yatt logs`; the work is in `yatt.cli.commands.log_printing`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Parsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_logs(commands: "Parsers") -> None:
    """Adds `yatt logs`."""
    command = commands.add_parser("logs", help="print the logs of a run's processes, merged by time")
    command.add_argument("run", type=Path, help="run folder, run file, name or id")
    command.add_argument("--role", default="", help="only processes whose name begins with ROLE")
    command.add_argument(
        "--level", default="debug", choices=("debug", "info", "warning", "error"), help="least level"
    )
    command.add_argument("--grep", default="", metavar="TEXT", help="only lines with this text")
    command.add_argument("--since", default="", metavar="TIME", help="10m, 2h, 14:30 or 2026-01-31T14:30")
    command.add_argument("--attempt", type=int, default=0, help="attempt (default: the newest)")
    command.add_argument(
        "--all",
        action="store_true",
        help="also INFO lines and harmless warnings of libraries, and progress bars",
    )
    command.add_argument("-f", "--follow", action="store_true", help="follow the logs")
    command.add_argument(
        "-n", "--lines", type=int, default=0, help="last lines (default: 200; with --since: 10000)"
    )
    command.set_defaults(action=_logs)


def _logs(arguments: argparse.Namespace) -> int:
    from yatt import clock
    from yatt.cli.commands.log_printing import Chosen, print_logs, since_s
    from yatt.obs.terminal.log_lines import LEVELS, LogFilter

    shown = LogFilter(
        level=LEVELS[arguments.level.upper()],
        text=arguments.grep,
        is_all=arguments.all,
        since_s=since_s(arguments.since, clock.wall_s()),
    )
    chosen = Chosen(
        role=arguments.role,
        attempt=arguments.attempt,
        most=arguments.lines,
        filter=shown,
    )
    return print_logs(arguments.run, chosen, follow=arguments.follow)
