"""Entries of `data.train_files` and `val_files`: patterns become files, hub data sets and mapped rows are
made.

What is made lies beside the run folder, in ``RUN.data``: on the filesystem that all nodes share, and is made
once. A made file is named by a digest of what it is made of: of a data set, its whole entry and the commit of
its repository; of rows with pictures, the rows and what decides about pictures; of mapped rows, the rows, the
function's file and what that imports. So a start with the same sources finds it, and one with others makes
another. A run's config names the made files.
"""

import glob
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from yatt.adapters.files.files import make_private
from yatt.adapters.inputs.data_file import opened_data
from yatt.adapters.inputs.data_rows import called_columns, has_column
from yatt.adapters.inputs.input_digests import imported_files
from yatt.adapters.processes.trial import raise_found, trial_process
from yatt.adapters.run_folder.run_config import load_run
from yatt.checkpoint.store.store import is_folder
from yatt.config.schema import DataSection, RunConfig
from yatt.core.attempts.exits import describe_exit
from yatt.errors import ConfigError
from yatt.launch.resolve.fetched import read_fetched
from yatt.launch.resolve.making_data import unfinished_name
from yatt.launch.resolve.making_media import MediaMaking
from yatt.models.folder import missing_config, takes_pictures
from yatt.paths import RunPaths

HUB = "hf:"
_HUB_ENTRY = re.compile(
    r"hf:(?:(?P<repository>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?|(?P<folder>/[^:]+))"
    r"(?::(?P<config>[^:]+))?:(?P<split>[^:]+)"
)
FORM = "hf:REPOSITORY[@REVISION][:CONFIG]:SPLIT"
CHILD = "yatt.launch.resolve.making_data"
MEDIA_STORE = "media"
"""Folder of pictures, in the folder of made files."""


def with_files(config: RunConfig) -> RunConfig:
    """Returns the config with absolute paths in place of patterns; entries of the hub stay.

    Raises:
        ConfigError: no file fits a pattern, or an entry of the hub is not complete.
    """
    return _with_entries(config, _files_of)


def _files_of(entry: str, key: str) -> list[str]:
    if entry.startswith(HUB):
        if not _HUB_ENTRY.fullmatch(entry):
            raise ConfigError(f"{entry}: write {FORM}.", key=key)
        return [entry]
    path = str(Path(entry).expanduser().absolute())
    if not glob.has_magic(path) or Path(path).exists():
        return [path]
    if found := [each for each in sorted(glob.glob(path, recursive=True)) if not Path(each).is_dir()]:
        return found
    raise ConfigError(f"no file fits the pattern {path}.", key=key, missing=path)


def _with_entries(config: RunConfig, made: Callable[[str, str], list[str]]) -> RunConfig:
    """Returns the config with other entries; an entry's weight is that of all that it became.

    Args:
        made: returns what an entry of that key becomes.

    Raises:
        ConfigError: two entries give the same file different weights.
    """
    data = config.data
    train = {entry: made(entry, "data.train_files") for entry in data.train_files}
    weights: dict[str, float] = {}
    for entry, weight in data.weights.items():
        for path in train[entry]:
            if weights.setdefault(path, weight) != weight:
                raise ConfigError(
                    f"{path} has the weights {weights[path]:g} and {weight:g}, by two entries of "
                    "data.train_files; write one weight.",
                    key="data.weights",
                )
    held_out = (path for entry in data.val_files for path in made(entry, "data.val_files"))
    section = replace(
        data,
        weights=weights,
        train_files=tuple(dict.fromkeys(path for paths in train.values() for path in paths)),
        val_files=tuple(dict.fromkeys(held_out)),
    )
    return replace(config, data=section)


def needs_making(data: DataSection) -> bool:
    """Whether some of the files have to be made, for a model that takes text only."""
    return any(entry.startswith(HUB) for entry in _entries_of(data)) or bool(data.map)


def _entries_of(data: DataSection) -> tuple[str, ...]:
    return (*data.train_files, *data.val_files)


