"""Arguments of `yatt show`; the work is in `yatt.cli.commands.showing`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Parsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_show(commands: "Parsers") -> None:
    """Adds `yatt show`."""
    command = commands.add_parser("show", help="show the samples of an iteration, or one sample in full")
    command.add_argument("run", type=Path, help="run folder, run file, name or id")
    command.add_argument("iteration", type=int, help="iteration, as in metrics.jsonl")
    command.add_argument("sample", type=int, nargs="?", help="number of a sample in the table")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(action=_show)


def _show(arguments: argparse.Namespace) -> int:
    from yatt.cli.commands.showing import show

    return show(arguments.run, arguments.iteration, arguments.sample, as_json=arguments.json)
