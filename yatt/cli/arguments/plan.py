"""Arguments of `yatt plan`; the work is in `yatt.cli.commands.planning`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Parsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_plan(commands: "Parsers") -> None:
    """Adds `yatt plan`."""
    command = commands.add_parser("plan", help="count memory per GPU and node, and say whether a run fits")
    command.add_argument("config", type=Path, help="run file (YAML)")
    command.add_argument("more", nargs="*", default=[], help="overlay files (*.yaml) and section.key=value")
    command.add_argument("--gpu-gib", type=float, default=80.0, help="memory of a GPU in GiB (default: 80)")
    command.add_argument("--host-gib", type=float, default=0.0, help="host memory of a node in GiB")
    command.add_argument(
        "--shm-gib",
        type=float,
        default=0.0,
        metavar="N",
        help="size of a node's memory filesystem in GiB (default: half of --host-gib)",
    )
    command.add_argument("--run", type=Path, help="take lengths, speeds and times from this run folder")
    for option, metavar, text in (
        ("--tokens", "MEAN", "tokens per completion (default: measured, else half of max_response_tokens)"),
        ("--mfu", "SHARE", "share of the peak rate that training reaches (default: 0.3, assumed)"),
        ("--peak-tflops", "N", "peak rate of a GPU in bfloat16 (default: 989, H100 SXM)"),
        ("--memory-tbps", "N", "memory bandwidth of a GPU in TB/s (default: 3.35, H100 SXM)"),
    ):
        command.add_argument(option, type=float, default=0.0, metavar=metavar, help=text)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(action=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    from yatt.cli.commands.planning import plan

    return plan(arguments)
