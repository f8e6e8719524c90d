"""Arguments of `yatt judge`; the work is in `yatt.cli.commands.judging`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Parsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_judge(commands: "Parsers") -> None:
    """Adds `yatt judge` and its commands."""
    judge = commands.add_parser("judge", help="measure how good a GenRM is")
    parts = judge.add_subparsers(metavar="COMMAND", required=True)
    measuring = parts.add_parser(
        "eval",
        help="ask a GenRM about labelled completions or pairs, and compare; exit code 3: it is too bad",
    )
    measuring.add_argument("config", type=Path, help="run file, or run folder")
    measuring.add_argument("judge", help="name of the GenRM in it")
    measuring.add_argument(
        "more",
        nargs="+",
        help="data files with prompt, completion, label, or prompt, chosen, rejected; and section.key=value",
    )
    measuring.add_argument(
        "--min-agreement", type=float, metavar="SHARE", help="exit code 3 if it agrees less with the labels"
    )
    measuring.add_argument("--limit", type=int, default=0, metavar="N", help="use only the first N rows")
    measuring.add_argument("--seed", type=int, metavar="N", help="seed of the questions (default: the run's)")
    _add_output(measuring)
    measuring.set_defaults(action=_measure)


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    command.add_argument("--out", type=Path, metavar="FOLDER", help="new folder for the result")
    command.add_argument("--html", action="store_true", help="write a page there too")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _measure(arguments: argparse.Namespace) -> int:
    from yatt.cli.commands.judging import measure_judge

    return measure_judge(arguments)