def _may_have_pictures(data: DataSection, made: "_Made", source: str) -> bool:
    """Whether rows of a file may name pictures that have no references yet."""
    is_made = made.has(source, "media-", "mapped-")
    return not is_made and has_column(Path(source), (data.image_key, data.video_key))


def made_folder(run_dir: str) -> Path:
    """Returns the folder of the files that are made for a run."""
    return Path(f"{Path(run_dir).expanduser()}.data")


def with_made_data(config: RunConfig, folder: Path | None = None, earlier: Sequence[Path] = ()) -> RunConfig:
    """Returns the config with files that were made from the hub, with references to pictures, and by
    `data.map`; makes those that are not there.

    Args:
        config: a config returned by `completed_config`.
        folder: where they are made, by default `made_folder` of the run.
        earlier: other folders whose files were made earlier, and are not mapped again.

    Raises:
        ConfigError: a data set cannot be fetched, or the function failed.
    """
    sees = takes_pictures(config.model.path)
    if config.environment.images and not sees:
        raise ConfigError(
            f"{config.model.path} takes no pictures; remove it.",
            key="environment.images",
            missing=missing_config(config.model.path),
        )
    if not sees and not needs_making(config.data):
        return config
    folder = folder or made_folder(config.run.dir)
    made = _Made(folder, frozenset(str(place.resolve()) for place in (folder, *earlier)))
    limit_s = config.launch.phase_timeout_s
    config = _with_entries(config, partial(_fetched, folder, _files_of_run(config.run.dir), limit_s))
    may_have = partial(_may_have_pictures, config.data, made)
    if sees and (config.environment.images or any(map(may_have, _entries_of(config.data)))):
        store = config.data.media_store or str(folder / MEDIA_STORE)
        for private in (folder, Path(store)):
            make_private(private)
        config = replace(config, data=replace(config.data, media_store=store))
        config = _with_entries(config, partial(_with_references, made, config))
    return _with_entries(config, partial(_mapped, made, config)) if config.data.map else config


@dataclass(frozen=True, slots=True)
class _Made:
    """Where files are made, and the folders in which they were made earlier."""

    folder: Path
    earlier: frozenset[str]

    def has(self, source: str, *kinds: str) -> bool:
        """Whether a file was made before, by one of these beginnings of its name."""
        path = Path(source)
        return str(path.parent.resolve()) in self.earlier and path.name.startswith(kinds)


def _files_of_run(run_dir: str) -> frozenset[str]:
    """Names of the data files of the run in this folder, if there is one: it goes on with them."""
    paths = RunPaths(Path(run_dir).expanduser())
    try:
        known = load_run(paths).data if paths.config.is_file() else None
    except (ConfigError, OSError):  # whoever opens the folder says so
        return frozenset()
    return frozenset(map(os.path.basename, (*known.train_files, *known.val_files) if known else ()))


def _fetched(folder: Path, of_run: frozenset[str], limit_s: float, entry: str, key: str) -> list[str]:
    if not entry.startswith(HUB):
        return [entry]
    parts = _HUB_ENTRY.fullmatch(entry)
    assert parts is not None, "checked by `with_files`"
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", entry.removeprefix(HUB)).strip("-")[:40]
    stem = folder / f"hf-{readable}-{hashlib.sha256(entry.encode()).hexdigest()[:12]}"
    kept = sorted(
        name for name in of_run if name.startswith(f"{stem.name}-") or name == f"{stem.name}.parquet"
    )
    if kept and (folder / kept[0]).is_file():
        return [str(folder / kept[0])]
    arguments = [parts["repository"] or parts["folder"], parts["revision"] or "", parts["config"] or ""]
    sys.stderr.write(f"yatt: fetching {entry}, unless it is there ({key})\n")
    try:
        _make("fetch", [entry, *arguments, parts["split"]], stem, f"{key}: {entry}", limit_s)
    except ConfigError as error:
        raise error.with_each(lambda found: replace(found, missing=entry)) from error.__cause__
    found = read_fetched(stem)
    sys.stderr.write(f"yatt: {key}: {entry} is {found.in_words()}\n")
    return [str(found.path)]


