"""The config of a node's processes: with the paths of copies on its local disk (`yatt.launch.node.staging`),
and the local folder of its checkpoint files."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from string import Template

from yatt.adapters.files.files import make_within, read_or_none, sealed_record, unsealed_any, write_atomically
from yatt.config.load import load_attempt
from yatt.config.schema import RunConfig
from yatt.paths import RunPaths


def note_copies(paths: RunPaths, attempt: int, node: int, copies: Mapping[str, str]) -> None:
    """Records the copy of each source, for the processes of this node in this attempt.

    Raises:
        OSError, ConfigError, FolderGone: the record cannot be written; then the sources are read.
    """
    path = paths.staged(attempt, node)
    make_within(paths.root, path.parent)
    write_atomically(path, sealed_record({"copies": dict(copies)}, attempt))


def copies_on_node(paths: RunPaths, attempt: int, node: int) -> dict[str, str]:
    """Returns the path of each copy on this node, by its source.

    Raises:
        OSError: the run folder does not answer.
    """
    noted = unsealed_any(read_or_none(paths.staged(attempt, node))) or {}
    return dict(noted.get("copies", {}))


def load_on_node(paths: RunPaths, attempt: int, node: int) -> RunConfig:
    """Like `load_attempt`, for a controller or worker.

    Raises:
        ConfigError: see `load_attempt`.
        OSError: the run folder does not answer.
    """
    return on_node(load_attempt(paths, attempt), paths, attempt, node)


def on_node(config: RunConfig, paths: RunPaths, attempt: int, node: int) -> RunConfig:
    """Returns the config with the paths of this node's copies instead of their sources, and variables in
    `checkpoint.local_dir` replaced. An unknown variable stays; then the folder is not absolute.

    Raises:
        OSError: the run folder does not answer.
    """
    copies = copies_on_node(paths, attempt, node)

    def place(source: str) -> str:
        with contextlib.suppress(OSError):  # the disk fails, or the copy was removed
            if source in copies and Path(copies[source]).exists():
                return str(copies[source])
        return source

    checkpoint, env = config.checkpoint, os.environ
    return replace(
        config,
        checkpoint=replace(checkpoint, local_dir=Template(checkpoint.local_dir).safe_substitute(env)),
        model=replace(config.model, path=place(config.model.path)),
        critic=replace(config.critic, path=place(config.critic.path)),
        genrms=tuple(replace(g, model=place(g.model)) if g.has_engine else g for g in config.genrms),
        data=replace(
            config.data,
            train_files=tuple(map(place, config.data.train_files)),
            val_files=tuple(map(place, config.data.val_files)),
            weights={place(file): weight for file, weight in config.data.weights.items()},
        ),
    )
