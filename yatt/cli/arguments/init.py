"""`yatt init`: writes a commented run file from flags, or from answers on a terminal."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Parsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_init(commands: "Parsers") -> None:
    """Adds `yatt init`."""
    command = commands.add_parser("init", help="write a commented run file from flags or answers")
    command.add_argument("file", type=Path, nargs="?", help="run file to create (YAML)")
    command.add_argument("--examples", type=Path, metavar="FOLDER", help="copy yatt's example files instead")
    command.add_argument("--model", help="Hugging Face folder of the policy")
    command.add_argument("--data", action="append", help="JSONL or parquet file of prompts; repeatable")
    command.add_argument(
        "--prompt-key",
        default="",
        metavar="COLUMN",
        help="column of the prompt (default: one with a usual name)",
    )
    command.add_argument(
        "--ground-truth-key",
        metavar="COLUMN",
        help="column of the reference answer; '' for none (default: one with a usual name)",
    )
    command.add_argument("--val", action="append", default=[], help="file of held-out prompts; repeatable")
    command.add_argument(
        "--reward", help="builtin:NAME or a Python file with compute_score (default without --judge)"
    )
    command.add_argument("--judge", help="Hugging Face folder of a generative reward model")
    command.add_argument("--dir", help="run folder (default: runs/NAME of the file)")
    command.add_argument("--nodes", type=int, default=1, help="number of nodes (default: 1)")
    command.add_argument("--gpus-per-node", type=int, default=1, help="GPUs per node (default: 1)")
    command.add_argument(
        "--cpu", action="store_true", help="for a machine without GPUs: small sizes, float32"
    )
    command.set_defaults(action=_init)


def _init(arguments: argparse.Namespace) -> int:
    from yatt.cli.commands.initial import copy_examples, write_run_file

    return copy_examples(arguments.examples) if arguments.examples else write_run_file(arguments)
