"""Arguments of `yatt simulate`; the work is in `yatt.cli.commands.simulating`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Parsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_simulate(commands: "Parsers") -> None:
    """Adds `yatt simulate`."""
    command = commands.add_parser(
        "simulate", help="predict iteration time and idle GPUs, and recommend placement and split"
    )
    command.add_argument(
        "config", type=Path, metavar="CONFIG", help="run file (YAML), or a run folder with measured batches"
    )
    command.add_argument("more", nargs="*", default=[], help="overlay files (*.yaml) and section.key=value")
    command.add_argument("--run", type=Path, help="take lengths, speeds and times from this run folder")
    command.add_argument(
        "--lengths", default="", metavar="MEAN,SIGMA", help="log-normal tokens per completion, as 1500,0.8"
    )
    for option, metavar, text in (
        ("--speed", "ROLE=STEP_S,SEQUENCE_S", "seconds of an engine step, and for each running sequence"),
        ("--verdict-tokens", "NAME=MEAN", "tokens of a GenRM's verdicts per completion"),
    ):
        command.add_argument(option, action="append", default=[], metavar=metavar, help=f"{text}; repeatable")
    for option, metavar, text in (
        ("--switch-s", "S", "seconds in which a GPU set changes its role"),
        ("--train-s", "S", "seconds of training per iteration, with saves and weight updates"),
        ("--kept", "SHARE", "share of the prompt groups that are not dropped (default: measured, else 1)"),
    ):
        command.add_argument(option, default="", metavar=metavar, help=text)
    command.add_argument(
        "--gpus",
        type=int,
        default=0,
        metavar="N",
        help="scale nodes, GPU sets and batch to N GPUs, up to 16384",
    )
    command.add_argument(
        "--iterations", type=int, default=0, help="simulated iterations (default: 6; 4 for large batches)"
    )
    command.add_argument("--seed", type=int, default=0, help="seed of the lengths (default: 0)")
    command.add_argument("--html", type=Path, metavar="FILE", help="also write one self-contained HTML page")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(action=_simulate)


def _simulate(arguments: argparse.Namespace) -> int:
    from yatt.cli.commands.simulating import simulate

    return simulate(arguments)
