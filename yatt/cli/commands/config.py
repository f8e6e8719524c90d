"""`yatt config`: prints a resolved config, with the place of each value."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yatt.config.schema import RunConfig

    Parsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_config(commands: "Parsers") -> None:
    """Adds `yatt config`."""
    command = commands.add_parser("config", help="print the complete config, with the place of each value")
    command.add_argument("config", type=Path, help="run file (YAML) or run folder")
    command.add_argument("more", nargs="*", default=[], help="overlay files (*.yaml) and section.key=value")
    command.add_argument("--changed", action="store_true", help="leave out values that are defaults")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(action=_config)


def _config(arguments: argparse.Namespace) -> int:
    from yatt.config.load import plain_tree, without_secrets
    from yatt.config.origin import DEFAULT, annotated_yaml

    config, origins = _loaded(arguments.config, arguments.more)
    config = without_secrets(config)
    if not arguments.json:
        sys.stdout.write(annotated_yaml(config, origins, only_written=arguments.changed))
        return 0
    found = {
        key: {"value": plain_tree(_at(asdict(config), key)), "from": at}
        for key, at in origins.items()
        if not (arguments.changed and at == DEFAULT)
    }
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 0


def _loaded(path: Path, more: list[str]) -> "tuple[RunConfig, dict[str, str]]":
    from yatt.adapters.run_folder.run_config import load_run
    from yatt.config.origin import load_with_origins, origins_of_run
    from yatt.config.tree import files_and_arguments
    from yatt.errors import ConfigError
    from yatt.paths import RunPaths

    if path.is_dir():
        if more:
            raise ConfigError(f"{path} is a run folder, whose config is complete: remove {more[0]!r}.")
        paths = RunPaths(path)
        paths.check_is_run()
        config = load_run(paths)
        return config, origins_of_run(config)
    return load_with_origins(*files_and_arguments(path, more))


def _at(value: Any, key: str) -> Any:
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, (list, tuple)) else value[part]
    return value
