"""Arguments of `yatt eval`; the work is in `yatt.cli.commands.evaluating`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Parsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_eval(commands: "Parsers") -> None:
    """Adds `yatt eval`."""
    command = commands.add_parser(
        "eval", help="sample a run's policy or a model on data files, and print rewards and pass@k"
    )
    command.add_argument("source", type=Path, help="run folder, or Hugging Face folder")
    command.add_argument(
        "more",
        nargs="*",
        default=[],
        help="data files (default: the run's data.val_files) and section.key=value",
    )
    command.add_argument("--iteration", type=int, default=0, help="checkpoint of the run (default: newest)")
    command.add_argument("--like", type=Path, metavar="RUN_FILE", help="take sampling and scores from it")
    for option, kind, metavar, text in (
        ("--n", int, "N", "samples per prompt (default: the run's rollout.n; a model folder: 1)"),
        ("--temperature", float, "T", "sampling temperature; 0: greedy (default: the run's)"),
        ("--limit", int, "N", "use only the first N prompts"),
        ("--seed", int, "N", "seed of the samples (default: the run's)"),
        ("--max-tokens", int, "N", "maximum length of a completion (rollout.max_response_tokens)"),
        ("--pass-at", float, "SCORE", "a sample passes if its score is SCORE or more (default: 1)"),
    ):
        command.add_argument(option, type=kind, metavar=metavar, help=text)
    command.add_argument("--k", default="", metavar="1,4,8", help="values of k of pass@k (default: 1 and n)")
    command.add_argument(
        "--reward",
        action="append",
        default=[],
        metavar="REWARD",
        help="of a model folder: builtin:NAME or FILE.py[:FUNCTION]; may be repeated",
    )
    command.add_argument("--prompt-key", default="", metavar="COLUMN", help="column of the prompt")
    command.add_argument("--ground-truth-key", default="", metavar="COLUMN", help="column of the answer")
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    command.add_argument(
        "--nodes", type=int, default=0, metavar="N", help="nodes (default: as few as one engine needs)"
    )
    command.add_argument(
        "--submit", type=Path, metavar="SITE_FILE", help="submit it as a Slurm job, which writes --out"
    )
    command.add_argument("--out", type=Path, metavar="FOLDER", help="new folder for samples and result")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(action=_eval)


def _eval(arguments: argparse.Namespace) -> int:
    from yatt.cli.commands.evaluating import evaluate

    return evaluate(arguments)