def _with_references(made: _Made, config: RunConfig, source: str, key: str) -> list[str]:
    """Returns a file whose rows have references in place of pictures; the source, if no row can have any."""
    data = config.data
    if not _may_have_pictures(data, made, source):
        return [source]
    columns = None if data.map else called_columns(config)
    making = MediaMaking(
        image_key=data.image_key,
        video_key=data.video_key,
        columns=None if columns is None else sorted(columns),
        root=data.media_root,
        store=data.media_store,
        most_pixels=config.media.most_pixels,
        most_per_prompt=config.media.most_per_prompt,
        storage_options=config.media.storage_options,
        model=config.model.path,
        video=asdict(config.media.video),
    )
    is_new = not RunPaths(Path(config.run.dir).expanduser()).config.is_file()  # pictures may have changed
    limit_s = config.launch.phase_timeout_s
    return [made_references(making, source, made.folder, key, limit_s, is_anew=is_new)]


def made_references(
    making: MediaMaking, source: str, folder: Path, key: str, limit_s: float, *, is_anew: bool = False
) -> str:
    """Returns a file in a folder whose rows have references in place of the pictures of the source. Makes it,
    unless it is there.

    Args:
        is_anew: makes it in any case, since pictures may have changed.

    Raises:
        ConfigError: it cannot be made; names the first places.
    """
    if making.root and is_folder(making.root) and not Path(making.root).is_dir():
        says = f"there is no folder {making.root}; correct the path."
        raise ConfigError(says, key="data.media_root", missing=making.root)
    asked = json.dumps(asdict(making))
    with opened_data(Path(source)) as rows:
        made_from = hashlib.file_digest(rows, "sha256")
    made_from.update(f"{source} {asked}".encode())
    suffix = ".parquet" if source.endswith(".parquet") else ".jsonl"
    target = folder / f"media-{Path(source).stem[:40]}-{made_from.hexdigest()[:16]}{suffix}"
    if is_anew or not target.is_file():
        sys.stderr.write(f"yatt: making {target}: references to the pictures of {source}\n")
        _make("media", [source, asked], target, key, limit_s)
    return str(target)


def _mapped(made: _Made, config: RunConfig, source: str, key: str) -> list[str]:  # noqa: ARG001
    path, name = Path(config.data.map), config.data.map_function
    if made.has(source, "mapped-"):
        return [source]  # of a config that was made before
    try:
        with open(source, "rb") as rows:
            made_from = hashlib.file_digest(rows, "sha256")
        made_from.update(f"{source} {name}".encode())
        for file in imported_files(path):
            made_from.update(hashlib.sha256(file.read_bytes()).digest())
    except OSError as error:
        gone = error.filename if isinstance(error, FileNotFoundError | NotADirectoryError) else ""
        says = f"{error.filename} cannot be read ({error.strerror})."
        raise ConfigError(says, key="data.map", missing=gone) from error
    target = made.folder / f"mapped-{Path(source).stem[:40]}-{made_from.hexdigest()[:16]}.jsonl"
    if not target.is_file():
        sys.stderr.write(f"yatt: making {target} (data.map: {path})\n")
        _make("map", [source, str(path), name], target, f"data.map: {path}", config.launch.phase_timeout_s)
    return [str(target)]


def _make(kind: str, arguments: list[str], target: Path, about: str, limit_s: float) -> None:
    """Makes a file in another process.

    Raises:
        ConfigError: it could not be made; `about` begins the message.
    """
    make_private(target.parent)
    with trial_process(CHILD, [about, str(target), kind, str(target), *arguments]) as trial:
        try:
            how = describe_exit(trial.process.wait(limit_s))
        except subprocess.TimeoutExpired:
            trial.end()
            for unfinished in target.parent.glob(f"{glob.escape(unfinished_name(target, os.getpid()))}*"):
                unfinished.unlink(missing_ok=True)
            raise ConfigError(
                f"{about}: was not done within {limit_s:g} s (launch.phase_timeout_s)."
            ) from None
        trial.end()
        if not trial.found.exists():
            raise ConfigError(f"{about}: the process ended ({how}){trial.last_words()}.")
        raise_found(trial.found)
