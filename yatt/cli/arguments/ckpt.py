"""Arguments of `yatt ckpt` and `yatt convert`; the work is in `yatt.cli.commands.checkpoints`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from yatt.errors import ConfigError

if TYPE_CHECKING:
    Parsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_ckpt(commands: "Parsers") -> None:
    """Adds `yatt ckpt` and its commands."""
    ckpt = commands.add_parser("ckpt", help="list, verify, export, prune or copy checkpoints")
    parts = ckpt.add_subparsers(metavar="COMMAND", required=True)
    listing = parts.add_parser("list", help="list checkpoints, and the one that a resume takes")
    _add_source(listing)
    _add_json(listing)
    listing.set_defaults(action=_list)
    verifying = parts.add_parser("verify", help="read every byte of checkpoints; exit code 1: damaged")
    _add_source(verifying)
    _add_iteration(verifying, "all")
    _add_json(verifying)
    verifying.set_defaults(action=_verify)
    exporting = parts.add_parser("export", help="write the weights as a Hugging Face folder")
    _add_source(exporting)
    _add_iteration(exporting, "newest whole one")
    exporting.add_argument("folder", type=Path, help="new folder")
    _add_model(exporting)
    _add_dtype(exporting)
    exporting.add_argument(
        "--critic", action="store_true", help="the critic's weights (PPO), with its value head"
    )
    exporting.set_defaults(action=_export)
    pruning = parts.add_parser("prune", help="delete checkpoints by the rules of checkpoint.keep...")
    pruning.add_argument("run", type=Path, help="run folder, run file, name or id")
    pruning.add_argument("--keep", type=int, help="replace checkpoint.keep")
    pruning.add_argument("--keep-every", type=int, help="replace checkpoint.keep_every")
    pruning.add_argument("--keep-best", type=int, help="replace checkpoint.keep_best")
    pruning.add_argument("--best-metric", help="replace checkpoint.best_metric")
    pruning.add_argument("--best-mode", choices=("max", "min"), help="replace checkpoint.best_mode")
    pruning.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    pruning.set_defaults(action=_prune)
    copying = parts.add_parser("copy", help="copy a checkpoint to another store")
    _add_source(copying)
    copying.add_argument("url", help="target: a folder or any fsspec URL")
    _add_iteration(copying, "newest whole one")
    copying.add_argument(
        "--to-option", action="append", default=[], metavar="KEY=VALUE", help="fsspec option of the target"
    )
    copying.set_defaults(action=_copy)


def add_convert(commands: "Parsers") -> None:
    """Adds `yatt convert`."""
    convert = commands.add_parser("convert", help="checkpoint to Hugging Face folder, or back")
    convert.add_argument(
        "source", help="run folder, store URL, or (with --to-checkpoint) Hugging Face folder"
    )
    convert.add_argument("folder", type=Path, nargs="?", help="new Hugging Face folder")
    convert.add_argument("--iteration", type=int, default=0, help="default: newest whole checkpoint")
    convert.add_argument("--to-checkpoint", metavar="URL", default="", help="write a new checkpoint store")
    convert.add_argument("--run-id", default="", help="owner of the new store (default: a random id)")
    _add_option(convert)
    _add_model(convert)
    _add_dtype(convert)
    convert.set_defaults(action=_convert)


def _add_source(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", metavar="RUN", help="run folder")
    command.add_argument("--store", action="store_true", help="RUN is the URL of a checkpoint store")
    _add_option(command)


def _add_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="fsspec option of the store's URL"
    )


def _add_iteration(command: argparse.ArgumentParser, default: str) -> None:
    command.add_argument("iteration", type=int, nargs="?", default=0, help=f"default: {default}")


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON object")


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", type=Path, help="folder with config and tokenizer (default: model.path)")
    command.add_argument(
        "--family", type=Path, help="file of a model family of your own (default: the run's)"
    )


def _add_dtype(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="",
        help="dtype of the weights (default: that of the model's own copy)",
    )


def _list(arguments: argparse.Namespace) -> int:
    from yatt.cli.commands.checkpoints import list_checkpoints, open_source

    source = open_source(arguments.run, is_store=arguments.store, options=arguments.option)
    return list_checkpoints(source, as_json=arguments.json)


def _verify(arguments: argparse.Namespace) -> int:
    from yatt.cli.commands.checkpoints import open_source, verify_checkpoints

    source = open_source(arguments.run, is_store=arguments.store, options=arguments.option)
    return verify_checkpoints(source, arguments.iteration, as_json=arguments.json)


def _export(arguments: argparse.Namespace) -> int:
    from yatt.checkpoint.commit.manifest_format import CRITIC_KEYS
    from yatt.checkpoint.convert.export import FolderForm
    from yatt.cli.commands.checkpoints import export_checkpoint, open_source

    source = open_source(arguments.run, is_store=arguments.store, options=arguments.option)
    return export_checkpoint(
        source,
        arguments.iteration,
        arguments.folder,
        arguments.model,
        arguments.family,
        FolderForm(dtype=arguments.dtype, prefix=CRITIC_KEYS if arguments.critic else ""),
    )


def _copy(arguments: argparse.Namespace) -> int:
    from yatt.cli.commands.checkpoints import copy_checkpoint, open_source

    source = open_source(arguments.run, is_store=arguments.store, options=arguments.option)
    return copy_checkpoint(source, arguments.url, arguments.iteration, arguments.to_option)


def _prune(arguments: argparse.Namespace) -> int:
    from yatt.cli.commands.checkpoints import prune_checkpoints

    names = ("keep", "keep_every", "keep_best", "best_metric", "best_mode")
    changes = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if any(isinstance(value, int) and value < (name == "keep") for name, value in changes.items()):
        raise ConfigError("ckpt prune: --keep is 1 or more, --keep-every and --keep-best are 0 or more.")
    return prune_checkpoints(arguments.run, changes, dry_run=arguments.dry_run)


def _convert(arguments: argparse.Namespace) -> int:
    from yatt.checkpoint.convert.export import FolderForm
    from yatt.cli.commands.checkpoints import convert_folder, export_checkpoint, source_of

    if bool(arguments.to_checkpoint) == bool(arguments.folder):
        raise ConfigError("convert: write either a new FOLDER, or --to-checkpoint URL.")
    if arguments.to_checkpoint and arguments.dtype:
        raise ConfigError(
            "convert: --dtype is for a new FOLDER; a checkpoint has float32 and bfloat16 copies."
        )
    if arguments.to_checkpoint:
        return convert_folder(
            Path(arguments.source),
            arguments.to_checkpoint,
            arguments.run_id,
            arguments.family,
            arguments.option,
        )
    source = source_of(arguments.source, arguments.option)
    return export_checkpoint(
        source,
        arguments.iteration,
        arguments.folder,
        arguments.model,
        arguments.family,
        FolderForm(dtype=arguments.dtype),
    )
