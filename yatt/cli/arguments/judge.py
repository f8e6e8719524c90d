"""Arguments of `yatt judge`; the work is in `yatt.cli.judging`."""

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

    repeating = parts.add_parser(
        "again", help="ask a GenRM anew about the completions that a run has recorded, and compare"
    )
    repeating.add_argument("run", type=Path, help="run folder, run file, name or id")
    repeating.add_argument(
        "more",
        nargs="*",
        default=[],
        help="overlay files (*.yaml) and section.key=value, for the new question",
    )
    repeating.add_argument("--iterations", default="", metavar="A..B", help="default: all that are recorded")
    repeating.add_argument(
        "--genrm",
        type=Path,
        metavar="FILE",
        help="run file or overlay with the genrms to ask (default: the run's)",
    )
    repeating.add_argument(
        "--judge", default="", metavar="NAME", help="GenRM of the run (default: its only one)"
    )
    repeating.add_argument(
        "--name", default="", help="name of the folder in RUN/again (default: the judge's)"
    )
    repeating.add_argument(
        "--exit-above", type=float, metavar="SHARE", help="exit code 3 if more of the scores have changed"
    )
    _add_output(repeating, has_out=False)
    repeating.set_defaults(action=_repeat)

    _add_data(parts)


def _add_data(parts: "Parsers") -> None:
    """Adds `yatt judge data`."""
    command = parts.add_parser("data", help="write labelled questions of a GenRM, as rows for run.kind: sft")
    command.add_argument("source", type=Path, help="run, whose rollouts are recorded; or labelled rows")
    command.add_argument("--out", type=Path, required=True, metavar="FILE", help="new JSONL file")
    command.add_argument("--judge", default="", metavar="NAME", help="GenRM (default: the only one)")
    command.add_argument("--like", type=Path, metavar="RUN_FILE", help="of rows: the run file with the GenRM")
    command.add_argument("--label", default="", metavar="SCORE", help="of a run: the score that is the label")
    command.add_argument("--iterations", default="", metavar="A..B", help="default: all that are recorded")
    command.add_argument("--answer", default="{word}", metavar="TEXT", help="what it writes")
    command.add_argument("--balanced", action="store_true", help="as many rows of each verdict")
    command.set_defaults(action=_data)


def _add_output(command: argparse.ArgumentParser, *, has_out: bool = True) -> None:
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    if has_out:
        command.add_argument("--out", type=Path, metavar="FOLDER", help="new folder for the result")
    command.add_argument("--html", action="store_true", help="write a page there too")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _measure(arguments: argparse.Namespace) -> int:
    from yatt.cli.judging.measuring import measure_judge

    return measure_judge(arguments)


def _data(arguments: argparse.Namespace) -> int:
    from yatt.cli.judging.labelling import write_judge_data

    return write_judge_data(arguments)


def _repeat(arguments: argparse.Namespace) -> int:
    from yatt.cli.judging.repeating import judge_again

    return judge_again(arguments)
